"""What is refused or thrown away is counted each time, and logged once per kind.

A hostile or broken neighbour must be visible, and must not be able to fill the log.
"""

from __future__ import annotations

from typing import Protocol

import structlog

from kvd.logging import OncePerKind

MAX_KINDS = 256


class DropCounter(Protocol):
    """Where drops are counted; `kvd.metrics.Metrics` is one."""

    def dropped(self, where: str, reason: str) -> None: ...


class Drops:
    """Counts by (where, reason). Both come from code, never from a message."""

    def __init__(self, counter: DropCounter | None = None) -> None:
        self._counter = counter
        self._once = OncePerKind(structlog.get_logger("kvd.drops"), max_kinds=MAX_KINDS)
        self.counts: dict[tuple[str, str], int] = {}

    def drop(self, where: str, reason: str, **fields: object) -> None:
        """One thing was dropped at `where` for `reason`; `fields` go to the first log line."""
        key = (where, reason)
        self.counts[key] = self.counts.get(key, 0) + 1
        if self._counter is not None:
            self._counter.dropped(where, reason)
        self._once.warning(key, "dropped", where=where, reason=reason, **fields)
