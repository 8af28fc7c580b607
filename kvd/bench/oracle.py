"""Bytes that say where they belong, so that a misplaced piece is seen as surely as a wrong one.

Each 64-bit word holds its layer (16 bits), the producer's block (24 bits) and its place within
the piece (24 bits). `limit.c` checks against the same rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

WIPED = 2**64 - 1
"""What destination words hold before a request; no layer is numbered high enough to match it."""

MAX_LAYERS = 2**16 - 1
MAX_BLOCKS = 2**24
MAX_PIECE = 2**27


def words(layer: int, block: int, piece: int) -> Words:
    """The words of one piece, uint64 [piece // 8]."""
    base = (layer << 48) | (block << 24)
    return np.uint64(base) + np.arange(piece // 8, dtype=np.uint64)


def fill(pools: Sequence[Words]) -> None:
    """Write every block of every layer; `pools[layer]` is uint64 [blocks, piece // 8]."""
    for layer, pool in enumerate(pools):
        for block in range(len(pool)):
            pool[block] = words(layer, block, pool.shape[1] * 8)


def wipe(pools: Sequence[Words]) -> None:
    """Make every word one that is valid nowhere."""
    for pool in pools:
        pool.fill(WIPED)


def wrong_words(pools: Sequence[Words], origin: Mapping[int, int]) -> int:
    """Count wrong words. `origin` maps a destination block to the producer's block it came from.

    Blocks that `origin` does not name must still be wiped: a stray write is an error too.
    """
    wrong = 0
    for layer, pool in enumerate(pools):
        for block in range(len(pool)):
            source = origin.get(block)
            if source is None:
                wrong += int(np.count_nonzero(pool[block] != np.uint64(WIPED)))
            else:
                expected = words(layer, source, pool.shape[1] * 8)
                wrong += int(np.count_nonzero(pool[block] != expected))
    return wrong
