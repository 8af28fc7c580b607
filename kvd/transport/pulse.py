"""Which threads are at work, and whether they get on: what the daemon's watchdog asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Pulse:
    """Threads say `busy` each time they get on with their work, and `idle` before they wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beats: dict[int, tuple[str, float]] = {}

    def busy(self) -> None:
        """The calling thread works, and has just got on."""
        self._beats[threading.get_ident()] = (threading.current_thread().name, self._clock())

    def idle(self) -> None:
        """The calling thread waits for work, or ends."""
        self._beats.pop(threading.get_ident(), None)

    def stuck(self, limit_s: float) -> list[str]:
        """Names of threads that have been at the same piece of work for longer than `limit_s`."""
        since = self._clock() - limit_s
        return sorted(name for name, beat in self._beats.copy().values() if beat < since)
