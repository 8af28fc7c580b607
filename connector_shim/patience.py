"""The clocks of a connection: how long the daemon has been silent, and when to knock again."""

from __future__ import annotations

import random

BACKOFF_MIN_S = 0.05
BACKOFF_MAX_S = 2.0
KNOCK_S = 0.1
"""Pause after nobody listened: to find that out costs two system calls."""


class Silence:
    """Of a daemon that is asked for a sign of life after `ask_after_s` without any.

    It counts from the question on, and by the gaps between polls, which have a limit.
    """

    def __init__(self, ask_after_s: float) -> None:
        self.ask_after_s = ask_after_s
        self.heard(float("-inf"))

    def heard(self, now: float) -> None:
        """Anything that arrives ends a silence."""
        self._heard_at = now
        self._asked = False
        self.seconds = 0.0

    def passes(self, now: float, gap: float) -> bool:
        """`gap` seconds more; True if it is time to ask, once."""
        if self._asked:
            self.seconds += gap
            return False
        self._asked = now - self._heard_at >= self.ask_after_s
        return self._asked


class Knocks:
    """When to try to connect: soon at first, then more and more rarely, until one succeeds."""

    def __init__(self) -> None:
        self._at = float("-inf")
        self._backoff_s = BACKOFF_MIN_S

    def due(self, now: float) -> bool:
        return now >= self._at

    def wait_s(self, now: float) -> float:
        """Seconds until then."""
        return max(0.0, self._at - now)

    def later(self, now: float, at_most_s: float = float("inf")) -> None:
        """After a pause, which grows."""
        # Spread, so that the ranks of an engine do not all knock at the same moment.
        self._at = now + min(self._backoff_s * random.uniform(0.75, 1.25), at_most_s)
        self._backoff_s = min(BACKOFF_MAX_S, self._backoff_s * 2)

    def at_once(self, now: float) -> None:
        self._at = now

    def rarely(self) -> None:
        """From the next pause on: asking often changes nothing."""
        self._backoff_s = BACKOFF_MAX_S

    def succeeded(self) -> None:
        self._backoff_s = BACKOFF_MIN_S
