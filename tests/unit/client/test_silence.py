"""A daemon that is silent, slow, or does not end what it began."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable

import pytest

from connector_shim import session
from connector_shim.client import Client
from connector_shim.events import Down
from connector_shim.peerproc import PeerProcess
from connector_shim.wire import Outbox
from kvd.protocol import local
from kvd.protocol.codes import Code
from kvd.protocol.local import FetchDone, OfferEnded
from tests.unit.client.fake import (
    FakeClock,
    FakeDaemon,
    fetch,
    of_type,
    offer,
    outstanding,
    state,
    welcome,
)

HANG_S = 8.0


@pytest.fixture
def watched(make_client: Callable[..., Client], daemon: FakeDaemon) -> Client:
    client = make_client(daemon_hang_s=HANG_S)
    daemon.take_in(client)
    return client


def tick(client: Client, clock: FakeClock, seconds: float, step: float = 0.5) -> list[object]:
    events: list[object] = []
    end = clock.now + seconds
    while clock.now < end:
        clock.now += step
        events += client.poll()
    return events


def test_a_daemon_that_answers_is_never_given_up(
    watched: Client, daemon: FakeDaemon, clock: FakeClock
) -> None:
    offer(watched, lease_s=3.0)
    fetch(watched)
    for _ in range(60):
        clock.now += 0.5
        assert watched.poll() == []
        for ping in of_type(daemon.read(), local.Ping):
            daemon.say(local.Pong(ping.seq))
    # The daemon keeps the lease as long as it lives, whatever the shim's clock says.
    assert state(watched) == "up"
    assert outstanding(watched)[1] == {"t"}


def test_a_lease_ends_by_the_shims_clock_while_the_daemon_is_silent(
    watched: Client, daemon: FakeDaemon, clock: FakeClock
) -> None:
    assert watched.fence is not None
    offer(watched, "short", lease_s=3.0)
    offer(watched, "long", lease_s=60.0)
    short, long = of_type(daemon.read(), local.Offer)
    assert tick(watched, clock, 2.5) == []
    assert tick(watched, clock, 1.0) == [OfferEnded("short", 1, "expired")]
    assert watched.fence.word(short.slot) == 0
    assert watched.fence.word(long.slot) == long.word
    # It wakes: it is told, and what it has to say about it is late.
    assert of_type(daemon.read(), local.Revoke) == [local.Revoke("short", 1)]
    daemon.say(OfferEnded("short", 1, "expired"), local.Pong(1))
    assert watched.poll() == []
    assert state(watched) == "up"


def test_work_on_an_offer_starts_its_lease_again(
    watched: Client, daemon: FakeDaemon, clock: FakeClock
) -> None:
    offer(watched, lease_s=3.0)
    assert tick(watched, clock, 2.5) == []
    assert watched.extend("t", 1, tokens=16)
    assert tick(watched, clock, 2.5) == []
    assert tick(watched, clock, 1.0) == [OfferEnded("t", 1, "expired")]


def test_a_silent_daemon_without_fetches_is_left_alone_and_given_up(
    watched: Client, daemon: FakeDaemon, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[PeerProcess] = []
    monkeypatch.setattr(PeerProcess, "_kill", lambda self: killed.append(self))
    offer(watched, lease_s=60.0)
    events = tick(watched, clock, 3 * HANG_S)
    down, ended = events[:2]
    assert isinstance(down, Down)
    assert (down.code, "silent" in down.detail) == (Code.DAEMON_GONE, True)
    assert ended == OfferEnded("t", 1, "daemon_gone")
    assert daemon.saw_eof()
    assert killed == []


def test_an_engine_that_did_not_poll_blames_nobody(
    watched: Client, daemon: FakeDaemon, clock: FakeClock
) -> None:
    """It was stopped, or idle, for a minute, right after a Ping went out."""
    tick(watched, clock, 1.0)
    assert of_type(daemon.read(), local.Ping)
    clock.now += 60.0
    assert watched.poll() == []
    clock.now += 60.0
    daemon.say(local.Pong(1))
    assert watched.poll() == []
    assert state(watched) == "up"


def test_a_daemon_in_this_very_process_is_not_killed(
    watched: Client, daemon: FakeDaemon, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is process 1, whose socket it would be with socket activation."""
    fetch_id = fetch(watched)
    assert [type(event) for event in tick(watched, clock, 3 * HANG_S)] == [Down]
    tick(watched, clock, 600.0, step=5.0)
    assert outstanding(watched) == ({fetch_id}, set())
    (record,) = [r for r in caplog.records if "may not be killed" in r.getMessage()]
    assert "1 fetches" in record.getMessage()
    # It wakes, finds the end of the session, and closes.
    daemon.hang_up()
    (done,) = watched.poll()
    assert isinstance(done, FetchDone)
    assert (done.fetch_id, done.code) == (fetch_id, "daemon_gone")


