"""Runs the core: one event in, its instructions carried out in order, and a timer for the rest.

The core is called from the event loop's thread only, one event at a time. An exception out of it
is a bug of ours; it is told to `on_bug`, which gives up what the event was about, and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import structlog

from kvd.core import events
from kvd.core.instructions import Instruction

log = structlog.get_logger("kvd.reactor")

MIN_DELAY_S = 0.001
BUG_DELAY_S = 1.0
"""After a Tick that failed: its cause may still be there, and must not keep the loop busy."""


class CoreLike(Protocol):
    """The part of `kvd.core.machine.Core` that is used here."""

    def handle(self, event: events.Event, now: float) -> list[Instruction]: ...

    def next_deadline(self) -> float | None: ...


class Reactor:
    """`carry_out` gets each instruction; it may feed events back, which are handled after it."""

    def __init__(
        self,
        core: CoreLike,
        *,
        carry_out: Callable[[Instruction], None],
        on_bug: Callable[[events.Event | Instruction, Exception], None],
        after: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._carry_out = carry_out
        self._on_bug = on_bug
        self._after = after
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._pending: deque[events.Event] = deque()
        self._busy = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._closed = False
        self.bugs = 0

    def feed(self, event: events.Event) -> None:
        """Handles one event now, or after the one that is being handled. Never raises."""
        if self._closed:
            return
        self._pending.append(event)
        if self._busy:
            return
        self._busy = True
        failed_tick = False
        try:
            while self._pending:
                failed_tick |= not self._one(self._pending.popleft())
        finally:
            self._busy = False
        self._arm(BUG_DELAY_S if failed_tick else MIN_DELAY_S)
        self._after()

    def close(self) -> None:
        """Takes no more events."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- inside ---------------------------------------------------------------------------

    def _one(self, event: events.Event) -> bool:
        try:
            instructions = self._core.handle(event, self._clock())
        except Exception as e:
            self._bug(event, e)
            return not isinstance(event, events.Tick)
        for instruction in instructions:
            try:
                self._carry_out(instruction)
            except Exception as e:
                self._bug(instruction, e)
        return True

    def _bug(self, what: events.Event | Instruction, error: Exception) -> None:
        self.bugs += 1
        log.error("internal_error", of=type(what).__name__, error=str(error), exc_info=error)
        try:
            self._on_bug(what, error)
        except Exception as e:
            log.error("internal_error", of="on_bug", error=str(e), exc_info=e)

    def _arm(self, least_s: float) -> None:
        """Sets the timer to the core's next deadline."""
        at = self._core.next_deadline()
        if at == self._timer_at and self._timer is not None and least_s == MIN_DELAY_S:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_at = at
        if at is not None and not self._closed:
            delay = max(at - self._clock(), least_s)
            self._timer = self._loop.call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._timer_at = None
        self.feed(events.Tick())
