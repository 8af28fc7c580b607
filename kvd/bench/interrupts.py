"""Ctrl-C and SIGTERM, held back where they would leave something without an owner."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

ENDING = frozenset({signal.SIGINT, signal.SIGTERM})


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """They arrive when the block ends: what it starts is known by then to whoever ends it.

    Python drops an exception that is raised while it forks, a KeyboardInterrupt too.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """A second Ctrl-C must not stop the cleaning up; each step of that is bounded in time."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
