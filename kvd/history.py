"""The last transfers, with the times of their stages: a bounded ring that operators can read."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from kvd.core.instructions import Record
from kvd.protocol.codes import Code
from kvd.protocol.types import Stages

MAX_TRANSFERS = 512
MAX_FAILURES = 64
_KINDS = {"fetch_done": "fetched", "fetch_served": "served"}


class History:
    """Takes the core's records; keeps the last `size` transfers of both directions."""

    def __init__(self, size: int = MAX_TRANSFERS, clock: Callable[[], float] = time.time) -> None:
        self._transfers: deque[dict[str, object]] = deque(maxlen=size)
        self._failures: dict[str, dict[str, object]] = {}
        self._clock = clock

    def record(self, record: Record) -> None:
        """Keeps a transfer that ended; other records are not for here."""
        direction = _KINDS.get(record.kind)
        if direction is None:
            return
        get = record.fields.get
        entry: dict[str, object] = {
            "at": self._clock(),
            "direction": direction,
            "code": str(get("code", "")),
            "transfer_id": str(get("transfer_id", "")),
            "fetch_id": str(get("fetch_id", "")),
            "engine_id": str(get("engine_id", "")),
            "peer": str(get("peer", "")),
            "transport": str(get("transport") or ""),
            "tokens": get("tokens"),
            "nbytes": get("nbytes", 0),
            "detail": str(get("detail", "")),
            "stages": _stages(record.fields),
        }
        self._transfers.append(entry)
        code = str(entry["code"])
        if code != Code.OK:
            seen = self._failures.pop(code, None)
            count = seen["count"] if seen is not None else 0
            assert isinstance(count, int)
            kept = {k: entry[k] for k in ("at", "direction", "transfer_id", "peer", "detail")}
            # The latest is the last; there are no more codes than `Code` has, but be sure.
            self._failures[code] = {"code": code, "count": count + 1, **kept}
            while len(self._failures) > MAX_FAILURES:
                del self._failures[next(iter(self._failures))]

    def last(self, count: int) -> list[dict[str, object]]:
        """The last `count` transfers, the newest first."""
        newest = reversed(self._transfers)
        return [entry for _, entry in zip(range(max(0, count)), newest, strict=False)]

    def failures(self) -> list[dict[str, object]]:
        """For each code how often it came since the start, and its last case; newest first."""
        return list(reversed(self._failures.values()))


def _stages(fields: Mapping[str, object]) -> dict[str, float]:
    """Seconds since the engine asked: parked at the producer's daemon, granted, first and last
    byte, told. -1: never reached."""
    stages, told = fields.get("stages"), fields.get("seconds")
    if not isinstance(stages, Stages):
        return {}
    return {
        "parked": stages.parked,
        "granted": stages.granted,
        "first_byte": stages.first_byte,
        "last_byte": stages.last_byte,
        "told": float(told) if isinstance(told, int | float) else -1.0,
    }
