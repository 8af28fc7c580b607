"""Threads that do not get on are named; those that wait or work are not."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvd.transport.copy_pool import CopyPool
from kvd.transport.pulse import Pulse
from kvd.transport.tcp_serving import Connection
from kvd.transport.tcp_wire import pack_request
from tests.conftest import wait_for
from tests.contract.tcp_rig import BLOCK, PATIENT, RawClient, request, served


def test_a_thread_is_stuck_once_it_is_busy_for_too_long() -> None:
    now = 0.0
    pulse = Pulse(lambda: now)
    name = threading.current_thread().name
    assert pulse.stuck(1.0) == []
    pulse.busy()
    now = 1.0
    assert pulse.stuck(1.0) == []
    now = 1.1
    assert pulse.stuck(1.0) == [name]
    pulse.busy()
    assert pulse.stuck(1.0) == []
    now = 9.0
    pulse.idle()
    assert pulse.stuck(1.0) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_copy_threads_that_died_are_named() -> None:
    class Broken:
        owner = 1

        def next_batch(self) -> None:
            raise SystemExit  # ends the thread without a word

        def finish(self) -> None: ...

    pool = CopyPool(1)
    assert pool.dead() == []
    pool.submit(Broken())
    wait_for(lambda: pool.dead() == ["kvd-copy-0"], what="it is named")
    pool.close(5)
    assert pool.dead() == []


async def test_tcp_threads_are_stuck_while_they_are_at_work_and_idle_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ends: a serving thread that may not look at the fence, and the one that waits for it."""
    go_on = threading.Event()
    fault = Connection._fault

    def hangs(*args: object) -> object:
        go_on.wait(60)
        return fault(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Connection, "_fault", hangs)
    async with served(monkeypatch, PATIENT) as (_, harness):
        pulse = harness.server.pulse
        client = RawClient(harness.server.port)
        try:
            client.sock.sendall(pack_request(request([1])))
            await asyncio.to_thread(
                wait_for, lambda: pulse.stuck(0.05) == ["kvd-data-serve"], what="it is named"
            )
            go_on.set()
            await asyncio.to_thread(client.read, BLOCK)
            await asyncio.to_thread(
                wait_for, lambda: pulse._beats == {}, what="the thread waits for requests"
            )
            assert pulse.stuck(0.0) == []
        finally:
            go_on.set()
            client.sock.close()
