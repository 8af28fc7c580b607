"""Counts by kind, with a log line for the first of each kind only."""

from __future__ import annotations

import logging
from collections import Counter


class Tally:
    """Counts what goes wrong without flooding the log; kinds come from a fixed set in the code."""

    def __init__(self, log: logging.Logger, max_kinds: int = 256) -> None:
        self.counts: Counter[str] = Counter()
        self._log = log
        self._max_kinds = max_kinds

    def note(self, kind: str, detail: str, level: int = logging.WARNING) -> None:
        """Count `kind`; its first `detail` is logged, later ones only at debug level."""
        if kind not in self.counts and len(self.counts) >= self._max_kinds:
            kind = "other"
        first = kind not in self.counts
        self.counts[kind] += 1
        if first:
            self._log.log(level, "kvd: %s: %s (further ones are counted, not logged)", kind, detail)
        else:
            self._log.debug("kvd: %s: %s", kind, detail)
