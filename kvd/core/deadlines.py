"""Deadlines in a heap. Moving one never hides another: the table, not the heap, is the truth."""

from __future__ import annotations

import heapq
from collections.abc import Hashable

Key = tuple[Hashable, ...]


class Deadlines:
    """One time for each key. Outdated heap entries are skipped when they surface."""

    def __init__(self) -> None:
        self._times: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._times)

    def __contains__(self, key: Key) -> bool:
        return key in self._times

    def get(self, key: Key) -> float | None:
        return self._times.get(key)

    def set(self, key: Key, when: float) -> None:
        """Set or move the deadline of `key`."""
        if self._times.get(key) == when:
            return
        self._times[key] = when
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, key))
        if len(self._heap) > 64 + 2 * len(self._times):
            self._rebuild()

    def clear(self, key: Key) -> None:
        self._times.pop(key, None)

    def next(self) -> float | None:
        heap = self._heap
        while heap and self._times.get(heap[0][2]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pop_due(self, now: float) -> Key | None:
        """Take out one key whose time has come, earliest first."""
        when = self.next()
        if when is None or when > now:
            return None
        key = heapq.heappop(self._heap)[2]
        del self._times[key]
        return key

    def _rebuild(self) -> None:
        self._heap = [(when, i, key) for i, (key, when) in enumerate(self._times.items())]
        heapq.heapify(self._heap)
        self._count = len(self._heap)
