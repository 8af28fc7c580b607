"""A table that forgets: bounded in size, and by age."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """Entries live `ttl` seconds after they were last put; over `bound`, the oldest goes first."""

    def __init__(self, ttl: float, bound: int) -> None:
        self._ttl = ttl
        self._bound = bound
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: K, value: V, now: float) -> None:
        self._entries.pop(key, None)
        self._entries[key] = (now + self._ttl, value)
        while len(self._entries) > self._bound:
            self._entries.popitem(last=False)

    def get(self, key: K, now: float) -> V | None:
        entry = self._entries.get(key)
        if entry is None or entry[0] <= now:
            return None
        return entry[1]

    def drop(self, key: K) -> None:
        self._entries.pop(key, None)

    def trim(self, now: float) -> None:
        while self._entries:
            key, (until, _) = next(iter(self._entries.items()))
            if until > now:
                return
            del self._entries[key]

    def next_expiry(self) -> float | None:
        """When the oldest entry is forgotten, in the caller's clock."""
        for until, _ in self._entries.values():
            return until
        return None
