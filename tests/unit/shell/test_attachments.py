"""Opening transports and running pulls: each is answered by one event, and nothing stays open."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvd.attachments import Attachments
from kvd.core import events
from kvd.core.instructions import OpenTransport, StartPull
from kvd.errors import KvdError
from kvd.memory.engine import EngineMemory
from kvd.peers.client import PeerClient
from kvd.protocol import peer
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr
from kvd.tasks import TaskSet
from kvd.transport.base import PullJob, TransportError
from tests.conftest import wait_for_async
from tests.unit.shell.fakes import BLOCK_NBYTES, BLOCKS, layers, memfd

REMOTE = PeerAddr("127.0.0.1", 5)
SEGMENT = peer.SegmentInfo(0, "memfd", BLOCKS * BLOCK_NBYTES, "cpu")


class FakePuller:
    """Pulls end when the test says how."""

    def __init__(self) -> None:
        self.jobs: dict[int, asyncio.Future[int]] = {}
        self.stopped: list[str] = []
        self.closed = False

    async def pull(self, job: PullJob) -> int:
        self.jobs[job.job] = asyncio.get_running_loop().create_future()
        return await self.jobs[job.job]

    def stop(self, fetch_id: str) -> None:
        self.stopped.append(fetch_id)

    async def aclose(self) -> None:
        self.closed = True


class World:
    """An Attachments with everything around it faked but the memory."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.heard: list[events.Event] = []
        self.tasks = TaskSet()
        self.pullers: list[FakePuller] = []
        self.remotes: list[EngineMemory] = []
        self.tcp_asked: list[tuple[str, int, int]] = []
        self.own: object | None = object()
        self.given: list[int] = []
        self.link_error: KvdError | None = None
        self.go = asyncio.Event()
        self.go.set()
        link = SimpleNamespace(memory=self._link_memory)
        self.peer: Any = SimpleNamespace(up=True, ip="127.0.0.9", link=link)
        self.made = Attachments(
            feed=self.heard.append,
            tasks=self.tasks,
            executor=executor,
            memory_of=lambda _session: cast(EngineMemory | None, self.own),
            peer_of=lambda _address: cast(PeerClient | None, self.peer),
            pullers=self,
        )

    async def _link_memory(self, _key: int, _timeout: float) -> list[int]:
        await self.go.wait()
        if self.link_error is not None:
            raise self.link_error
        return self.given

    def shm(self, local: EngineMemory, remote: EngineMemory) -> FakePuller:
        self.remotes.append(remote)
        return self._puller()

    def tcp(self, local: EngineMemory, host: str, port: int, remote_blocks: int) -> FakePuller:
        self.tcp_asked.append((host, port, remote_blocks))
        return self._puller()

    def _puller(self) -> FakePuller:
        self.pullers.append(FakePuller())
        return self.pullers[-1]

    def open(self, name: str = "a", transport: str = "shm", port: int | None = None) -> None:
        answer = peer.AttachOk(name, 1, transport, BLOCKS, [SEGMENT], layers(), 16, 7, port)
        self.made.open(OpenTransport(name, REMOTE, 3, answer))

    def pull(self, job: int, fetch_id: str = "f", name: str = "a") -> None:
        self.made.start_pull(StartPull(job, name, 3, fetch_id, b"t" * 16, 0, 1, (), 0))

    async def told(self, count: int = 1) -> list[events.Event]:
        await wait_for_async(lambda: len(self.heard) >= count, what=f"{count} events")
        await asyncio.sleep(0)
        return self.heard


@pytest.fixture
async def world(executor: ThreadPoolExecutor) -> AsyncIterator[World]:
    made = World(executor)
    made.given = [memfd(BLOCKS * BLOCK_NBYTES), memfd(4096)]
    before = len(os.listdir("/proc/self/fd")) - 2
    yield made
    made.go.set()
    made.made.close_all()
    assert await made.tasks.wait(5)
    assert all(remote.closed for remote in made.remotes)
    assert made.made.mapped_nbytes() == 0
    assert len(os.listdir("/proc/self/fd")) <= before, "a descriptor was left open"


async def test_shared_memory_is_mapped_then_told(world: World) -> None:
    world.open()
    assert await world.told() == [events.TransportOpened("a")]
    (remote,) = world.remotes
    assert not remote.writable
    assert world.made.mapped_nbytes() == BLOCKS * BLOCK_NBYTES
    world.made.close("a")
    await wait_for_async(lambda: remote.closed, what="unmapped")
    assert world.pullers[0].closed


