"""A daemon that dies with a fetch out: its socket closes before its GPU's work has ended."""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from connector_shim.client import Client
from connector_shim.events import Down, Event
from connector_shim.memory import shared_blocks
from connector_shim.peerproc import PeerProcess
from connector_shim.session import LEAVE_HANGS
from kvd.protocol.local import FetchDone
from tests.conftest import wait_for
from tests.unit.client.fake import NUM_BLOCKS, FakeClock, FakeDaemon, fetch, of_type, state
from tests.unit.client.hanging_daemon import LATE

ROOT = Path(__file__).parents[3]
HANG_S = 8.0


class GpuEngine:
    """A client whose blocks are said to be on a GPU. They are shared memory, to be looked at."""

    def __init__(self, path: Path) -> None:
        self.clock = FakeClock()
        self.client = Client(str(path), engine_id="engine", daemon_hang_s=HANG_S, clock=self.clock)
        memory, self.blocks = shared_blocks(2, NUM_BLOCKS, 64)
        on_gpu = [replace(one, kind="vmm", device="GPU-01") for one in memory.segments]
        self.client.describe(replace(memory, segments=tuple(on_gpu)))
        memory.close()

    @property
    def process(self) -> PeerProcess:
        assert self.client._session._wire is not None
        return self.client._session._wire.process

    def poll_for(self, seconds: float) -> list[Event]:
        events: list[Event] = []
        for _ in range(int(seconds)):
            self.clock.now += 1.0
            events += self.client.poll()
        return events

    def close(self) -> None:
        self.client.close(0.0)
        self.blocks.close()


@pytest.fixture
def engine(path: Path) -> Iterator[GpuEngine]:
    found = GpuEngine(path)
    yield found
    found.close()


@pytest.fixture
def start(path: Path, engine: GpuEngine) -> Iterator[Callable[[str], Callable[[], None]]]:
    """Starts a daemon of that module, and lets it have a fetch. What is returned ends its death."""
    children: list[subprocess.Popen[bytes]] = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(1)
    read_end, write_end = os.pipe()
    open_ends = {read_end, write_end}

    def close(fd: int) -> None:
        if fd in open_ends:
            open_ends.remove(fd)
            os.close(fd)

    def begin(module: str) -> Callable[[], None]:
        fds = (listener.fileno(), read_end)
        children.append(
            subprocess.Popen(
                [sys.executable, "-m", f"tests.unit.client.{module}", *map(str, fds)],
                pass_fds=fds,
                cwd=ROOT,
            )
        )
        listener.close()
        close(read_end)
        wait_for(lambda: (engine.client.poll(), state(engine.client) == "up")[1], what="it is up")
        fetch(engine.client)
        return lambda: close(write_end)

    yield begin
    for child in children:
        child.kill()
        child.wait(10)
    for fd in [*open_ends]:
        close(fd)
    listener.close()


def died(engine: GpuEngine) -> bool:
    """Polls; whether the end of the socket was found."""
    return bool(of_type(engine.client.poll(), Down))


def ended(engine: GpuEngine) -> FetchDone:
    def told() -> list[FetchDone]:
        return of_type(engine.client.poll(), FetchDone)

    return wait_for(told, what="the end of the fetch is told")[0]


def test_blocks_on_a_gpu_stay_held_until_a_dying_daemon_has_exited(
    engine: GpuEngine, start: Callable[[str], Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    finish = start("dying_daemon")
    wait_for(lambda: died(engine), what="the socket is closed")
    # It can take as long as it likes.
    early = engine.poll_for(20 * HANG_S)
    assert len(engine.client.fetches) == 1, "told ended while the GPU could write into its blocks"
    assert early == []
    assert set(engine.blocks[:]) == {0}
    assert "kills" not in engine.client.statistics()
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == [
        f"kvd: the process of the daemon at {engine.client._session._path} does not finish "
        "exiting; the blocks of 1 fetches stay held until it has"
    ]
    finish()
    done = ended(engine)
    assert (done.code, done.bad) == ("daemon_gone", [b"\3"])
    # What the GPU wrote last is there by now, and nothing more can come.
    assert set(engine.blocks[:]) == {LATE}


def test_the_exit_itself_wakes_a_client_that_waits(
    engine: GpuEngine, start: Callable[[str], Callable[[], None]]
) -> None:
    finish = start("dying_daemon")
    wait_for(lambda: died(engine), what="the socket is closed")
    finish()
    # The fake clock stands still: neither time nor the closed socket ends this.
    (done,) = engine.client.poll(3600.0)
    assert isinstance(done, FetchDone)


def test_a_killed_daemon_gives_the_blocks_of_a_gpu_back(
    engine: GpuEngine, start: Callable[[str], Callable[[], None]]
) -> None:
    start("hanging_daemon")
    pid = engine.process.pid
    with os.fdopen(os.pidfd_open(pid)) as witness:
        os.kill(pid, signal.SIGKILL)
        done = ended(engine)
        exited, _, _ = select.select([witness], [], [], 0)
    assert exited == [witness]
    assert done.code == "daemon_gone"
    assert set(engine.blocks[:]) == {0}


def test_a_daemon_that_lives_closes_in_order(engine: GpuEngine, daemon: FakeDaemon) -> None:
    """It does so only when its copies have stopped, on a GPU too: nobody waits for its exit."""
    daemon.take_in(engine.client)
    fetch(engine.client)
    daemon.hang_up()
    assert [type(event) for event in engine.client.poll()] == [Down, FetchDone]


def test_where_the_process_cannot_be_seen_the_blocks_are_held_for_a_while(
    engine: GpuEngine, daemon: FakeDaemon, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.take_in(engine.client)
    fetch(engine.client)
    engine.process.close()
    daemon.hang_up()
    assert [type(event) for event in engine.client.poll()] == [Down]
    assert engine.client.fileno() is None
    assert engine.poll_for(LEAVE_HANGS * HANG_S - 2) == []
    (done,) = engine.poll_for(4)
    assert isinstance(done, FetchDone)
    assert done.code == "daemon_gone"
    (record,) = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert "cannot be seen from here" in record.getMessage()
    # It goes on with the next daemon.
    daemon.take_in(engine.client)


def test_silence_before_the_end_of_the_socket_counts_for_nothing(
    engine: GpuEngine, daemon: FakeDaemon
) -> None:
    daemon.take_in(engine.client)
    fetch(engine.client)
    engine.process.close()
    assert [type(event) for event in engine.poll_for(10 * HANG_S)] == [Down]
    daemon.hang_up()
    assert engine.poll_for(LEAVE_HANGS * HANG_S - 2) == []
    assert [type(event) for event in engine.poll_for(4)] == [FetchDone]


def test_what_is_known_of_a_process(
    engine: GpuEngine, start: Callable[[str], Callable[[], None]]
) -> None:
    finish = start("dying_daemon")
    process = engine.process
    wait_for(lambda: process.lives() is False, what="it is seen to exit")
    assert not process.exited()
    finish()
    wait_for(process.exited, what="it has exited")
    assert process.lives() is False
    process.close()
    assert process.lives() is None
