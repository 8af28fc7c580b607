"""What `kvd doctor` finds, and what it looks at: values, so that a check is a plain function."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from kvd.ops.api import Target
from kvd.protocol.types import PeerAddr
from kvd.settings import Settings

Level = Literal["ok", "warning", "error"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "error")


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact: what it is, why it matters, and how to change it."""

    check: str
    level: Level
    what: str
    why: str = ""
    fix: str = ""


def ok(check: str, what: str) -> Finding:
    return Finding(check, "ok", what)


def warning(check: str, what: str, *, why: str, fix: str) -> Finding:
    return Finding(check, "warning", what, why, fix)


def error(check: str, what: str, *, why: str, fix: str) -> Finding:
    return Finding(check, "error", what, why, fix)


def worst(findings: list[Finding]) -> Level:
    """The worst level among them."""
    return max((f.level for f in findings), key=LEVELS.index, default="ok")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _plugins() -> list[str]:
    return [point.name for point in metadata.entry_points(group="vllm.general_plugins")]


def _limits(kind: int) -> tuple[int, int]:
    return resource.getrlimit(kind)


def _clock_state() -> int:
    """What the kernel says of the clock: 5 is "not synchronised"; -1 where it does not say."""
    buffer = ctypes.create_string_buffer(512)  # struct timex, all zero: only ask
    try:
        return int(ctypes.CDLL(None, use_errno=True).adjtimex(buffer))
    except (OSError, AttributeError):
        return -1


def _gpus(index: int) -> tuple[int, list[int]]:
    from kvd.ops.checks_gpu import probe_gpus

    return probe_gpus(index)


@dataclass(frozen=True)
class Surroundings:
    """All that the checks look at. Tests put a fault into one of these."""

    settings: Settings
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    uid: int = field(default_factory=os.geteuid)
    groups: Callable[[], list[int]] = lambda: [os.getegid(), *os.getgroups()]
    shm: Path = Path("/dev/shm")  # noqa: S108 - where shared memory lies
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    statvfs: Callable[[str], os.statvfs_result] = os.statvfs
    clock_state: Callable[[], int] = _clock_state
    limits: Callable[[int], tuple[int, int]] = _limits
    version: Callable[[str], str | None] = _version
    plugins: Callable[[], list[str]] = _plugins
    gpus: Callable[[int], tuple[int, list[int]]] = _gpus
    """How many GPUs there are, and which of them one has no peer access to."""
    target: Target | None = None
    """The running daemon's HTTP, if there is one."""
    status: Mapping[str, Any] | None = None
    """What it answered, if it did."""
    problem: str = ""
    """Why it did not."""
    peer: PeerAddr | None = None

    @property
    def daemon(self) -> Mapping[str, Any] | None:
        """The `daemon` part of the status."""
        return None if self.status is None else self.status["daemon"]
