"""Copy plans for a GPU: lists of one-dimensional copies, merged where they touch, cut to a size.

Addresses and sizes are bytes, int64 arrays of one length; copies of one plan never overlap in
their destinations, so their order is free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd.errors import MemoryRefused
from kvd.memory.cuda.driver import Copy2D, Driver
from kvd.memory.engine import EngineMemory
from kvd.memory.plan import Ids
from kvd.protocol.codes import Code

Ints = NDArray[np.int64]
MAX_PITCH = 2**31 - 1
"""Bytes between rows of a strided copy, on every device of today."""


@dataclass(frozen=True, slots=True)
class Copies:
    """`dst[i]`, `src[i]`: where `nbytes[i]` bytes go, and come from."""

    dst: Ints
    src: Ints
    nbytes: Ints

    def __len__(self) -> int:
        return int(self.nbytes.size)

    @property
    def total(self) -> int:
        return int(self.nbytes.sum())

    def merged(self) -> Copies:
        """The same bytes, with neighbours that touch on both sides as one copy."""
        if len(self) < 2:
            return self
        ends = self.nbytes[:-1]
        apart = (self.dst[1:] != self.dst[:-1] + ends) | (self.src[1:] != self.src[:-1] + ends)
        first = np.flatnonzero(np.concatenate(([True], apart)))
        return Copies(self.dst[first], self.src[first], np.add.reduceat(self.nbytes, first))


def between(
    src: EngineMemory,
    dst: EngineMemory,
    group: int,
    layers: tuple[int, int],
    ids: tuple[Ids, Ids],
) -> Copies:
    """From block to block, for layers `(first, count)` and ids `(source, destination)`.

    In the order region, then block: of blocks that count up, those of one region are neighbours.
    """
    sides = []
    for memory, own in ((src, ids[0]), (dst, ids[1])):
        table = memory.tables[group]
        rows = table.rows(*layers)
        start = table.offset[rows] + memory.address
        at = start[:, None] + own[None, :].astype(np.int64) * table.stride[rows][:, None]
        sides.append(at.ravel())
    table = dst.tables[group]
    nbytes = np.repeat(table.nbytes[table.rows(*layers)], ids[1].size)
    return Copies(sides[1], sides[0], nbytes).merged()


def packed(stretches: NDArray[np.uint64], staging: int) -> tuple[Ints, Ints, Ints]:
    """(address, staging address, bytes) of stretches that lie in `staging` one after the other.

    `stretches` are (address, bytes) pairs in wire order, as `kvd.memory.plan.addresses` has them.
    """
    at = stretches[:, 0].astype(np.int64)
    nbytes = stretches[:, 1].astype(np.int64)
    return at, staging + np.cumsum(nbytes) - nbytes, nbytes


def gather(stretches: NDArray[np.uint64], staging: int) -> Copies:
    """From blocks into staging memory."""
    at, room, nbytes = packed(stretches, staging)
    return Copies(room, at, nbytes)


def scatter(stretches: NDArray[np.uint64], staging: int) -> Copies:
    """From staging memory into blocks."""
    at, room, nbytes = packed(stretches, staging)
    return Copies(at, room, nbytes)


def one_run(stretches: NDArray[np.uint64], min_nbytes: int) -> int | None:
    """The address of stretches that are a single one of at least `min_nbytes` bytes, else None.
    With 0 there is none."""
    if not min_nbytes or len(stretches) != 1 or int(stretches[0, 1]) < min_nbytes:
        return None
    return int(stretches[0, 0])


def cuts_for_runs(
    memory: EngineMemory,
    group: int,
    layers: tuple[int, int],
    ids: Ids,
    max_nbytes: int,
    run_nbytes: int,
) -> list[tuple[int, int, int]]:
    """As `layer_cuts`, but one layer at a time where that makes each cut of blocks that count up
    one run of `run_nbytes` or more; 0: never. `ids` are a peer's, whose layers are laid out like
    ours if we are lucky. Raises MemoryRefused."""
    table = memory.tables[group]
    rows = table.rows(*layers)
    nbytes, own = table.nbytes[rows], list(table.layer[rows])
    if (
        run_nbytes
        and len(own) > 1
        and len(set(own)) == len(own)  # a second region of a layer comes between its blocks
        and bool((table.stride[rows] == nbytes).all())
        and bool((np.diff(ids.astype(np.int64)) == 1).all())
        and int(nbytes.min()) * ids.size >= run_nbytes
    ):
        return [cut for one in own for cut in layer_cuts(memory, group, (int(one), 1), max_nbytes)]
    return layer_cuts(memory, group, layers, max_nbytes)


def layer_cuts(
    memory: EngineMemory, group: int, layers: tuple[int, int], max_nbytes: int
) -> list[tuple[int, int, int]]:
    """Ranges (first layer, count, blocks at once) whose bytes fit into `max_nbytes`.

    Raises MemoryRefused (NO_SPACE) when one block of one layer does not.
    """
    first, count = layers
    whole = memory.block_nbytes(group, first, count)
    if whole <= max_nbytes:
        return [(first, count, max_nbytes // max(1, whole))] if whole else []
    cuts: list[tuple[int, int, int]] = []
    start = at = first
    while at < first + count:
        nbytes = memory.block_nbytes(group, start, at + 1 - start)
        if nbytes <= max_nbytes:
            at += 1
        elif at == start:
            raise MemoryRefused(
                f"one block of layer {at} has {nbytes} bytes, a staging buffer {max_nbytes}",
                Code.NO_SPACE,
            )
        else:
            cuts.append((start, at - start, 1))
            start = at
    if memory.block_nbytes(group, start, at - start):
        cuts.append((start, at - start, 1))
    return cuts


def batches(copies: Copies, max_nbytes: int, max_count: int) -> Iterator[Copies]:
    """Parts of at most `max_nbytes` bytes and `max_count` copies; long copies are cut."""
    copies = _cut(copies, max_nbytes)
    ends = np.cumsum(copies.nbytes)
    i = 0
    while i < len(copies):
        before = int(ends[i - 1]) if i else 0
        j = int(ends.searchsorted(before + max_nbytes, side="right"))
        part = slice(i, min(max(j, i + 1), i + max_count))
        yield Copies(copies.dst[part], copies.src[part], copies.nbytes[part])
        i = part.stop


def _cut(copies: Copies, max_nbytes: int) -> Copies:
    if not len(copies) or int(copies.nbytes.max()) <= max_nbytes:
        return copies
    parts = -(-copies.nbytes // max_nbytes)
    index = np.repeat(np.arange(len(copies)), parts)
    # 0, 1, ... within each copy
    nth = np.arange(index.size) - np.repeat(np.cumsum(parts) - parts, parts)
    at = nth * max_nbytes
    nbytes = np.minimum(copies.nbytes[index] - at, max_nbytes)
    return Copies(copies.dst[index] + at, copies.src[index] + at, nbytes)


def collapse(copies: Copies) -> list[Copy2D]:
    """The same bytes as strided copies: rows of equal size at constant steps become one."""
    found: list[Copy2D] = []
    entries = list(
        zip(copies.dst.tolist(), copies.src.tolist(), copies.nbytes.tolist(), strict=True)
    )
    i = 0
    while i < len(entries):
        dst, src, width = entries[i]
        steps = (width, width)
        height = 1
        for y, x, n in entries[i + 1 :]:
            last_y, last_x, _ = entries[i + height - 1]
            step = (y - last_y, x - last_x)
            if n != width or (height > 1 and step != steps):
                break
            if not (width <= step[0] <= MAX_PITCH and width <= step[1] <= MAX_PITCH):
                break
            steps = step
            height += 1
        found.append(Copy2D(dst, steps[0], src, steps[1], width, height))
        i += height
    return found


def enqueue(driver: Driver, copies: Copies, stream: Any) -> None:
    """Puts the copies on a stream. When it raises, some of them may be on it already."""
    if not len(copies):
        return
    if driver.has_batch:
        driver.copy_batch(copies.dst.tolist(), copies.src.tolist(), copies.nbytes.tolist(), stream)
        return
    for copy in collapse(copies):
        driver.copy_2d(copy, stream)
