"""Prompt digests: they bind KV to the prompt that it was computed from.

The digest at position p covers everything that decides the KV of tokens `[0, p)`: the token ids,
the LoRA, the cache salt, and the multimodal items that begin before p. It depends on nothing
else, so that two engines agree whatever their block sizes.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

DIGEST_SIZE = 16
_ITEM = -1
"""Marks a multimodal item in the hashed stream; a token id is never negative."""

MmItem = tuple[int, str]
"""(position of its first token, content hash)."""


class PromptDigest:
    """Digests of one prompt's prefixes.

    `token_ids` must not be negative. Raises ValueError or OverflowError for ids that are.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        *,
        lora: str = "",
        cache_salt: str = "",
        mm_items: Iterable[MmItem] = (),
    ) -> None:
        self._tokens = array("q", token_ids)
        if self._tokens and min(self._tokens) < 0:
            raise ValueError("a token id is negative")
        if sys.byteorder == "big":  # pragma: no cover
            self._tokens.byteswap()
        self._items = sorted((offset, name) for offset, name in mm_items)
        head = blake2b(digest_size=DIGEST_SIZE, person=b"kvd prompt v1")
        for part in (lora, cache_salt):
            data = part.encode("utf-8", "surrogatepass")
            head.update(len(data).to_bytes(8, "little"))
            head.update(data)
        self._head = head

    def __len__(self) -> int:
        return len(self._tokens)

    def at(self, positions: Iterable[int]) -> list[bytes]:
        """Digests at the given positions, which must not decrease.

        Raises ValueError for a position that is not in `[0, len]` or that goes back.
        """
        state = self._head.copy()
        view = memoryview(self._tokens)
        done = item = 0
        digests = []
        for position in positions:
            if not done <= position <= len(self._tokens):
                raise ValueError(f"position {position} after {done} of {len(self._tokens)}")
            while item < len(self._items) and self._items[item][0] < position:
                offset, name = self._items[item]
                item += 1
                offset = max(offset, done)
                state.update(view[done:offset])
                done = offset
                data = name.encode("utf-8", "surrogatepass")
                state.update(array("q", (_ITEM, len(data))).tobytes())
                state.update(data)
            state.update(view[done:position])
            done = position
            digests.append(state.copy().digest())
        return digests

    def boundaries(self, block_size: int, tokens: int) -> list[int]:
        """Where a producer of `tokens` tokens gives digests: each block boundary, and its end."""
        positions = list(range(block_size, tokens + 1, block_size))
        if not positions or positions[-1] != tokens:
            positions.append(tokens)
        return positions
