"""The processes that the harness starts: two daemons and two clients. None outlives it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvd.bench.interrupts import ENDING, interrupts_wait

READY_TIMEOUT_S = 60.0
ANSWER_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 10.0
MAX_ANSWER = 16 * 2**20
LOG_LINES = 15

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class ProcessFailed(Exception):
    """A daemon or a client did not do its part; the text ends with the last lines it logged."""


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and all its threads so far, ended ones included.

    The process's CPU clock: what /proc/PID/stat tells in ticks of 10 ms, in nanoseconds.
    """
    return time.clock_gettime(~pid << 3 | 2)


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "".join(f"\n  {line}" for line in lines)
    return ""


def _is_info(line: str) -> bool:
    try:
        return json.loads(line).get("level") in ("debug", "info")
    except (ValueError, AttributeError):
        return False


class Process:
    """A child in its own session, so that Ctrl-C reaches the harness alone; it logs to a file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        *,
        pass_fds: Sequence[int] = (),
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as log, interrupts_wait():
            self.popen = subprocess.Popen(
                command,
                stdin=stdin,
                stdout=log if stdout is None else stdout,
                stderr=log,
                pass_fds=pass_fds,
                start_new_session=True,
                # The harness has one thread, so running code between fork and exec is safe.
                preexec_fn=_die_with_parent,
                bufsize=0,
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def failed(self, what: str) -> ProcessFailed:
        return ProcessFailed(f"{self.name} {what}{_tail(self.log)}")

    def stop(self) -> None:
        """End it, by force if it does not end by itself."""
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()
        if self.popen.poll() is None and self.popen.stdin is None:
            self.popen.terminate()
        try:
            self.popen.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


class Daemon(Process):
    """`kvd serve` with the user's environment and these settings on top."""

    def __init__(self, name: str, folder: Path, settings: Mapping[str, str]) -> None:
        self.socket = folder / f"{name}.sock"
        self._discovery = folder / f"{name}.json"
        own = {
            "socket": str(self.socket),
            "listen": "127.0.0.1:0",
            "metrics": "",
            "discovery_file": str(self._discovery),
            "log_format": "json",
        }
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in {**own, **settings}.items()]
        super().__init__(name, [sys.executable, "-m", "kvd", "serve", *flags], folder)

    def wait_ready(self) -> None:
        """Until its sockets are bound. Raises ProcessFailed."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self._discovery.exists():
            if self.popen.poll() is not None:
                raise self.failed(f"ended with status {self.popen.returncode}")
            if time.monotonic() > deadline:
                raise self.failed(f"was not ready within {READY_TIMEOUT_S:.0f} s")
            time.sleep(0.02)

    def complaints(self) -> str:
        """The last warnings and errors that it logged, a line each; whatever is no JSON, too."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()
            bad = [line for line in lines if not _is_info(line)][-LOG_LINES:]
            return "".join(f"\n  {self.name}: {line}" for line in bad)
        return ""


class ClientProcess(Process):
    """`kvd.bench.client`, driven by one JSON object a line."""

    def __init__(self, name: str, folder: Path, fds: Sequence[int], setup: dict[str, Any]) -> None:
        super().__init__(
            name,
            [sys.executable, "-m", "kvd.bench.client"],
            folder,
            pass_fds=fds,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._rest = b""
        self.send({"fds": list(fds), **setup})

    def send(self, command: dict[str, Any]) -> None:
        stdin = self.popen.stdin
        assert stdin is not None
        view = memoryview(json.dumps(command).encode() + b"\n")
        # What it says before it ends tells more than a broken pipe does.
        with contextlib.suppress(BrokenPipeError):
            while view:
                view = view[os.write(stdin.fileno(), view) :]

    def answer(self) -> dict[str, Any]:
        """The answer to the oldest command without one. Raises ProcessFailed."""
        stdout = self.popen.stdout
        assert stdout is not None
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stdout], [], [], left)[0]:
                raise self.failed(f"gave no answer in {ANSWER_TIMEOUT_S:.0f} s")
            part = os.read(stdout.fileno(), 2**20)
            if not part or len(self._rest) > MAX_ANSWER:
                raise self.failed(f"ended with status {self.popen.poll()}")
            self._rest += part
        line, self._rest = self._rest.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        if not answer["ok"]:
            raise self.failed(answer["error"])
        return answer

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        self.send({"op": op, **arguments})
        return self.answer()
