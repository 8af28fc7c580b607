"""Shims that are broken, foreign or hostile: what they do ends their own session, no other."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from kvd.core import events
from kvd.local import seqpacket, session
from kvd.protocol import local
from kvd.protocol.codes import Code
from kvd.protocol.version import PROTO_MAJOR
from tests.conftest import wait_for_async
from tests.unit.shell.fakes import (
    BLOCK_NBYTES,
    BLOCKS,
    PICKLE,
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


@pytest.mark.parametrize(
    "data",
    [
        PICKLE,
        b"\x00",
        b"\xff" * 1000,
        b"\xdb\x7f\xff\xff\xff",  # a string that claims two GiB
        b"\x91\xa4Nope",
        b"\x92\xa4Ping\xa3abc",
    ],
    ids=["pickle", "zero", "noise", "length-claim", "unknown-type", "wrong-field"],
)
@pytest.mark.parametrize("greeted", [False, True])
async def test_a_foreign_frame_ends_only_its_own_connection(
    shell: Shell, data: bytes, greeted: bool
) -> None:
    other, number = await shell.registered()
    shim = await shell.greeted() if greeted else shell.connect()
    shim.send_raw(data)
    refused = await shim.expect(local.Refused)
    assert refused.code == Code.BAD_MESSAGE
    assert shell.drops.counts["session", "undecodable"] == 1
    if greeted:
        closed = await shell.hears(events.SessionClosed)
        assert closed.session != number
        shell.server.release(closed.session)
    await ended(shim)
    other.send(local.Ping(1))
    await shell.hears(events.ShimMessage)
    await still_serves(shell)


async def test_an_empty_frame_reads_as_the_end(shell: Shell) -> None:
    shim = await shell.greeted()
    shim.send_raw(b"")
    closed = await shell.hears(events.SessionClosed)
    shell.server.release(closed.session)
    await ended(shim)


async def test_a_frame_that_is_too_long_ends_the_session(shell: Shell) -> None:
    shim = await shell.greeted()
    before = open_fds()
    fd = memfd(4096)
    shim.send_raw(b"\x00" * (local.MAX_FRAME + 1), [fd])
    os.close(fd)
    closed = await shell.hears(events.SessionClosed)
    assert shell.drops.counts["session", str(seqpacket.End.TRUNCATED)] == 1
    assert open_fds() == before
    shell.server.release(closed.session)
    await ended(shim)


async def test_more_descriptors_than_a_frame_may_carry_end_the_session(shell: Shell) -> None:
    shim = await shell.greeted()
    fds = [memfd(1) for _ in range(40)]
    before = open_fds()
    shim.send(local.Ping(1), fds)
    closed = await shell.hears(events.SessionClosed)
    assert shell.drops.counts["session", str(seqpacket.End.TOO_MANY_FDS)] == 1
    assert open_fds() == before
    for fd in fds:
        os.close(fd)
    shell.server.release(closed.session)
    await ended(shim)


async def test_descriptors_that_nobody_asked_for_are_closed(shell: Shell) -> None:
    shim, _ = await shell.registered()
    fds = [memfd(1) for _ in range(16)]
    before = open_fds()
    shim.send(local.Ping(1), fds)
    refused = await shim.expect(local.Refused)
    assert refused.code == Code.BAD_MESSAGE
    assert "descriptor" in refused.detail
    await shell.hears(events.SessionClosed)
    assert open_fds() == before
    for fd in fds:
        os.close(fd)


async def test_received_descriptors_are_not_inherited(shell: Shell) -> None:
    shim = await shell.greeted()
    fd = memfd(BLOCKS * BLOCK_NBYTES, "kvd-inherit")
    shim.send(local.AddSegment(0, "memfd", BLOCKS * BLOCK_NBYTES), [fd])
    os.set_inheritable(fd, True)

    def received() -> list[int]:
        out = []
        for name in os.listdir("/proc/self/fd"):
            try:
                if "kvd-inherit" in os.readlink(f"/proc/self/fd/{name}") and int(name) != fd:
                    out.append(int(name))
            except OSError:
                continue
        return out

    (other,) = await wait_for_async(received, what="the descriptor arrives")
    assert not os.get_inheritable(other)
    os.close(fd)


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([local.Ping(1)], Code.BAD_MESSAGE),
        ([local.AddLayers([])], Code.BAD_MESSAGE),
        ([hello(), hello()], Code.BAD_MESSAGE),
        ([hello(), local.Revoke("t", 1)], Code.NOT_REGISTERED),
        ([hello(), local.FetchGo("f")], Code.NOT_REGISTERED),
        ([hello(), local.AddSegment(0, "memfd", 4096)], Code.BAD_MESSAGE),
        ([hello(), local.AddFence(16)], Code.BAD_MESSAGE),
        ([hello(), local.AddFence(0)], Code.BAD_MEMORY),
        (
            [
                hello(),
                local.AddSegment(0, "cuda_ipc", 4096, "cuda:0", b"x"),
                local.Register(geometry(), 8),
            ],
            Code.UNSUPPORTED,
        ),
        ([hello(), local.Register(geometry(), 8)], Code.BAD_MEMORY),
        ([hello(proto_major=PROTO_MAJOR + 1)], Code.VERSION_MISMATCH),
    ],
    ids=lambda value: "-".join(type(m).__name__ for m in value) if isinstance(value, list) else "",
)
async def test_what_comes_out_of_order_is_refused(
    shell: Shell, messages: list[local.FromShim], code: Code
) -> None:
    shim = shell.connect()
    for message in messages:
        shim.send(message)
    heard = await shim.recv()
    if isinstance(heard, local.Welcome):
        heard = await shim.recv()
    assert isinstance(heard, local.Refused)
    assert heard.code == code, heard.detail
    for event in list(shell.heard):
        if isinstance(event, events.SessionOpened):
            await shell.hears(events.SessionClosed)
            shell.server.release(event.session)
    await ended(shim)
    await still_serves(shell)


async def test_another_major_version_is_named_with_both_values(shell: Shell) -> None:
    shim = shell.connect()
    shim.send(hello(proto_major=PROTO_MAJOR + 1, proto_minor=3))
    refused = await shim.expect(local.Refused)
    assert refused.code == Code.VERSION_MISMATCH
    assert f"{PROTO_MAJOR + 1}.3" in refused.detail
    assert f"{PROTO_MAJOR}." in refused.detail
    assert not shell.heard


async def test_another_minor_version_is_welcome(shell: Shell) -> None:
    shim = shell.connect()
    shim.send(hello(proto_minor=99))
    await shim.expect(local.Welcome)


async def test_hello_must_come_in_time(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "HELLO_TIMEOUT_S", 0.05)
    shim = shell.connect()
    await ended(shim)
    assert shell.drops.counts["session", "no_hello"] == 1
    assert len(shell.server) == 0


async def test_a_process_of_another_user_is_refused_with_both_uids(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 4242)
    monkeypatch.setattr("kvd.local.seqpacket.peercred", lambda _sock: (os.getpid(), own + 7, own))
    shim = shell.connect()
    refused = await shim.expect(local.Refused)
    assert str(own + 7) in refused.detail
    assert str(own + 4242) in refused.detail
    await ended(shim)


async def test_root_is_let_in_whatever_the_daemon_runs_as(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert seqpacket.uid_refusal(0, "x") is None
    assert seqpacket.uid_refusal(1000, "x") is None
    assert seqpacket.uid_refusal(1001, "x") is not None


async def test_sessions_are_bounded(shell: Shell) -> None:
    for _ in range(4):
        await shell.greeted()
    shim = shell.connect()
    refused = await shim.expect(local.Refused)
    assert refused.code == Code.OVERLOADED
    await ended(shim)
    assert shell.drops.counts["session", "max_sessions"] == 1


async def test_a_shim_that_never_reads_is_thrown_out(make_shell: Callable[..., Shell]) -> None:
    shell = make_shell(max_queue=8)
    _deaf, number = await shell.registered()
    sent = 0
    while not any(isinstance(e, events.SessionClosed) for e in shell.heard):
        shell.server.send(number, local.Pong(sent))
        sent += 1
        assert sent < 5000
    assert shell.drops.counts["session", str(seqpacket.End.QUEUE_FULL)] == 1
    # It is not told to be quiet before its memory is given back.
    assert shell.server.memory(number) is not None
    await still_serves(shell)
