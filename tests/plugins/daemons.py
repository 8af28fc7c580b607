"""Real daemons in processes of their own: `daemon_factory`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
from prometheus_client.parser import text_string_to_metric_families

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
LOG_TAIL = 4000


class DaemonProcess:
    """One `kvd serve`, and what it told about itself once it was ready."""

    def __init__(
        self,
        folder: Path,
        name: str,
        settings: Mapping[str, object],
        env: Mapping[str, str],
        command: Sequence[str] = (sys.executable, "-m", "kvd", "serve"),
    ) -> None:
        self.name = name
        self.socket = str(settings.get("socket", folder / f"{name}.sock"))
        self.discovery_file = folder / f"{name}.json"
        self.log_file = folder / f"{name}.log"
        self.discovery: dict[str, Any] = {}
        own = {
            "socket": self.socket,
            "discovery_file": self.discovery_file,
            "log_format": "json",
            "log_level": "debug",
        }
        flags = [f"--{k.replace('_', '-')}={_text(v)}" for k, v in {**own, **settings}.items()]
        with self.log_file.open("ab") as log:
            self.popen = subprocess.Popen(
                [*command, *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **env},
                start_new_session=True,
            )

    def __repr__(self) -> str:
        return f"<daemon {self.name} pid={self.pid}>"

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    # --- what it says -----------------------------------------------------------------------

    def wait_ready(self, timeout: float = READY_TIMEOUT_S) -> DaemonProcess:
        """Until it has written its discovery file; fails the test after `timeout` s."""
        deadline = time.monotonic() + timeout
        while True:
            with contextlib.suppress(OSError, ValueError):
                found = json.loads(self.discovery_file.read_text())
                # A killed daemon leaves its file for the one that follows it.
                if found["pid"] == self.pid:
                    self.discovery = found
                    return self
            if not self.running:
                pytest.fail(f"{self!r} ended with status {self.popen.returncode}{self.tail()}")
            if time.monotonic() > deadline:
                pytest.fail(f"{self!r} was not ready within {timeout:g} s{self.tail()}")
            time.sleep(0.01)

    @property
    def advertise(self) -> tuple[str, int]:
        """(host, port) that peers connect to."""
        host, _, port = str(self.discovery["advertise"]).rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def metrics_url(self) -> str:
        return f"http://{self.discovery['metrics']}"

    def get(self, path: str, timeout: float = 5.0) -> tuple[int, str]:
        """(status, body) of one of its HTTP endpoints."""
        try:
            with urllib.request.urlopen(f"{self.metrics_url}{path}", timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as e:
            with e:
                return e.code, e.read().decode()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name with these labels; fails where there is none."""
        _, body = self.get("/metrics")
        values = [
            sample.value
            for family in text_string_to_metric_families(body)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        if not values:
            pytest.fail(f"{self!r} has no metric {name} {labels}")
        return sum(values)

    def logs(self, event: str | None = None) -> list[dict[str, Any]]:
        """Its log lines, or those of one event. Lines that are not JSON come as {"text": line}."""
        lines = []
        for line in self.log_file.read_text(errors="replace").splitlines():
            try:
                parsed = json.loads(line)
            except ValueError:
                parsed = None
            lines.append(parsed if isinstance(parsed, dict) else {"text": line})
        return [line for line in lines if event is None or line.get("event") == event]

    def tail(self) -> str:
        """The end of its log, for a failure's text."""
        with contextlib.suppress(OSError):
            return f"\n--- {self.name} ---\n{self.log_file.read_text(errors='replace')[-LOG_TAIL:]}"
        return ""

    # --- ending it --------------------------------------------------------------------------

    def signal(self, number: int) -> None:
        """Sends a signal to this process, by its own pid, unless it ended."""
        if self.running:
            self.popen.send_signal(number)

    def wait(self, timeout: float = STOP_TIMEOUT_S) -> int:
        """Its exit status; fails the test when it has not ended within `timeout` s."""
        try:
            return self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            tail = self.tail()
            self.kill()
            pytest.fail(f"{self!r} has not ended within {timeout:g} s{tail}")

    def stop(self, timeout: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM (and SIGCONT, should it be stopped); its exit status."""
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)
        return self.wait(timeout)

    def kill(self) -> int:
        """SIGKILL; its exit status."""
        self.signal(signal.SIGKILL)
        return self.popen.wait(STOP_TIMEOUT_S)


class DaemonFactory(Protocol):
    """Starts a daemon; keywords are settings, `env` is added to the environment."""

    def __call__(
        self,
        name: str = ...,
        *,
        wait: bool = ...,
        env: Mapping[str, str] = ...,
        **settings: object,
    ) -> DaemonProcess: ...


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ",".join(map(str, value))
    return str(value)


@pytest.fixture
def daemon_factory(tmp_run_dir: Path) -> Iterator[DaemonFactory]:
    """Starts daemons under `tmp_run_dir`. Those still running at the end must end well."""
    started: list[DaemonProcess] = []

    def start(
        name: str = "daemon",
        *,
        wait: bool = True,
        env: Mapping[str, str] | None = None,
        **settings: object,
    ) -> DaemonProcess:
        daemon = DaemonProcess(tmp_run_dir, name, settings, env or {})
        started.append(daemon)
        return daemon.wait_ready() if wait else daemon

    try:
        yield start
    finally:
        failures = []
        running = [daemon for daemon in started if daemon.running]
        for daemon in running:
            daemon.signal(signal.SIGTERM)
            daemon.signal(signal.SIGCONT)
        for daemon in running:
            try:
                status = daemon.popen.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                failures.append(f"{daemon!r} did not end at SIGTERM{daemon.tail()}")
                daemon.kill()
            else:
                if status != 0:
                    failures.append(f"{daemon!r} ended with status {status}{daemon.tail()}")
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)
