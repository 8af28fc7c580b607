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
    """A client with one fetch out, whose daemon has stopped."""

    def __init__(self, path: Path) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(path))
        # As with socket activation, it is not the daemon that listens.
        listener.listen(1)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.client.hanging_daemon", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            cwd=ROOT,
        )
        listener.close()
        self.clock = FakeClock()
        self.client = Client(str(path), engine_id="engine", daemon_hang_s=HANG_S, clock=self.clock)
        memory, self.blocks = shared_blocks(2, NUM_BLOCKS, 64)
        self.client.describe(memory)
        memory.close()

    def start(self) -> None:
        wait_for(lambda: (self.client.poll(), state(self.client) == "up")[1], what="it is up")
        self.fetch_id = fetch(self.client)
        wait_for(self.stopped, what="the daemon has stopped")

    def stopped(self) -> bool:
        status = Path(f"/proc/{self.process.pid}/stat").read_text()
        return status.rpartition(")")[2].split()[0] in "tT"

    def exited(self) -> bool:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, flags) is not None

    def be_silent(self) -> list[object]:
        """Polls as an engine does until the silence has lasted long enough."""
        events: list[object] = []
        for _ in range(int(2 * HANG_S)):
            self.clock.now += 1.0
            events += self.client.poll()
        return events

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
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
    while not of_type(events, FetchDone):
        # Nothing about the fetch before the process is gone.
        gone = stopped.exited()
        more = stopped.client.poll(0.05)
        assert gone or not of_type(more, FetchDone) or stopped.exited()
        stopped.clock.now += 0.1
        events += more
        assert stopped.clock.now < 5000, "the daemon never died"
    down, done = events[0], of_type(events, FetchDone)[0]
    assert isinstance(down, Down)
    assert "silent" in down.detail
    assert (done.fetch_id, done.code, done.bad) == (stopped.fetch_id, "daemon_gone", [b"\3"])
    assert stopped.process.wait(10) == -signal.SIGKILL
    assert stopped.client.statistics()["kills"] == 1
    # No late write: the process that would have made it is dead.
    assert set(stopped.blocks[:]) == {0}


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
