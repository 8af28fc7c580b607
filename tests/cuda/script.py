"""What a fake call does instead of its work: fail, hang, or be late."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

HANG_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Fail:
    """The call returns this error instead of doing anything."""

    error: str


@dataclass(slots=True)
class Hang:
    """The call does not return before `release`; then it does its work."""

    reached: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        self.go.set()

    def stand(self) -> None:
        self.reached.set()
        assert self.go.wait(HANG_LIMIT_S), "a scripted hang was never released"


@dataclass(frozen=True, slots=True)
class Late:
    """Work that is looked at is not ready for so many looks."""

    looks: int


Behaviour = Fail | Hang | Late


class Script:
    """Behaviours by call, in order; a call without one does its work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._to_come: dict[str, deque[Behaviour | None]] = defaultdict(deque)
        self.calls: list[str] = []
        self.counts: Counter[str] = Counter()

    def add(self, call: str, behaviour: Behaviour, *, after: int = 0) -> None:
        """The call after `after` further undisturbed ones behaves so."""
        with self._lock:
            self._to_come[call].extend([None] * after)
            self._to_come[call].append(behaviour)

    def clear(self) -> None:
        with self._lock:
            self._to_come.clear()

    def enter(self, call: str) -> Any:
        """Notes the call; hangs if it is to, and returns a Fail or Late that it is to do."""
        with self._lock:
            self.calls.append(call)
            self.counts[call] += 1
            queue = self._to_come[call]
            behaviour = queue.popleft() if queue else None
        if isinstance(behaviour, Hang):
            behaviour.stand()
            return None
        return behaviour
