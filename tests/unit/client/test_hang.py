"""A real daemon process that stops in the middle of a fetch, and the client that must end it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from connector_shim.client import Client
from connector_shim.events import Down
from connector_shim.memory import shared_blocks
from connector_shim.peerproc import PeerProcess
from kvd.protocol.local import FetchDone
from tests.conftest import wait_for
from tests.unit.client.fake import NUM_BLOCKS, FakeClock, fetch, of_type, state

ROOT = Path(__file__).parents[3]
HANG_S = 8.0


class Stopped:
    """A client with one fetch out, whose daemon has stopped.

    As with socket activation, it is not the daemon that listens. With `shared_socket` another
    process (this one) has the daemon's end of the connection too, so that its death is no EOF.
    """

    def __init__(self, path: Path, *, shared_socket: bool = False) -> None:
        self.clock = FakeClock()
        self.client = Client(str(path), engine_id="engine", daemon_hang_s=HANG_S, clock=self.clock)
        memory, self.blocks = shared_blocks(2, NUM_BLOCKS, 64)
        self.client.describe(memory)
        memory.close()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.bind(str(path))
        self.socket.listen(1)
        if shared_socket:
            self.client.poll()
            with self.socket as listener:
                self.socket, _ = listener.accept()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.client.hanging_daemon", str(self.socket.fileno())],
            pass_fds=[self.socket.fileno()],
            cwd=ROOT,
        )
        if not shared_socket:
            self.socket.close()

    def start(self) -> None:
        wait_for(lambda: (self.client.poll(), state(self.client) == "up")[1], what="it is up")
        self.fetch_id = fetch(self.client)
        wait_for(self.stopped, what="the daemon has stopped")

    def stopped(self) -> bool:
        status = Path(f"/proc/{self.process.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] in "tT"

    def can_write(self) -> bool:
        """It still has memory mapped. (Its socket closes a moment before it can be reaped.)"""
        return bool(Path(f"/proc/{self.process.pid}/maps").read_text())

    def be_silent(self) -> list[object]:
        """Polls as an engine does until the silence has lasted long enough."""
        assert self.can_write()
        events: list[object] = []
        for _ in range(int(2 * HANG_S)):
            self.clock.now += 1.0
            events += self.client.poll()
            assert not (of_type(events, FetchDone) and self.can_write())
        return events

    def poll_until_fetch_ends(self, events: list[object]) -> FetchDone:
        def ended() -> list[FetchDone]:
            self.clock.now += 0.1
            events.extend(self.client.poll())
            return of_type(events, FetchDone)

        return wait_for(ended, 20.0, what="the end of the fetch is told")[0]

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.socket.close()
        self.client.close(0.0)
        self.blocks.close()


@pytest.fixture
def stopped(path: Path) -> Iterator[Stopped]:
    found = Stopped(path)
    try:
        found.start()
        yield found
    finally:
        found.end()


def test_a_hanging_daemon_is_killed_and_its_fetch_ends_when_it_is_dead(stopped: Stopped) -> None:
    events = stopped.be_silent()
    done = stopped.poll_until_fetch_ends(events)
    assert not stopped.can_write()
    down = events[0]
    assert isinstance(down, Down)
    assert "silent" in down.detail
    assert (done.fetch_id, done.code, done.bad) == (stopped.fetch_id, "daemon_gone", [b"\3"])
    assert stopped.process.wait(10) == -signal.SIGKILL
    assert stopped.client.statistics()["kills"] == 1
    # No late write: the process that would have made it is dead.
    assert set(stopped.blocks[:]) == {0}


def test_the_exit_of_the_process_is_enough_where_its_socket_stays_open(path: Path) -> None:
    stopped = Stopped(path, shared_socket=True)
    try:
        stopped.start()
        done = stopped.poll_until_fetch_ends(stopped.be_silent())
        assert (done.fetch_id, done.code) == (stopped.fetch_id, "daemon_gone")
        assert not stopped.can_write()
    finally:
        stopped.end()


def test_a_hanging_daemon_that_may_not_be_killed_is_waited_for(
    stopped: Stopped, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeerProcess, "_kill", lambda self: "not permitted")
    assert [type(event) for event in stopped.be_silent()] == [Down]
    for _ in range(200):
        stopped.clock.now += 5.0
        assert stopped.client.poll() == []
    assert stopped.client.fetches == (stopped.fetch_id,)
    os.kill(stopped.process.pid, signal.SIGCONT)

    def ended() -> list[FetchDone]:
        return of_type(stopped.client.poll(), FetchDone)

    (done,) = wait_for(ended, what="the fetch has ended")
    # The late write landed before the end was told, into blocks that were still held.
    assert set(stopped.blocks[:]) == {0xEE}
    assert done.code == "daemon_gone"


def test_the_process_is_the_one_that_talks_and_not_the_one_that_listens(stopped: Stopped) -> None:
    wire = stopped.client._session._wire
    assert wire is not None
    assert wire.process.pid == stopped.process.pid != os.getpid()
    assert not wire.process.exited()
    stopped.process.kill()
    wait_for(wire.process.exited, what="the exit is seen")
