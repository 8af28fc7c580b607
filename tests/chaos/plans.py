"""What the driver decides at random: transfers and faults. The same seed decides the same.

Decisions are drawn whether or not they can be carried out at that moment, so that the stream of
random numbers does not depend on how fast anything was.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

BLOCK_SIZE = 16

AIMED = 0.35
"""Part of the transfers that are taken back just when they are read."""

FaultKind = Literal[
    "kill_engine", "kill_daemon", "stop_daemon", "stop_long", "stop_engine", "drain_daemon",
    "stall", "cut", "refuse",
]  # fmt: skip
PROCESS_FAULTS = frozenset(
    ("kill_engine", "kill_daemon", "stop_daemon", "stop_long", "stop_engine", "drain_daemon")
)
_WEIGHTS: dict[FaultKind, int] = {
    "kill_engine": 6,
    "kill_daemon": 5,
    "stop_daemon": 8,
    "stop_long": 1,
    "stop_engine": 4,
    "drain_daemon": 2,
    "stall": 3,
    "cut": 4,
    "refuse": 2,
}


@dataclass(frozen=True, slots=True)
class FetchPlan:
    consumer: int
    delay_s: float
    start: int
    """Blocks that it holds already."""
    short: bool
    """Asks for whole blocks only, one less than there are."""
    cancel_s: float | None
    deadline_s: float
    park_s: float
    misled: bool
    release: bool


@dataclass(frozen=True, slots=True)
class TransferPlan:
    producer: int
    delay_s: float
    blocks: int
    tokens: int
    chunks: int
    """0: sealed at once."""
    gap_s: float
    layered: bool
    lease_s: float
    take_back_s: float | None
    aimed_s: float | None
    """Taken back so long after it was granted to somebody: in mid-copy, at best."""
    take_backs: int
    resume: bool
    fetches: tuple[FetchPlan, ...]

    def offer(self) -> dict[str, Any]:
        """For the producer's engine."""
        names = (
            "delay_s", "blocks", "tokens", "chunks", "gap_s", "layered", "lease_s", "take_back_s",
            "aimed_s", "take_backs", "resume",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


class Transfers:
    """An endless stream of transfer plans."""

    def __init__(self, seed: int, name: str, producers: int, consumers: int) -> None:
        self._rng = random.Random(f"{seed}/{name}/transfers")
        self._producers = producers
        self._consumers = consumers

    def next(self) -> TransferPlan:
        rng = self._rng
        aimed_s = rng.uniform(0.0, 0.005) if rng.random() < AIMED else None
        blocks = rng.randint(9, 24) if rng.random() < 0.3 else rng.randint(1, 6)
        if aimed_s is not None:
            blocks = rng.randint(16, 32)  # long enough to be hit
        tokens = BLOCK_SIZE * blocks - (rng.randrange(BLOCK_SIZE) if rng.random() < 0.5 else 0)
        streamed = rng.random() < 0.5
        takes_back = rng.random() < 0.3
        offer_late = rng.random() < 0.5
        # Taken back while it is being copied, more often than not.
        soon = rng.choice((0.002, 0.01, 0.05, 0.3))
        fetches = tuple(
            FetchPlan(
                consumer=consumer,
                delay_s=rng.uniform(0.0, 0.03),
                start=rng.randrange(blocks) if rng.random() < 0.2 else 0,
                short=rng.random() < 0.1 and blocks > 1,
                cancel_s=rng.uniform(0.0, 0.08) if rng.random() < 0.1 else None,
                deadline_s=rng.uniform(3.0, 8.0),
                park_s=rng.uniform(1.0, 3.0),
                misled=rng.random() < 0.03,
                release=rng.random() < 0.5,
            )
            for consumer in rng.sample(range(self._consumers), 2 if rng.random() < 0.2 else 1)
        )
        return TransferPlan(
            producer=rng.randrange(self._producers),
            delay_s=rng.uniform(0.0, 0.06) if offer_late else 0.0,
            blocks=blocks,
            tokens=tokens,
            chunks=rng.randint(1, 6) if streamed and aimed_s is None else 0,
            gap_s=rng.uniform(0.0, 0.06),
            layered=rng.random() < 0.4,
            lease_s=rng.uniform(0.5, 2.0),
            take_back_s=rng.uniform(0.0, soon) if takes_back else None,
            aimed_s=aimed_s,
            take_backs=rng.randint(1, 3),
            resume=rng.random() < 0.6,
            fetches=fetches,
        )


@dataclass(frozen=True, slots=True)
class FaultPlan:
    kind: FaultKind
    target: float
    """In [0, 1): which of those that the kind may hit."""
    lasts_s: float
    pause_s: float
    """Before the next fault."""


class Faults:
    """An endless stream of faults, about `every_s` apart."""

    def __init__(self, seed: int, name: str, every_s: float) -> None:
        self._rng = random.Random(f"{seed}/{name}/faults")
        self._every_s = every_s

    def next(self) -> FaultPlan:
        rng = self._rng
        (kind,) = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
        longest = 1.0 if kind in ("stop_daemon", "stop_engine") else 3.0
        return FaultPlan(
            kind=kind,
            target=rng.random(),
            lasts_s=8.0 if kind == "stop_long" else rng.uniform(0.05, longest),
            pause_s=rng.uniform(0.3, 1.7) * self._every_s,
        )
