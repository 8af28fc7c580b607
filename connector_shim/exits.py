"""Which ranks' daemons have exited, known at once where their processes can be seen from here."""

from __future__ import annotations

import os
import select
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from connector_shim.jobs import RankId, RankState

_GONE = -1


@cache
def pid_space() -> str:
    """Names the kernel and the PID namespace of this process; empty where they cannot be told.

    A process number means the same process to all who give the same name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


class Exits:
    """Watches the processes of daemons that are up. One that cannot be seen never counts."""

    def __init__(self) -> None:
        self._watched: dict[RankId, tuple[int, int]] = {}
        """(pid, pidfd), or `_GONE` for a process that was gone before it could be watched."""
        self._poller = select.poll()

    def follow(self, states: Mapping[RankId, RankState]) -> None:
        """News of some ranks: from now on it is these processes that count."""
        for rank, state in states.items():
            known = state.up and state.pid > 0 and state.pid_space == pid_space() != ""
            if rank in self._watched and self._watched[rank][0] == (state.pid if known else 0):
                continue
            self._forget(rank)
            if known:
                self._watch(rank, state.pid)

    def seen(self) -> list[RankId]:
        """Ranks whose daemon has exited. One system call, and none where nothing is watched."""
        if not self._watched:
            return []
        ready = {fd for fd, _ in self._poller.poll(0)} | {_GONE}
        return [rank for rank, (_, fd) in self._watched.items() if fd in ready]

    def close(self) -> None:
        for rank in list(self._watched):
            self._forget(rank)

    def _watch(self, rank: RankId, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._watched[rank] = (pid, _GONE)
        except OSError:
            return
        else:
            self._watched[rank] = (pid, fd)
            self._poller.register(fd, select.POLLIN)

    def _forget(self, rank: RankId) -> None:
        _, fd = self._watched.pop(rank, (0, _GONE))
        if fd != _GONE:
            self._poller.unregister(fd)
            os.close(fd)
