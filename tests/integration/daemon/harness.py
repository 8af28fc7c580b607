"""Real daemons, and engines in processes of their own. Everything is ended by its own pid."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

from kvd.protocol.types import PeerAddr
from tests.conftest import wait_for
from tests.integration.daemon.watched import REPORT

ROOT = Path(__file__).parents[3]
START_S = 60.0
ANSWER_S = 30.0


class Process:
    """A child that logs to a file and ends with `stop`, however that has to be."""

    parent = str(os.getpid())
    """Whose death is theirs too."""

    def __init__(self, name: str, folder: Path, command: list[str], **how: Any) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        env = {**os.environ, **how.pop("env", {}), "KVD_DIE_WITH_PARENT": self.parent}
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen(
                command, cwd=ROOT, env=env, stderr=log, start_new_session=True, **how
            )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def kill(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout: float = ANSWER_S) -> int:
        return self.popen.wait(timeout)

    def fds(self) -> int:
        """Open descriptors."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def stop(self) -> None:
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()
        if self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self.kill(signal.SIGCONT)
                self.kill(signal.SIGKILL)
            self.popen.wait(10)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


class Daemon(Process):
    """`kvd serve` on a socket of its own, with these settings (names as in the settings tree)."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        env: dict[str, str] | None = None,
        first_start: bool = False,
        module: str = "tests.integration.daemon.watched",
        **settings: Any,
    ):
        self.socket = str(folder / f"{name}.sock")
        self.discovery = folder / f"{name}.json"
        self.loop_report = folder / f"{name}.loop"
        every: dict[str, Any] = {
            "socket": self.socket,
            "discovery_file": str(self.discovery),
            "log_format": "json",
            "log_level": "debug",
            "heartbeat_s": 0.2,
            "peer_timeout_s": 4.0,
            **settings,
        }
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in every.items()]
        # Starting twice, for the C library's settings, is for those who measure.
        once = {} if first_start else {"KVD_REEXEC": "1"}
        super().__init__(
            name,
            folder,
            [sys.executable, "-m", module, "serve", *flags],
            env={**once, REPORT: str(self.loop_report), **(env or {})},
        )

    def ready(self) -> Self:
        """Waits until it serves."""
        self.found  # noqa: B018
        return self

    @property
    def found(self) -> dict[str, Any]:
        """What its discovery file says."""

        def read() -> dict[str, Any] | None:
            if self.popen.poll() is not None:
                raise AssertionError(
                    f"{self.name} ended with {self.popen.returncode}: {self.tail()}"
                )
            try:
                found: dict[str, Any] = json.loads(self.discovery.read_text())
            except (OSError, ValueError):
                return None
            return found if found["pid"] == self.pid else None

        return wait_for(read, START_S, what=f"{self.name} serves")

    @property
    def address(self) -> PeerAddr:
        host, _, port = self.found["advertise"].rpartition(":")
        return PeerAddr(host, int(port))

    def metric(self, name: str, **labels: str) -> float:
        """One sample, 0 when it is not there."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        total = 0.0
        for line in self.get("/metrics").splitlines():
            head, _, value = line.rpartition(" ")
            base, _, inner = head.partition("{")
            if base == name and wanted <= set(inner.rstrip("}").split(",")):
                total += float(value)
        return total

    def get(self, path: str) -> str:
        url = f"http://{self.found['metrics']}{path}"
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())

    def mapped(self) -> float:
        """Bytes of memory files that the kernel says it has mapped now, and are shared."""
        total = 0
        for line in Path(f"/proc/{self.pid}/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and ("kvd-blocks" in fields[5] or "kvd-fence" in fields[5]):
                start, end = (int(x, 16) for x in fields[0].split("-"))
                total += end - start
        return total

    def slow_callbacks(self) -> list[str]:
        """What its loop should not have done; see `watched`. Of all daemons of this name here."""
        with contextlib.suppress(FileNotFoundError):
            return self.loop_report.read_text().splitlines()
        return []

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Log lines of one event."""
        out = []
        for line in self.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if found.get("event") == event:
                    out.append(found)
        return out


class EngineProcess(Process):
    """`tests.integration.daemon.engine` in a process of its own."""

    module = "tests.integration.daemon.engine"

    def __init__(self, name: str, folder: Path, socket: str, engine_id: str, **setup: Any) -> None:
        super().__init__(
            name,
            folder,
            [sys.executable, "-m", self.module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self.engine_id = engine_id
        self._rest = b""
        self._write({"socket": socket, "engine_id": engine_id, **setup})

    def _write(self, message: dict[str, Any]) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(message).encode() + b"\n")

    def ask(self, op: str, **how: Any) -> dict[str, Any]:
        """One command and its answer."""
        self.tell(op, **how)
        return self.answer(op)

    def tell(self, op: str, **how: Any) -> None:
        self._write({"op": op, **how})

    def answer(self, op: str = "") -> dict[str, Any]:
        assert self.popen.stdout is not None
        deadline = time.monotonic() + ANSWER_S
        while b"\n" not in self._rest:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self.popen.stdout], [], [], left)
            part = os.read(self.popen.stdout.fileno(), 2**16) if ready else b""
            if not part:
                raise AssertionError(f"{self.name} does not answer {op}: {self.tail()}")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, answer
        return answer

    def up(self) -> dict[str, Any]:
        return self.ask("up")
