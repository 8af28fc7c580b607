"""Counts of one worker's transfers, as plain data that vLLM can carry between processes."""

from __future__ import annotations

from typing import Any

from kvd.protocol.codes import Code

_END_CODES = frozenset(Code) | {"other"}
MAX_SECONDS = 4096
"""Durations kept between two reports; more are counted, their times are not kept."""


def empty() -> dict[str, Any]:
    """`fetches`, `offers`: counts by how they ended; `seconds`: one per fetch that succeeded."""
    return {"fetches": {}, "offers": {}, "nbytes": 0, "tokens": 0, "seconds": []}


def is_empty(data: dict[str, Any]) -> bool:
    return not data["fetches"] and not data["offers"]


def merge(mine: dict[str, Any], other: object) -> dict[str, Any]:
    """Sum of two payloads. Of `other`, which may come from anywhere, only sound parts count."""
    result: dict[str, Any] = {
        "fetches": dict(mine["fetches"]),
        "offers": dict(mine["offers"]),
        "nbytes": mine["nbytes"],
        "tokens": mine["tokens"],
        "seconds": list(mine["seconds"]),
    }
    if not isinstance(other, dict):
        return result
    for table in ("fetches", "offers"):
        counts = other.get(table)
        for code, count in counts.items() if isinstance(counts, dict) else ():
            name = code if code in _END_CODES else "other"
            result[table][name] = result[table].get(name, 0) + _count(count)
    for total in ("nbytes", "tokens"):
        result[total] += _count(other.get(total))
    seconds = other.get("seconds")
    if isinstance(seconds, list | tuple):
        sound = [float(s) for s in seconds if _is_number(s) and s >= 0]
        result["seconds"] = (result["seconds"] + sound)[:MAX_SECONDS]
    return result


def summary(data: dict[str, Any]) -> dict[str, int | float]:
    """One line for vLLM's periodic log."""
    seconds = sorted(data["seconds"])
    total = sum(seconds)
    good = data["fetches"].get(Code.OK, 0)
    return {
        "Fetches": good,
        "Failed fetches": sum(data["fetches"].values()) - good,
        "Fetched MB": round(data["nbytes"] / 2**20, 3),
        "Avg fetch (ms)": round(total / len(seconds) * 1e3, 3) if seconds else 0,
        "P90 fetch (ms)": round(seconds[int(len(seconds) * 0.9)] * 1e3, 3) if seconds else 0,
        "Offers released": data["offers"].get(Code.RELEASED, 0),
        "Offers expired": data["offers"].get(Code.EXPIRED, 0),
    }


class Telemetry:
    """Collects; `take` hands over and starts anew."""

    def __init__(self) -> None:
        self._data = empty()

    def fetch_ended(self, code: str, nbytes: int = 0, tokens: int = 0, seconds: float = -1) -> None:
        """`nbytes`, `tokens` and `seconds` count for fetches that succeeded."""
        self._bump("fetches", code)
        if code != Code.OK:
            return
        self._data["nbytes"] += nbytes
        self._data["tokens"] += tokens
        if seconds >= 0 and len(self._data["seconds"]) < MAX_SECONDS:
            self._data["seconds"].append(seconds)

    def offer_ended(self, reason: str) -> None:
        self._bump("offers", reason)

    def take(self) -> dict[str, Any] | None:
        """What was counted since the last call, None if nothing was."""
        if is_empty(self._data):
            return None
        data, self._data = self._data, empty()
        return data

    def _bump(self, table: str, code: str) -> None:
        name = str(code) if code in _END_CODES else "other"
        self._data[table][name] = self._data[table].get(name, 0) + 1


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
