"""Losing the daemon and finding it again: EOF, restart, silence, nonsense, and a full backlog."""

from __future__ import annotations

import array
import errno
import mmap
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from connector_shim import session
from connector_shim.client import Client
from connector_shim.errors import ClientError
from connector_shim.events import Down, Up
from connector_shim.peerproc import PeerProcess
from connector_shim.session import BACKOFF_MAX_S, KNOCK_S
from connector_shim.wire import Outbox
from kvd.protocol import local
from kvd.protocol.codes import Code
from kvd.protocol.local import FetchDone, OfferEnded
from kvd.protocol.types import NULL_BLOCK
from tests.unit.client.fake import (
    FakeClock,
    FakeDaemon,
    describe,
    fetch,
    fetch_done,
    of_type,
    offer,
    outstanding,
    state,
    welcome,
)

HANG_S = 8.0
ROOT = Path(__file__).parents[3]


def later(clock: FakeClock, client: Client) -> None:
    """Past any backoff."""
    clock.now += 2 * BACKOFF_MAX_S


# --- there is no daemon -------------------------------------------------------------------------


def test_a_missing_daemon_is_told_once_with_path_and_remedy_and_found_when_it_comes(
    client: Client, path: Path, clock: FakeClock
) -> None:
    (down,) = client.poll()
    assert isinstance(down, Down)
    assert down.code is Code.DAEMON_GONE
    assert str(path) in down.detail
    assert f"kvd serve --socket {path}" in down.detail
    for _ in range(3):
        later(clock, client)
        assert client.poll() == []
    with pytest.raises(ClientError, match="kvd serve") as caught:
        offer(client)
    assert caught.value.code is Code.DAEMON_GONE
    daemon = FakeDaemon(path)
    later(clock, client)
    (up,) = daemon.take_in(client)
    assert isinstance(up, Up)
    assert not up.restarted
    assert client.last_error is None
    daemon.die()


