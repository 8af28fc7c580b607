"""A daemon that goes, and the same or another one that comes."""

from __future__ import annotations

import mmap
import os
import struct

import pytest

from connector_shim.client import Client
from connector_shim.errors import ClientError
from connector_shim.events import Down, Up
from kvd.protocol import local
from kvd.protocol.codes import Code
from kvd.protocol.local import FetchDone, OfferEnded
from kvd.protocol.types import NULL_BLOCK
from tests.unit.client.fake import (
    FakeClock,
    FakeDaemon,
    fetch,
    fetch_done,
    later,
    of_type,
    offer,
    outstanding,
)


def test_eof_ends_everything_once_with_dead_words_and_registers_again(
    up: Client, daemon: FakeDaemon, clock: FakeClock
) -> None:
    offer(up, "a")
    offer(up, "b")
    fetch_id = fetch(up, blocks=(1, NULL_BLOCK, 3))
    opened = of_type(daemon.read(), local.Offer)
    segment = os.fstat(daemon.fds[0])
    with mmap.mmap(daemon.fds[1], 0, prot=mmap.PROT_READ) as table:
        alive = [struct.unpack_from("<Q", table, 8 * o.slot)[0] for o in opened]
        assert alive == [o.word for o in opened]
        daemon.hang_up()
        down, *ended, done = up.poll()
        assert [struct.unpack_from("<Q", table, 8 * o.slot)[0] for o in opened] == [0, 0]
    assert isinstance(down, Down)
    assert down.code is Code.DAEMON_GONE
    assert ended == [OfferEnded("a", 1, "daemon_gone"), OfferEnded("b", 1, "daemon_gone")]
    assert isinstance(done, FetchDone)
    assert (done.fetch_id, done.code, done.bad) == (fetch_id, "daemon_gone", [b"\5"])
    assert outstanding(up) == (set(), set())
    later(clock, up)
    daemon.boot_id = 2
    (again,) = daemon.take_in(up)
    assert isinstance(again, Up)
    assert again.restarted
    assert os.fstat(daemon.fds[0]).st_ino == segment.st_ino
    # Nothing of the last life comes back, and nothing keeps its ids from being used again.
    daemon.say(fetch_done(fetch_id), OfferEnded("a", 1, "released"))
    assert up.poll() == []
    offer(up, "a")
    assert outstanding(up) == (set(), {"a"})


def test_the_same_daemon_again_is_no_restart(
    up: Client, daemon: FakeDaemon, clock: FakeClock
) -> None:
    daemon.hang_up()
    up.poll()
    later(clock, up)
    (again,) = of_type(daemon.take_in(up), Up)
    assert not again.restarted


def test_what_was_said_before_the_end_counts(up: Client, daemon: FakeDaemon) -> None:
    first, second = fetch(up), fetch(up)
    # Not reading what the client sent makes the end look like a reset.
    daemon.say(fetch_done(first))
    daemon.hang_up()
    events = up.poll()
    assert [(done.fetch_id, done.code) for done in of_type(events, FetchDone)] == [
        (first, "ok"),
        (second, "daemon_gone"),
    ]
    assert up.poll() == []


def test_calls_after_the_end_fail_typed(up: Client, daemon: FakeDaemon) -> None:
    fetch_id = fetch(up)
    daemon.hang_up()
    offer(up)  # nobody knows yet
    up.poll()
    for call in (lambda: offer(up, "new"), lambda: fetch(up)):
        with pytest.raises(ClientError) as caught:
            call()
        assert caught.value.code is Code.DAEMON_GONE
    assert not up.cancel(fetch_id)
    assert not up.revoke("t", 1)
    assert not up.seal("t", 1, tokens=1)
