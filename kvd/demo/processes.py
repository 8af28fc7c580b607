"""Owns the demo's child processes: each in a session of its own, each with a log, none left over.

A child is ended by its own id, in steps that each have a deadline: SIGTERM to the leader, then
SIGKILL to the members of its process group. The leader is not reaped before its group is empty,
and the members are stopped before they are killed, so that no id is anybody else's meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl

SHM = "/dev/shm/"  # noqa: S108 - this is where shared memory is, not a temporary file
LOCAL_ONLY = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
"""For programs that would ask a proxy for addresses of this machine."""
POLL_S = 0.05
LEFT_BEHIND_S = 3.0
TRACKER_S = 10.0
TRACKER = "multiprocessing.resource_tracker"


@dataclass(slots=True)
class Child:
    """One process that the demo started. `log` gets its stdout and stderr."""

    name: str
    argv: list[str]
    log: Path
    popen: subprocess.Popen[bytes]
    grace_s: float
    env: dict[str, str]
    """What was set for it beyond the demo's own environment."""
    stopping: bool = False
    shared: set[str] = field(default_factory=set)
    """Names in /dev/shm that its processes were seen to use."""

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def command(self) -> str:
        """The line that starts the same process from a shell."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.env.items())]
        return " ".join([*settings, shlex.join(self.argv)])

    def alive(self) -> bool:
        """Looks without reaping."""
        if self.popen.returncode is not None:
            return False
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, flags) is None

    def exit_code(self) -> int | None:
        """Exit code, negative signal number, or None while it lives. Does not reap."""
        if self.popen.returncode is not None:
            return self.popen.returncode
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        info = os.waitid(os.P_PID, self.pid, flags)
        if info is None:
            return None
        return info.si_status if info.si_code == os.CLD_EXITED else -info.si_status

    def tail(self, lines: int = 12) -> str:
        """The last lines of its log."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            return f"({self.log}: {error.strerror})"
        return "\n".join(text.rstrip().splitlines()[-lines:])


class Children:
    """All child processes of one demo."""

    def __init__(self) -> None:
        self._children: list[Child] = []
        self.hurry = False
        """Set when the user asks a second time: no more grace, SIGKILL at once."""

    def start(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        grace_s: float = 10.0,
    ) -> Child:
        """Start `argv` with `env` on top of our environment. `grace_s`: SIGTERM to SIGKILL.

        Raises OSError when the program cannot be started.
        """
        extra = dict(env or {})
        with log.open("ab") as out:
            popen = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **extra},
                start_new_session=True,
                # The demo has one thread when it starts a process, so this is safe after a fork.
                preexec_fn=_die_with_parent,
            )
        child = Child(name, list(argv), log, popen, grace_s, extra)
        self._children.append(child)
        return child

    def all(self) -> list[Child]:
        """Those that were started and not stopped."""
        return list(self._children)

    def ended(self) -> list[Child]:
        """Those that ended although nobody asked them to."""
        return [c for c in self._children if not c.stopping and not c.alive()]

    async def stop(self, *children: Child) -> None:
        """End these at the same time; returns when all their processes are gone."""
        ours = [c for c in children if c in self._children]
        for child in ours:
            child.stopping = True
            child.shared |= shared_memory_of(child.pid)
            _signal(child.pid, signal.SIGTERM, group=False)
        await asyncio.gather(*(self._finish(child) for child in ours))
        for child in ours:
            self._children.remove(child)

    async def stop_all(self, order: Iterable[Iterable[Child]] = ()) -> None:
        """End everything: the groups of `order` one after the other, then what is left."""
        for group in order:
            await self.stop(*group)
        await self.stop(*self._children)

    async def _finish(self, child: Child) -> None:
        await self._until(lambda: not child.alive(), child.grace_s)
        # What the leader left behind mostly goes by itself.
        await self._until(lambda: not _members(child.pid), LEFT_BEHIND_S)
        if _members(child.pid) or child.alive():
            self._kill(child)
            gone = await self._until(lambda: not _members(child.pid), TRACKER_S, patient=True)
            if not gone:
                _signal(child.pid, signal.SIGKILL, group=True)
                await self._until(lambda: not _members(child.pid), TRACKER_S, patient=True)
        # Killed by us just now or dead already: this only reaps.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.popen.wait(timeout=5.0)
        for name in child.shared:
            with contextlib.suppress(OSError):
                os.unlink(SHM + name)

    @staticmethod
    def _kill(child: Child) -> None:
        """SIGKILL for the whole group but multiprocessing's resource trackers.

        A tracker knows names in /dev/shm that nobody has mapped yet or any more. It ignores
        SIGTERM, and removes them once the others are gone.
        """
        # Stopped first, so that nothing is made between looking and killing.
        _signal(child.pid, signal.SIGSTOP, group=True)
        child.shared |= shared_memory_of(child.pid)
        for pid in _members(child.pid):
            tracker = TRACKER in _command_line(pid)
            _signal(pid, signal.SIGCONT if tracker else signal.SIGKILL, group=False)

    async def _until(
        self, condition: Callable[[], bool], timeout: float, *, patient: bool = False
    ) -> bool:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline or (self.hurry and not patient):
                return False
            await asyncio.sleep(POLL_S)
        return True


def shared_memory_of(group: int) -> set[str]:
    """Names in /dev/shm that the living members of a process group have mapped or open."""
    names: set[str] = set()
    for pid in [group, *_members(group)]:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines():
                names.add(line.partition(SHM)[2])
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    names.add(os.readlink(entry.path).partition(SHM)[2])
    return {name for name in names if name and "/" not in name and not name.endswith("(deleted)")}


def _members(group: int) -> list[int]:
    """Living members of a process group, the leader's zombie not counted."""
    found: list[int] = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        # The name in parentheses may hold anything; the fields after it are state, ppid, pgrp.
        state, _, pgrp, *_ = stat.rpartition(")")[2].split()
        if int(pgrp) == group and state not in "ZX":
            found.append(int(entry.name))
    return found


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _die_with_parent() -> None:
    """SIGTERM for a child when the demo itself is killed and cannot clean up."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _signal(pid: int, number: signal.Signals, *, group: bool) -> None:
    with contextlib.suppress(ProcessLookupError):
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
