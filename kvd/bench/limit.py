"""The machine's own speed on the bench's pieces: builds `limit.c`, runs it, reads its answers.

The program maps the very memory that the daemons use. Without a C compiler there is no limit, and
the bench says so; nothing is estimated.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Self

import numpy as np

from kvd.bench.interrupts import interrupts_wait

SOURCE = Path(__file__).with_name("limit.c")
COMPILERS = ("cc", "gcc", "clang")
COMPILE_TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 120.0
EXIT_TIMEOUT_S = 10.0
MAX_ANSWER = 64 * 1024


class LimitUnavailable(Exception):
    """There is no limit program on this machine; the text says why."""


class LimitFailed(Exception):
    """The limit program broke, or saw wrong bytes."""


def build(folder: Path) -> Path:
    """Compile the program into `folder`; returns its path. Raises LimitUnavailable."""
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise LimitUnavailable(f"no C compiler found (looked for {', '.join(COMPILERS)})")
    binary = folder / "limit"
    command = [compiler, "-O2", "-std=gnu11", "-pthread", "-o", str(binary), str(SOURCE)]
    try:
        status, said = _compile(command, folder)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LimitUnavailable(f"{compiler} did not run: {error}") from error
    if status:
        lines = said.strip().splitlines() or [f"exit status {status}"]
        raise LimitUnavailable(f"{compiler} failed: {lines[0]}")
    return binary


def _compile(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """Exit status and stderr. Whatever ends it early ends the compiler's own children too."""
    process = None
    try:
        with interrupts_wait():
            process = subprocess.Popen(
                command,
                # A compiler that is interrupted leaves its scratch files where the rest goes away.
                env={**os.environ, "TMPDIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        _, said = process.communicate(timeout=COMPILE_TIMEOUT_S)
    except BaseException:
        if process is not None and process.returncode is None:
            # Not reaped yet, so the group is still its own. The pipe ends when all of it is gone.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        raise
    return process.returncode, said


@dataclass(frozen=True, slots=True)
class LimitSummary:
    """`gbs` is the best method's median, in 1e9 bytes a second."""

    gbs: float
    method: str
    by_method: dict[str, float]
    cpu_s_per_gb: float
    samples: int
    congestion: str


class Limit:
    """The running program. One `measure` is one run of every method."""

    def __init__(
        self,
        binary: Path,
        transport: str,
        *,
        src_fds: Sequence[int],
        dst_fds: Sequence[int],
        layers: int,
        src_blocks: int,
        dst_blocks: int,
        piece: int,
        threads: int,
        congestion: str,
    ) -> None:
        """Starts the program. fds: one memfd for each layer or one for all; `piece` in bytes."""
        self._piece_bytes = layers * piece
        self._seconds: dict[str, list[float]] = {}
        self._cpu: dict[str, list[float]] = {}
        self._nbytes: list[int] = []
        self._congestion = ""
        self._process = subprocess.Popen(
            [
                str(binary),
                transport,
                ",".join(map(str, src_fds)),
                ",".join(map(str, dst_fds)),
                str(layers),
                str(src_blocks),
                str(dst_blocks),
                str(piece),
                congestion if transport == "tcp" else str(threads),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[*src_fds, *dst_fds],
            start_new_session=True,
            bufsize=0,
        )

    def measure(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy block `src[i]` to `dst[i]` of every layer, by each method. Raises LimitFailed."""
        ids = np.asarray([src, dst], np.uint32)
        view = memoryview(b"run %d\n" % len(src) + ids.tobytes())
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its last words say why
            while view:
                view = view[os.write(stdin.fileno(), view) :]
        answer = json.loads(self._read_line())
        if not answer["ok"]:
            raise LimitFailed(answer["error"])
        self._congestion = answer["congestion"]
        self._nbytes.append(len(src) * self._piece_bytes)
        for run in answer["runs"]:
            self._seconds.setdefault(run["method"], []).append(run["seconds"])
            self._cpu.setdefault(run["method"], []).append(run["cpu_seconds"])

    def summary(self) -> LimitSummary:
        """Over all measurements so far; there must be one."""
        by_method = {
            method: median(n / s / 1e9 for n, s in zip(self._nbytes, all_seconds, strict=True))
            for method, all_seconds in self._seconds.items()
        }
        best = max(by_method, key=lambda method: by_method[method])
        return LimitSummary(
            gbs=by_method[best],
            method=best,
            by_method=by_method,
            cpu_s_per_gb=sum(self._cpu[best]) / sum(self._nbytes) * 1e9,
            samples=len(self._nbytes),
            congestion=self._congestion,
        )

    def _read_line(self) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        line = b""
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([stdout], [], [], left)[0]:
                raise LimitFailed(f"no answer in {RUN_TIMEOUT_S:.0f} s")
            part = os.read(stdout.fileno(), MAX_ANSWER)
            if not part or len(line) > MAX_ANSWER:
                raise LimitFailed(f"it died (exit status {self._process.poll()})")
            line += part
        return line

    def close(self) -> None:
        """End the program; it exits when its stdin ends, and is killed if it does not."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
