"""Two hosts of a sort: two network namespaces with a cable between them that can be pulled.

They have no names and belong to this process: nothing is left of them when it ends. What is
started inside `Cable.inside(end)` lives in that namespace. Needs root (CAP_SYS_ADMIN).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _enter(fd: int) -> None:
    _check(_libc.setns(fd, _CLONE_NEWNET))


class Cable:
    """Ends 0 and 1 have the addresses `hosts`. Raises OSError where this is not allowed."""

    def __init__(self, number: int) -> None:
        self.hosts = (f"10.231.{number}.1", f"10.231.{number}.2")
        self.network = f"10.231.{number}.0/24"
        self._ends: list[int] = []
        self._home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if shutil.which("ip") is None:
                raise OSError("there is no `ip`")
            for _ in range(2):
                self._ends.append(self._new())
            other = self._ends[1]
            self._ip(0, "link", "add", "va", "type", "veth", "peer", "name", "vb",
                     "netns", f"/proc/self/fd/{other}", pass_fds=(other,))  # fmt: skip
            for end, name in enumerate(("va", "vb")):
                self._ip(end, "address", "add", f"{self.hosts[end]}/24", "dev", name)
                self._ip(end, "link", "set", "lo", "up")
                self._ip(end, "link", "set", name, "up")
        except BaseException:
            self.close()
            raise

    def _new(self) -> int:
        try:
            _check(_libc.unshare(_CLONE_NEWNET))
            return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            _enter(self._home)

    @contextlib.contextmanager
    def inside(self, end: int) -> Iterator[None]:
        """This thread, and what it starts, is in that namespace meanwhile."""
        _enter(self._ends[end])
        try:
            yield
        finally:
            _enter(self._home)

    def _ip(self, end: int, *arguments: str, pass_fds: tuple[int, ...] = ()) -> None:
        with self.inside(end):
            done = subprocess.run(
                ["ip", *arguments], pass_fds=pass_fds, capture_output=True, text=True, timeout=10,
                check=False,
            )  # fmt: skip
        if done.returncode != 0:
            raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")

    def stall(self) -> None:
        """Pulls the cable: nothing passes, and nobody is told."""
        self._ip(0, "link", "set", "va", "down")

    def heal(self) -> None:
        self._ip(0, "link", "set", "va", "up")

    def close(self) -> None:
        for fd in (*self._ends, self._home):
            os.close(fd)
        self._ends = []