def test_a_fetch_whose_end_is_never_told_ends_the_session(
    watched: Client, daemon: FakeDaemon, clock: FakeClock
) -> None:
    fetch_id = fetch(watched)  # deadline 5 s
    events: list[object] = []
    for _ in range(80):
        clock.now += 0.5
        events += watched.poll()
        for ping in of_type(daemon.read(), local.Ping):
            daemon.say(local.Pong(ping.seq))
        if events:
            break
    (down,) = events
    assert isinstance(down, Down)
    assert down.code is Code.DEADLINE
    assert fetch_id in down.detail
    assert outstanding(watched) == ({fetch_id}, set())
    daemon.hang_up()
    assert [type(event) for event in watched.poll()] == [FetchDone]


def test_a_daemon_that_never_answers_hello_is_tried_again(
    client: Client, daemon: FakeDaemon, clock: FakeClock
) -> None:
    client.poll()
    daemon.accept()
    (down,) = of_type(tick(client, clock, 10.0), Down)
    assert (down.code, "does not answer" in down.detail) == (Code.DAEMON_GONE, True)
    assert daemon.saw_eof()
    # It went on trying meanwhile, and is not taken for about to come up any more.
    assert state(client) == "down"
    while client.fileno() is None:
        tick(client, clock, 0.1, 0.1)
    daemon.accept()
    while daemon.saw_eof():
        daemon.accept()
    daemon.say_raw(welcome())
    client.poll()
    assert state(client) == "registering"


def test_an_engine_that_polls_rarely_connects_all_the_same(
    make_client: Callable[..., Client], daemon: FakeDaemon, clock: FakeClock
) -> None:
    client = make_client(connect_timeout_s=0.5)
    client.poll()
    daemon.accept()
    daemon.hang_up()
    clock.now += 30.0
    client.poll()
    daemon.accept()
    daemon.say_raw(welcome())
    clock.now += 30.0
    client.poll()
    assert state(client) == "registering"


def test_a_socket_that_refuses_a_frame_ends_the_session_but_not_the_fetches(
    up: Client, daemon: FakeDaemon, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch_id = fetch(up)

    def refuse(self: Outbox, sock: socket.socket) -> None:
        raise OSError(errno.ETOOMANYREFS, "Too many references")

    with monkeypatch.context() as patch:
        patch.setattr(Outbox, "flush", refuse)
        offer(up)
        down, ended = up.poll()
    assert isinstance(down, Down)
    assert "Too many references" in down.detail
    assert ended == OfferEnded("t", 1, "daemon_gone")
    assert up.poll() == []
    daemon.hang_up()
    (done,) = up.poll()
    assert isinstance(done, FetchDone)
    assert (done.fetch_id, done.code) == (fetch_id, "daemon_gone")


def test_a_daemon_that_talks_on_after_nonsense_is_ended_too(
    watched: Client, daemon: FakeDaemon, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[PeerProcess] = []
    monkeypatch.setattr(PeerProcess, "_kill", lambda self: killed.append(self))
    monkeypatch.setattr(session, "MAX_READS", 1)
    fetch(watched)
    daemon.say_raw(b"garbage")
    for _ in range(100):
        daemon.say(local.Pong(1))
    assert tick(watched, clock, 3 * HANG_S - 2)[1:] == []
    assert killed == []
    tick(watched, clock, 4.0)
    assert len(killed) == 1


def test_mapping_may_take_long_but_not_for_ever(
    client: Client, daemon: FakeDaemon, clock: FakeClock
) -> None:
    client.poll()
    daemon.accept()
    daemon.say_raw(welcome())
    client.poll()
    assert tick(client, clock, 90.0, 1.0) == []
    assert of_type(daemon.read(), local.Ping) == []
    down, *_ = of_type(tick(client, clock, 40.0, 1.0), Down)
    assert (down.code, "mapping" in down.detail) == (Code.DEADLINE, True)
