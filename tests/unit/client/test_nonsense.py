"""A daemon that talks nonsense, refuses, or floods."""

from __future__ import annotations

import array
import os
import socket
from pathlib import Path

import msgspec
import pytest

from connector_shim.client import Client
from connector_shim.errors import ClientError
from connector_shim.events import Down, Up
from kvd.protocol import local
from kvd.protocol.codes import Code
from kvd.protocol.local import FetchDone, OfferEnded
from tests.unit.client.fake import (
    FakeClock,
    FakeDaemon,
    fetch,
    fetch_done,
    later,
    of_type,
    offer,
    outstanding,
    state,
    welcome,
)

_NONSENSE = {
    "random bytes": b"\xc1\x00\xff\x13garbage",
    "a pickle": b"\x80\x05\x95\x14\0\0\0\0\0\0\0}\x94\x8c\x02op\x94\x8c\tFetchDone\x94s.",
    "an unknown message": msgspec.msgpack.encode(["Teleport", 1]),
    "a message of the other direction": msgspec.msgpack.encode(local.Ping(1)),
    "a field of the wrong type": msgspec.msgpack.encode(["Pong", "one"]),
    "a message cut short": msgspec.msgpack.encode(fetch_done("f"))[:-3],
    "nothing": b"",
    "too much": b"x" * (local.MAX_FRAME + 1),
    "a second Welcome": welcome(),
    "a second Registered": msgspec.msgpack.encode(local.Registered(1)),
}


@pytest.mark.parametrize("name", _NONSENSE)
def test_nonsense_ends_the_session_and_nothing_else(
    up: Client, daemon: FakeDaemon, clock: FakeClock, name: str
) -> None:
    offer(up)
    daemon.say_raw(_NONSENSE[name])
    down, ended = up.poll()
    assert isinstance(down, Down)
    assert down.code is Code.BAD_MESSAGE
    assert ended == OfferEnded("t", 1, "daemon_gone")
    assert daemon.saw_eof()
    assert up.statistics()["garbled"] == 1
    later(clock, up)
    assert of_type(daemon.take_in(up), Up)


def test_descriptors_that_nobody_asked_for_are_closed(
    up: Client, daemon: FakeDaemon, tmp_path: Path
) -> None:
    assert daemon.session is not None
    with (tmp_path / "passed").open("wb") as file:

        def opened() -> int:
            own = os.fstat(file.fileno())
            return sum(os.path.samestat(own, os.fstat(fd)) for fd in open_fds())

        fds = array.array("i", [file.fileno()] * 2)
        data = msgspec.msgpack.encode(local.Pong(1))
        daemon.session.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        (down,) = up.poll()
        assert opened() == 1
    assert isinstance(down, Down)
    assert down.code is Code.BAD_MESSAGE


def open_fds() -> list[int]:
    """All but the one that the listing itself needs."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:
            continue
        found.append(int(name))
    return found


def test_after_nonsense_a_fetch_ends_only_when_the_daemon_has_closed(
    up: Client, daemon: FakeDaemon, clock: FakeClock
) -> None:
    fetch_id = fetch(up)
    daemon.say_raw(b"garbage")
    daemon.say(fetch_done(fetch_id))
    assert [type(event) for event in up.poll()] == [Down]
    assert daemon.saw_eof()
    assert state(up) == "down"
    with pytest.raises(ClientError):
        offer(up, "new")
    for _ in range(20):
        clock.now += 1.0
        assert up.poll() == []
    assert outstanding(up) == ({fetch_id}, set())
    daemon.hang_up()
    (done,) = up.poll()
    assert isinstance(done, FetchDone)
    # What came after the nonsense was not believed.
    assert done.code == "daemon_gone"
    assert up.statistics()["ignored"] == 1


def test_a_refused_session_keeps_its_fetches_until_the_daemon_closes(
    up: Client, daemon: FakeDaemon
) -> None:
    fetch_id = fetch(up)
    other = fetch(up)
    daemon.say(local.Refused("internal", "the memory vanished"), fetch_done(other))
    down, done = up.poll()
    assert isinstance(down, Down)
    assert (down.code, "the memory vanished" in down.detail) == (Code.INTERNAL, True)
    assert done == fetch_done(other)
    assert up.poll() == []
    daemon.hang_up()
    (done,) = up.poll()
    assert isinstance(done, FetchDone)
    assert (done.fetch_id, done.code) == (fetch_id, "daemon_gone")


def test_a_flood_is_read_in_portions(up: Client, daemon: FakeDaemon) -> None:
    sent = 0
    while True:
        try:
            daemon.say(local.Pong(sent))
        except BlockingIOError:
            break
        sent += 1
    assert sent
    assert up.poll() == []
    assert state(up) == "up"
