"""Who owns every 8 bytes of an engine's KV memory, written into them.

A word is, from its highest bit: engine (5 bits), canary (1), use (20), generation (6), layer (4),
index (10) and the word's number within its block (18). For KV, `use` numbers the engine's transfers
and `index` is the position in the transfer's block table, so that a consumer knows what to expect
without knowing the producer's block ids. Canaries fill blocks that nobody may write into: `use`
counts the block's uses, `index` is its id.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

MAX_ENGINES = 32
MAX_USES = 2**20
MAX_GENERATIONS = 64
MAX_LAYERS = 16
MAX_BLOCKS = 1024
MAX_WORDS = 2**18
LAYER_SHIFT = 28
"""Of the layer's number within a word."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Everything but where in the block the word lies."""

    engine: int
    canary: bool
    use: int
    generation: int
    layer: int
    index: int

    def base(self) -> np.uint64:
        """The block's first word; the n-th is `base + n`."""
        value = self.engine
        value = value << 1 | int(self.canary)
        value = value << 20 | self.use % MAX_USES
        value = value << 6 | self.generation % MAX_GENERATIONS
        value = value << 4 | self.layer
        value = value << 10 | self.index
        return np.uint64(value << 18)


def read(word: int) -> Stamp:
    """What a word says of itself."""
    value = word >> 18
    return Stamp(
        engine=value >> 41,
        canary=bool(value >> 40 & 1),
        use=value >> 20 & (MAX_USES - 1),
        generation=value >> 14 & (MAX_GENERATIONS - 1),
        layer=value >> 10 & (MAX_LAYERS - 1),
        index=value & (MAX_BLOCKS - 1),
    )


class Ink:
    """Writes and checks blocks, one layer or several that follow one another at a time."""

    def __init__(self, num_words: int) -> None:
        assert num_words <= MAX_WORDS
        self._ramp: Words = np.arange(num_words, dtype=np.uint64)

    def _right(self, layers: int, stamp: Stamp) -> Words:
        """What `[layers, words]` say, from the stamp's layer on."""
        bases = stamp.base() + (np.arange(layers, dtype=np.uint64) << np.uint64(LAYER_SHIFT))
        return self._ramp + bases[:, None]

    def write(self, block: Words, stamp: Stamp) -> None:
        """`block`: `[layers, words]`."""
        block[:] = self._right(len(block), stamp)

    def wrong(self, block: Words, stamp: Stamp) -> str:
        """What the first wrong word says and how many there are; empty if all are right."""
        expected = self._right(len(block), stamp)
        right = block == expected
        if right.all():
            return ""
        layer, word = np.unravel_index(int(np.argmin(right)), right.shape)
        found, due = (read(int(words[layer, word])) for words in (block, expected))
        count = int(np.count_nonzero(~right))
        return f"{count} of {right.size} words, from word {word}: {found}, expected {due}"
