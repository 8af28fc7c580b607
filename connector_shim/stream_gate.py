"""Calls that have to wait for what a GPU's stream holds: kept in order, polled, never waited for.

What the daemon hears must be true when it hears it: that KV is there only after the kernels that
compute it, that blocks may be written only after the kernels that still use them. On a CPU what
was launched has run, so nothing is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Protocol


class Mark(Protocol):
    """A place in the engine's stream."""

    def query(self) -> bool:
        """Whether everything before it has run."""
        ...


class StreamGate:
    """Without `start` nothing is ever kept."""

    def __init__(self) -> None:
        self._record: Callable[[], Mark] | None = None
        self._kept: deque[tuple[Mark, Hashable, Callable[[], None]]] = deque()
        self._latest: Mark | None = None

    def start(self, record: Callable[[], Mark]) -> None:
        """`record` marks the present end of the stream that the engine computes on."""
        self._record = record

    @property
    def keeps(self) -> bool:
        """Whether calls may have to wait at all."""
        return self._record is not None

    def mark(self) -> Mark | None:
        """The present end of the stream."""
        if self._record is not None:
            self._latest = self._record()
        return self._latest

    def latest(self) -> Mark | None:
        """The last mark that was made, or one made now."""
        return self.mark() if self._latest is None else self._latest

    def run(self, mark: Mark | None, key: Hashable, call: Callable[[], None]) -> None:
        """Calls once `mark` is reached and all that was kept before has been called."""
        if mark is None or (not self._kept and mark.query()):
            call()
        else:
            self._kept.append((mark, key, call))

    def poll(self) -> None:
        """Makes the calls whose time has come."""
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()[2]()

    def drop(self, key: Hashable) -> bool:
        """Forgets what is kept for `key`; whether there was anything."""
        before = len(self._kept)
        self._kept = deque(one for one in self._kept if one[1] != key)
        return len(self._kept) < before

    def __len__(self) -> int:
        return len(self._kept)


def cuda_mark() -> Mark:
    """On the stream that is current, which is the one that the model runs on."""
    import torch

    event = torch.cuda.Event()
    event.record()
    mark: Mark = event
    return mark
