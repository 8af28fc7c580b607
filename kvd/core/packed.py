"""Packed block ids (little-endian u32) and sets of block indices kept as integers' bits.

A set of blocks is one Python int: bit i stands for block index i. Union, difference and size of
thousands of blocks are then single operations.
"""

from __future__ import annotations

import sys
from array import array

from kvd.protocol.types import NULL_BLOCK

NULL = NULL_BLOCK
_NULL_BYTES = b"\xff\xff\xff\xff"
_SWAP = sys.byteorder == "big"
_CODE = next(code for code in "IL" if array(code).itemsize == 4)

_indices = b""


def unpack(packed: bytes | bytearray | memoryview) -> array[int]:
    """The ids of a packed list. The length must be a multiple of 4 bytes."""
    ids = array(_CODE)
    ids.frombytes(packed)
    if _SWAP:
        ids.byteswap()
    return ids


def pack(ids: list[int] | range | array[int]) -> bytes:
    out = array(_CODE, ids)
    if _SWAP:
        out.byteswap()
    return out.tobytes()


def indices(start: int, stop: int) -> bytes:
    """Packed `[start, stop)`, cut from one list that is made once."""
    global _indices
    if stop * 4 > len(_indices):
        _indices = pack(range(max(1024, 2 * stop)))
    return _indices[4 * start : 4 * stop]


def has_null(packed: bytes | bytearray) -> bool:
    return _NULL_BYTES in packed and NULL in unpack(packed)


def ones(count: int) -> int:
    """The set {0, ..., count - 1}."""
    return (1 << count) - 1


def present(packed: bytes | bytearray) -> int:
    """The indices whose id is not NULL."""
    if not has_null(packed):
        return ones(len(packed) // 4)
    text = "".join("0" if block == NULL else "1" for block in reversed(unpack(packed)))
    return int(text, 2)


def lowest_runs(mask: int, count: int) -> tuple[int, list[tuple[int, int]]]:
    """The `count` lowest members of `mask` (or all), and their `[start, stop)` runs."""
    runs: list[tuple[int, int]] = []
    taken = 0
    base = 0
    while mask and count > 0:
        skip = (mask & -mask).bit_length() - 1
        mask >>= skip
        base += skip
        filled = mask + 1
        length = min((filled & -filled).bit_length() - 1, count)
        runs.append((base, base + length))
        taken |= ones(length) << base
        mask >>= length
        base += length
        count -= length
    return taken, runs


def gather(packed: bytes | bytearray, runs: list[tuple[int, int]]) -> bytes:
    """The packed ids at the given runs of indices."""
    if len(runs) == 1:
        start, stop = runs[0]
        return bytes(packed[4 * start : 4 * stop])
    return b"".join(packed[4 * start : 4 * stop] for start, stop in runs)


def bitmap(mask: int, count: int) -> bytes:
    """Bit i of byte i//8 for index i, `ceil(count / 8)` bytes."""
    return mask.to_bytes((count + 7) // 8, "little")
