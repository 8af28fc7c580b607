"""A real daemon under a supervisor that speaks systemd's notify protocol, over a real socket."""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.integration.daemon.conftest import Site
from tests.integration.daemon.engine import Engine
from tests.integration.daemon.harness import Process

WATCHDOG_S = 0.6
QUIET_S = 3 * WATCHDOG_S


class Supervisor:
    """The datagram socket, and all that was said on it."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(self.path)
        self.said: list[str] = []

    def hear(self, seconds: float) -> list[str]:
        """What comes within that time."""
        got: list[str] = []
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.sock.settimeout(left)
            try:
                got.append(self.sock.recv(4096).decode())
            except TimeoutError:
                break
        self.said += got
        return got

    def hears(self, found: Callable[[str], bool], what: str) -> str:
        """Waits for a message; what came before it is kept in `said`."""
        self.sock.settimeout(60)
        while True:
            try:
                self.said.append(self.sock.recv(4096).decode())
            except TimeoutError:
                pytest.fail(f"not told {what}; heard {self.said[-5:]}")
            if found(self.said[-1]):
                return self.said[-1]


@pytest.fixture
def supervisor(tmp_run_dir: Path) -> Iterator[Supervisor]:
    made = Supervisor(tmp_run_dir / "notify")
    yield made
    made.sock.close()


@pytest.fixture
def daemon(supervisor: Supervisor, tmp_run_dir: Path) -> Iterator[Process]:
    made = Process(
        "p",
        tmp_run_dir,
        [sys.executable, "-m", "tests.integration.daemon.hanging", "serve",
         f"--socket={tmp_run_dir}/p.sock", "--log-format=json", "--transport=shm",
         f"--discovery-file={tmp_run_dir}/p.json"],
        env={"KVD_REEXEC": "1", "NOTIFY_SOCKET": supervisor.path,
             "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))},
    )  # fmt: skip
    yield made
    print(made.tail())
    made.stop()


def get(folder: Path, path: str) -> str:
    at = json.loads((folder / "p.json").read_text())["metrics"]
    with urllib.request.urlopen(f"http://{at}{path}", timeout=10) as answer:
        return str(answer.read().decode())


def test_the_whole_life(
    supervisor: Supervisor, daemon: Process, tmp_run_dir: Path, site: Site
) -> None:
    ready = supervisor.hears(lambda m: m.startswith("READY=1"), "READY")
    assert f"STATUS=serving {tmp_run_dir}/p.sock" in ready
    assert f"MAINPID={daemon.pid}" in ready
    # Only what is bound is ready: an engine is served at once.
    engine = Engine(f"{tmp_run_dir}/p.sock", "p", seed=1)
    try:
        engine.up()
        supervisor.hears(lambda m: m == "WATCHDOG=1", "WATCHDOG")
        assert '"healthy": true' in get(tmp_run_dir, "/healthz")

        daemon.kill(signal.SIGUSR1)
        supervisor.hears(lambda m: "hangs" in m, "which thread hangs")
        assert "STATUS=kvd-copy-" in supervisor.said[-1]
        assert "WATCHDOG=1" not in supervisor.hear(QUIET_S)
        # It is the thread alone: the loop goes on.
        assert '"healthy": true' in get(tmp_run_dir, "/healthz"), "healthz gives it longer"
        daemon.kill(signal.SIGUSR2)
        supervisor.hears(lambda m: m == "WATCHDOG=1", "WATCHDOG again")

        engine.offer("t", [1])
        offered = 'kvd_open_offers{state="leased"} 1.0'
        wait_for(lambda: offered in get(tmp_run_dir, "/metrics"), what="the offer is there")
        daemon.kill(signal.SIGTERM)
        draining = supervisor.hears(lambda m: "draining" in m, "that it drains")
        assert "EXTEND_TIMEOUT_USEC=10000000\n" in draining
        assert "1 offers" in draining
        supervisor.hears(lambda m: "EXTEND_TIMEOUT_USEC" in m, "that it needs more time, again")
        assert "WATCHDOG=1" in supervisor.said
        engine.client.revoke("t", 1)
        engine.poll()
        stopping = supervisor.hears(lambda m: m.startswith("STOPPING=1"), "STOPPING")
        assert stopping == "STOPPING=1\nSTATUS=stopping"
        assert "EXTEND_TIMEOUT_USEC=30000000" in supervisor.hears(lambda m: True, "how long")
        assert daemon.wait() == 0
    finally:
        engine.close()
    wait_for(lambda: not (tmp_run_dir / "p.json").exists(), what="its traces are gone")


def test_a_loop_that_hangs_is_not_fed(supervisor: Supervisor, daemon: Process) -> None:
    supervisor.hears(lambda m: m == "WATCHDOG=1", "WATCHDOG")
    daemon.kill(signal.SIGSTOP)
    supervisor.hear(WATCHDOG_S)  # what was under way
    assert supervisor.hear(QUIET_S) == []
    daemon.kill(signal.SIGCONT)
    supervisor.hears(lambda m: m == "WATCHDOG=1", "WATCHDOG again")
