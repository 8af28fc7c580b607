"""One shim's session: order, registration, and an end that proves quiescence."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvd.core import events
from kvd.local import server
from kvd.memory.engine import EngineMemory
from kvd.protocol import local
from kvd.protocol.codes import Code
from tests.conftest import wait_for_async
from tests.unit.shell.fakes import (
    BLOCK_NBYTES,
    BLOCKS,
    TIMEOUT_S,
    Shell,
    Shim,
    geometry,
    hello,
    memfd,
)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


async def ended(shim: Shim) -> None:
    """The connection ends without another message."""
    assert await shim.recv() is None


async def still_serves(shell: Shell) -> None:
    """Nothing else was harmed: another shim is let in."""
    await shell.greeted()


async def test_hello_is_welcomed_and_told_to_the_core(shell: Shell) -> None:
    shim = shell.connect()
    shim.send(hello(engine_id="e1", epoch=9))
    welcome = await shim.expect(local.Welcome)
    assert welcome.boot_id == 7
    opened = await shell.hears(events.SessionOpened)
    assert (opened.engine_id, opened.epoch) == ("e1", 9)
    assert not opened.probe


async def test_who_only_tries_peers_is_told_apart(shell: Shell) -> None:
    shell.connect().send(hello(client=local.DOCTOR))
    opened = await shell.hears(events.SessionOpened)
    assert opened.probe


async def test_memory_is_mapped_then_told_to_the_core(shell: Shell) -> None:
    _, number = await shell.registered()
    event = await shell.hears(events.SessionRegistered)
    assert event.num_blocks == BLOCKS
    assert event.fence_slots == 16
    assert [s.nbytes for s in event.segments] == [BLOCKS * BLOCK_NBYTES]
    memory = shell.server.memory(number)
    assert memory is not None
    assert memory.writable


async def test_messages_reach_the_core_in_order(shell: Shell) -> None:
    shim, number = await shell.registered()
    for seq in range(100):
        # The kernel queues few frames, so the loop has to read meanwhile.
        await asyncio.to_thread(shim.send, local.Ping(seq))
    await shell.hears(events.ShimMessage, 100)
    heard = [e for e in shell.heard if isinstance(e, events.ShimMessage)]
    assert [e.message for e in heard] == [local.Ping(seq) for seq in range(100)]
    assert {e.session for e in heard} == {number}


async def test_memory_that_does_not_fit_is_refused_and_closed(shell: Shell) -> None:
    shim = await shell.greeted()
    small = memfd(BLOCK_NBYTES)
    before = open_fds()
    shim.send(local.AddSegment(0, "memfd", BLOCKS * BLOCK_NBYTES), [small])
    shim.send(local.Register(geometry(), BLOCKS))
    refused = await shim.expect(local.Refused)
    assert refused.code == Code.BAD_MEMORY
    closed = await shell.hears(events.SessionClosed)
    assert open_fds() == before
    os.close(small)
    shell.server.release(closed.session)
    await ended(shim)


async def test_nothing_is_read_while_memory_is_being_mapped(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    real = EngineMemory.open

    def slow(**kwargs: Any) -> EngineMemory:
        go.wait(10)
        return real(**kwargs)

    monkeypatch.setattr(EngineMemory, "open", slow)
    shim = await shell.greeted()
    await shim.describe()
    shim.send(local.Ping(1))
    number = (await shell.hears(events.SessionOpened)).session
    await wait_for_async(lambda: number in shell.server._mapping, what="mapping has begun")
    await still_serves(shell)
    assert not [e for e in shell.heard if isinstance(e, events.ShimMessage)]
    go.set()
    await shell.hears(events.ShimMessage)
    kinds = [type(e) for e in shell.heard if getattr(e, "session", None) == number]
    assert kinds == [events.SessionOpened, events.SessionRegistered, events.ShimMessage]


async def test_a_slow_shim_gets_everything_in_order(make_shell: Callable[..., Shell]) -> None:
    shell = make_shell(max_queue=4096)
    shim, number = await shell.registered()
    for seq in range(500):
        shell.server.send(number, local.Pong(seq))
    got = [await shim.expect(local.Pong) for _ in range(500)]
    assert [pong.seq for pong in got] == list(range(500))


async def test_the_socket_closes_only_when_no_copy_can_touch_the_memory(shell: Shell) -> None:
    shim, number = await shell.registered()
    memory = shell.server.memory(number)
    assert memory is not None
    memory.pin()
    shim.send(local.Bye())
    await shell.hears(events.SessionClosed)
    shell.server.release(number)
    await wait_for_async(lambda: memory.closing, what="the memory is asked to close")
    shim.sock.settimeout(0.2)
    with pytest.raises(TimeoutError):
        await shim.recv()
    assert not memory.closed
    shim.sock.settimeout(TIMEOUT_S)
    memory.unpin()
    await ended(shim)
    assert memory.closed


async def test_eof_is_told_once_and_memory_is_given_back(shell: Shell) -> None:
    before = open_fds()
    shim, number = await shell.registered()
    memory = shell.server.memory(number)
    assert memory is not None
    shim.close()
    await shell.hears(events.SessionClosed)
    shell.server.release(number)
    await wait_for_async(lambda: len(shell.server) == 0, what="the session is forgotten")
    assert memory.closed
    assert shell.server.mapped_nbytes() == 0
    assert len([e for e in shell.heard if isinstance(e, events.SessionClosed)]) == 1
    assert open_fds() == before


async def test_what_the_core_says_before_welcome_comes_after_it(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def feed(event: events.Event) -> None:
        if isinstance(event, events.SessionOpened):
            shell.server.send(event.session, local.State(draining=True))

    monkeypatch.setattr(shell.server, "_feed", feed)
    shim = shell.connect()
    shim.send(hello())
    await shim.expect(local.Welcome)
    await shim.expect(local.State)


async def test_a_session_that_the_core_turns_away_hears_only_why(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def feed(event: events.Event) -> None:
        if isinstance(event, events.SessionOpened):
            shell.server.send(event.session, local.Refused(Code.STALE_EPOCH, "too old"))
            shell.server.release(event.session)

    monkeypatch.setattr(shell.server, "_feed", feed)
    shim = shell.connect()
    shim.send(hello())
    refused = await shim.expect(local.Refused)
    assert refused.code == Code.STALE_EPOCH
    await ended(shim)
    assert len(shell.server) == 0


async def test_mapping_has_a_deadline_and_what_comes_later_is_closed(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    late: list[EngineMemory] = []
    real = EngineMemory.open

    def slow(**kwargs: Any) -> EngineMemory:
        go.wait(10)
        late.append(real(**kwargs))
        return late[0]

    monkeypatch.setattr(EngineMemory, "open", slow)
    monkeypatch.setattr(server, "MAP_TIMEOUT_S", 0.05)
    shim = await shell.greeted()
    await shim.describe()
    refused = await shim.expect(local.Refused)
    assert refused.code == Code.DEADLINE
    closed = await shell.hears(events.SessionClosed)
    shell.server.release(closed.session)
    await ended(shim)
    go.set()
    await wait_for_async(lambda: late and late[0].closed, what="the late memory is closed")
