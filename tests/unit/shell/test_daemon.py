"""The whole daemon in this process, with bugs put into its core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvd.core import events
from kvd.core.instructions import Instruction
from kvd.daemon import Daemon
from kvd.metrics import Metrics
from kvd.protocol import local
from kvd.protocol.codes import Code
from kvd.settings import Settings
from tests.conftest import wait_for_async
from tests.unit.shell.fakes import Shim, hello


class Running:
    """A daemon, and its shims."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.daemon = Daemon(
            Settings(socket=str(folder / "kvd.sock"), metrics="", **settings), Metrics()
        )
        self.shims: list[Shim] = []

    async def registered(self, engine_id: str) -> Shim:
        shim = Shim(self.daemon.addresses["socket"])
        self.shims.append(shim)
        shim.send(hello(engine_id=engine_id))
        await shim.expect(local.Welcome)
        await shim.describe()
        await shim.expect(local.Registered)
        return shim

    async def answers(self, shim: Shim) -> bool:
        shim.send(local.Ping(1))
        return await shim.recv() == local.Pong(1)

    def break_core(self, breaks: Callable[[events.Event], bool]) -> None:
        """From now on the core raises at these events, before it does anything."""
        core = self.daemon._core
        real = core.handle

        def handle(event: events.Event, now: float) -> list[Instruction]:
            if breaks(event):
                raise RuntimeError("a bug that a test put there")
            return real(event, now)

        core.handle = handle  # type: ignore[method-assign]


@pytest.fixture
async def running(tmp_run_dir: Path) -> AsyncIterator[Running]:
    made = Running(tmp_run_dir)
    await made.daemon.start()
    yield made
    for shim in made.shims:
        shim.close()
    await made.daemon.stop()


async def test_a_bug_at_a_message_ends_only_that_session(running: Running) -> None:
    bad, good = await running.registered("bad"), await running.registered("good")
    running.break_core(
        lambda event: (
            isinstance(event, events.ShimMessage) and isinstance(event.message, local.RevokeAll)
        )
    )
    bad.send(local.RevokeAll())
    refused = await bad.expect(local.Refused)
    assert refused.code == Code.INTERNAL
    assert await bad.recv() is None
    assert await running.answers(good)
    assert running.daemon.failure is None
    assert len(running.daemon._local) == 1


async def test_a_bug_at_the_end_of_a_session_still_gives_its_memory_back(running: Running) -> None:
    shim = await running.registered("bad")
    running.break_core(lambda event: isinstance(event, events.SessionClosed))
    shim.send(local.Bye())
    assert await shim.recv() is None
    await wait_for_async(lambda: len(running.daemon._local) == 0, what="released")
    assert running.daemon._local.mapped_nbytes() == 0


async def test_a_bug_at_every_tick_leaves_the_daemon_alive(running: Running) -> None:
    shim = await running.registered("good")
    running.break_core(lambda event: isinstance(event, events.Tick))
    running.daemon._feed(events.Tick())
    assert await running.answers(shim)


async def test_a_part_that_must_not_end_ends_the_daemon(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_self: object) -> None:
        raise RuntimeError("a bug that a test put there")

    monkeypatch.setattr(Daemon, "_gauges", broken)
    async with asyncio.timeout(10):
        await running.daemon.run_until_stopped()
    assert isinstance(running.daemon.failure, RuntimeError)


async def test_without_a_link_only_tcp_is_left(
    tmp_run_dir: Path,
) -> None:
    """The link's path is taken by something that is not ours to remove."""
    (tmp_run_dir / "kvd.sock.link").write_text("x")
    running = Running(tmp_run_dir)
    await running.daemon.start()
    assert running.daemon._links is None
    await running.registered("e")
    for shim in running.shims:
        shim.close()
    await running.daemon.stop()
    refused = Running(tmp_run_dir, transport="shm")
    with pytest.raises(Exception, match=r"kvd\.sock\.link"):
        await refused.daemon.start()
    await refused.daemon.stop()
    assert (tmp_run_dir / "kvd.sock.link").read_text() == "x"


async def test_stopping_before_the_start_is_harmless(tmp_run_dir: Path) -> None:
    running = Running(tmp_run_dir)
    running.daemon.drain()
    await running.daemon.stop()
    assert list(tmp_run_dir.iterdir()) == []


async def test_gauges_follow_what_is_mapped(running: Running) -> None:
    metrics = running.daemon.metrics
    shim = await running.registered("e")
    running.daemon._gauges()
    assert metrics.value("kvd_sessions") == 1
    assert metrics.value("kvd_mapped_bytes") == 8 * 4096
    shim.close()
    await wait_for_async(lambda: len(running.daemon._local) == 0, what="released")
    running.daemon._gauges()
    assert metrics.value("kvd_sessions") == 0
    assert metrics.value("kvd_mapped_bytes") == 0


async def test_the_loops_lag_is_measured(running: Running) -> None:
    import time

    await asyncio.sleep(0)
    time.sleep(0.8)  # the loop hangs, as it never should
    await wait_for_async(
        lambda: (running.daemon.metrics.value("kvd_loop_lag_seconds") or 0) > 0.2, what="lag"
    )