def attempts(
    client: Client, clock: FakeClock, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> list[float]:
    """When a client that is polled every 10 ms tries to connect, in a minute of failures."""
    times: list[float] = []

    def connect(self: socket.socket, address: str) -> None:
        times.append(clock.now)
        raise error

    monkeypatch.setattr(socket.socket, "connect", connect)
    start = clock.now
    while clock.now < start + 60:
        client.poll()
        clock.now += 0.01
    return times


def test_attempts_back_off(
    client: Client, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = attempts(client, clock, monkeypatch, BlockingIOError(errno.EAGAIN, "busy"))
    gaps = [b - a for a, b in pairwise(times)]
    assert 20 < len(times) < 60
    assert max(gaps) <= 1.25 * BACKOFF_MAX_S + 0.02
    assert gaps[0] < 0.1 < gaps[-1]


def test_a_daemon_that_comes_is_found_soon(
    client: Client, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = attempts(client, clock, monkeypatch, FileNotFoundError(errno.ENOENT, "none"))
    assert max(b - a for a, b in pairwise(times)) <= KNOCK_S + 0.02


LISTENS = """
import socket, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
listener.listen()
print("listens", flush=True)
sys.stdin.read()
"""


def test_a_daemon_that_comes_back_is_worth_waiting_for_until_it_ignores_the_engine(
    client: Client, path: Path, clock: FakeClock
) -> None:
    client.poll()
    assert state(client) == "down"
    silent = subprocess.Popen(
        [sys.executable, "-c", LISTENS, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    assert silent.stdin is not None
    assert silent.stdout is not None
    try:
        assert silent.stdout.readline() == b"listens\n"
        later(clock, client)
        client.poll()
        assert state(client) == "connecting"
        # It says nothing; the next attempts are not waited for.
        for _ in range(200):
            clock.now += 0.1
            client.poll()
            if state(client) == "down":
                break
        client.poll()
        assert client.fileno() is not None
        assert state(client) == "down"
        # It dies at last, and another is there when the engine sees it.
        clock.now += 1.0
        silent.kill()
        silent.wait()
        path.unlink()
        daemon = FakeDaemon(path)
        client.poll()
        assert state(client) == "connecting"
        assert of_type(daemon.take_in(client), Up)
        daemon.die()
    finally:
        silent.kill()
        silent.wait()
        silent.stdin.close()
        silent.stdout.close()


def test_a_daemon_that_sends_the_engine_away_is_not_asked_at_every_poll(
    client: Client, path: Path, clock: FakeClock
) -> None:
    for _ in range(3):
        daemon = FakeDaemon(path)
        later(clock, client)
        client.poll()
        assert client.fileno() is not None
        daemon.die()
        client.poll()
        client.poll()
        assert client.fileno() is None


def test_an_engine_that_idled_meets_the_next_daemon_in_the_same_poll(
    up: Client, daemon: FakeDaemon, path: Path, clock: FakeClock
) -> None:
    clock.now += 1.0
    daemon.die()
    again = FakeDaemon(path)
    assert of_type(up.poll(), Down)
    assert state(up) == "connecting"
    assert of_type(again.take_in(up), Up)
    again.die()


def test_a_full_backlog_does_not_block_and_is_tried_again(path: Path, clock: FakeClock) -> None:
    daemon = FakeDaemon(path, backlog=0)
    others = [
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        for _ in range(4)
    ]
    full = 0
    for other in others:
        try:
            other.connect(daemon.path)
        except BlockingIOError:
            full += 1
    assert full
    with Client(daemon.path, engine_id="engine", clock=clock) as client:
        describe(client)
        (down,) = client.poll()
        assert isinstance(down, Down)
        assert down.code is Code.OVERLOADED
        assert state(client) == "down"
        for other in others:
            other.close()
        for _ in range(len(others) - full):
            daemon.accept()
        later(clock, client)
        assert of_type(daemon.take_in(client), Up)
    daemon.die()


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's socket can only be made by root")
def test_a_socket_of_another_user_names_both() -> None:
    script = (
        "import os, sys\n"
        "from connector_shim.client import Client\n"
        "os.seteuid(54321)\n"
        "client = Client(sys.argv[1], engine_id='engine')\n"
        "(down,) = client.poll()\n"
        "print(down.code, down.detail)\n"
    )
    with tempfile.TemporaryDirectory(prefix="kvdt-", dir="/tmp") as folder:
        path = Path(folder, "kvd.sock")
        daemon = FakeDaemon(path)
        path.chmod(0o600)
        os.chown(path, 12345, 12345)
        folders = [(0o700, "its folder may not be entered"), (0o711, "it belongs to uid 12345")]
        for mode, owner in folders:
            Path(folder).chmod(mode)
            told = subprocess.run(
                [sys.executable, "-c", script, str(path)],
                cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
            ).stdout  # fmt: skip
            assert told.startswith("peer_not_allowed")
            assert owner in told
            assert "runs as uid 54321" in told
        daemon.die()


def test_waiting_for_a_daemon_gives_up_with_the_reason(path: Path) -> None:
    with Client(str(path), engine_id="engine") as client:
        describe(client)
        with pytest.raises(ClientError, match="kvd serve"):
            client.wait_up(0.0)
        assert [type(event) for event in client.poll()] == [Down]


def test_a_poll_with_a_timeout_wakes_for_the_daemon(path: Path, daemon: FakeDaemon) -> None:
    with Client(str(path), engine_id="engine", clock=FakeClock()) as client:
        describe(client)
        daemon.take_in(client)
        fetch_id = fetch(client)
        daemon.say(fetch_done(fetch_id))
        # The fake clock stands still: only the socket can end this.
        assert client.poll(3600.0) == [fetch_done(fetch_id)]


# --- the daemon goes ------------------------------------------------------------------------------


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


# --- the daemon talks nonsense --------------------------------------------------------------------

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


# --- the daemon is silent -------------------------------------------------------------------------


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