async def test_tcp_goes_to_the_address_that_we_talk_to(world: World) -> None:
    world.open(transport="tcp", port=77)
    assert await world.told() == [events.TransportOpened("a")]
    assert world.tcp_asked == [("127.0.0.9", 77, BLOCKS)]
    for fd in world.given:
        os.close(fd)


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ({"own": None}, Code.ENGINE_GONE),
        ({"peer": None}, Code.PEER_LOST),
        ({"peer": SimpleNamespace(up=False)}, Code.PEER_LOST),
        ({"peer": SimpleNamespace(up=True, ip="", link=None)}, Code.TRANSPORT_UNAVAILABLE),
        ({"link_error": KvdError("gone", Code.ENGINE_GONE)}, Code.ENGINE_GONE),
    ],
)
async def test_what_cannot_be_opened_is_told_with_its_code(
    world: World, how: dict[str, Any], code: Code
) -> None:
    for name, value in how.items():
        setattr(world, name, value)
    world.open()
    (failed,) = await world.told()
    assert isinstance(failed, events.TransportFailed)
    assert failed.code == code
    for fd in world.given:
        os.close(fd)


@pytest.mark.parametrize("transport", ["tcp", "nccl"])
async def test_an_answer_that_makes_no_sense_is_refused(world: World, transport: str) -> None:
    world.open(transport=transport)
    (failed,) = await world.told()
    assert isinstance(failed, events.TransportFailed)
    assert failed.code in (Code.BAD_MESSAGE, Code.TRANSPORT_UNAVAILABLE)
    for fd in world.given:
        os.close(fd)


async def test_descriptors_that_do_not_add_up_are_refused_and_closed(world: World) -> None:
    world.given.append(memfd(1))
    world.open()
    (failed,) = await world.told()
    assert isinstance(failed, events.TransportFailed)
    assert failed.code == Code.BAD_MEMORY
    assert "3 descriptors" in failed.detail


async def test_memory_that_is_too_small_is_refused_and_closed(world: World) -> None:
    os.ftruncate(world.given[0], BLOCK_NBYTES)
    world.open()
    (failed,) = await world.told()
    assert isinstance(failed, events.TransportFailed)
    assert failed.code == Code.BAD_MEMORY


async def test_one_closed_while_it_opens_is_never_told_and_unmapped(world: World) -> None:
    world.go.clear()
    world.open()
    await asyncio.sleep(0)
    world.made.close("a")
    world.go.set()
    assert await world.tasks.wait(5)
    assert world.heard == []
    assert world.remotes[0].closed


async def test_pulls_are_answered_each(world: World) -> None:
    world.open()
    await world.told()
    for job in range(4):
        world.pull(job)
    (puller,) = world.pullers
    await wait_for_async(lambda: len(puller.jobs) == 4, what="pulls run")
    assert world.made.num_jobs == 4
    assert world.made.session_of_job(2) == 3
    puller.jobs[2].set_result(99)
    puller.jobs[0].set_exception(TransportError(Code.FENCED, "word"))
    puller.jobs[1].set_exception(KvdError("k", Code.OVERLOADED))
    puller.jobs[3].set_exception(ZeroDivisionError("a bug"))
    heard = (await world.told(5))[1:]
    assert events.PullDone(2, 99) in heard
    assert events.PullFailed(0, Code.FENCED, "word") in heard
    assert events.PullFailed(1, Code.OVERLOADED, "k") in heard
    (bug,) = [e for e in heard if isinstance(e, events.PullFailed) and e.job == 3]
    assert bug.code == Code.INTERNAL
    assert world.made.num_jobs == 0


@pytest.mark.parametrize("code", [Code.RELEASED, Code.UNKNOWN_TRANSFER])
async def test_a_closed_ticket_waits_for_the_daemons_reason(world: World, code: Code) -> None:
    world.open()
    await world.told()
    world.pull(1)
    await wait_for_async(lambda: world.pullers[0].jobs, what="the pull runs")
    world.pullers[0].jobs[1].set_exception(TransportError(code, "ticket"))
    assert (await world.told(2))[1] == events.PullFailed(1, Code.FENCED, "ticket")


async def test_a_pull_on_nothing_fails_at_once(world: World) -> None:
    world.pull(1, name="nowhere")
    (failed,) = world.heard
    assert isinstance(failed, events.PullFailed)
    assert failed.code == Code.TRANSPORT_ERROR
    for fd in world.given:
        os.close(fd)


async def test_stopping_concerns_only_that_fetch(world: World) -> None:
    world.open()
    await world.told()
    world.pull(1, "f1")
    world.pull(2, "f1")
    world.pull(3, "f2")
    (puller,) = world.pullers
    world.made.stop_pulls("f1")
    world.made.stop_pulls("unknown")
    assert puller.stopped == ["f1"]
    world.made.stop_session(3)
    assert sorted(puller.stopped) == ["f1", "f1", "f1", "f2"]
    await wait_for_async(lambda: len(puller.jobs) == 3, what="pulls run")
    for future in puller.jobs.values():
        future.set_exception(TransportError(Code.CANCELLED, ""))
    await world.told(4)
