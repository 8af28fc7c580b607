"""Finding a daemon: none there, one that comes, comes back, or is somebody else's."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest

from connector_shim.client import Client
from connector_shim.errors import ClientError
from connector_shim.events import Down, Up
from connector_shim.patience import BACKOFF_MAX_S, KNOCK_S
from kvd.protocol.codes import Code
from tests.unit.client.fake import (
    FakeClock,
    FakeDaemon,
    describe,
    fetch,
    fetch_done,
    later,
    of_type,
    offer,
    state,
)

ROOT = Path(__file__).parents[3]


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
