"""Copy plans: from (group, layers, block ids) to strided copies, or to addresses for sockets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvd.errors import MemoryRefused
from kvd.memory.engine import EngineMemory
from kvd.memory.host import Bytes
from kvd.protocol.types import NULL_BLOCK

Ids = NDArray[np.uint32]


def unpack_ids(packed: bytes, num_blocks: int, what: str) -> Ids:
    """Packed u32 block ids, each below `num_blocks`; raises MemoryRefused naming the bad one."""
    if len(packed) % 4:
        raise MemoryRefused(f"{what}: {len(packed)} bytes are no list of 32-bit ids")
    ids = np.frombuffer(packed, dtype="<u4")
    if ids.size and int(ids.max()) >= num_blocks:
        bad = int(ids.max())
        if bad == NULL_BLOCK:
            raise MemoryRefused(f"{what}: a null block")
        raise MemoryRefused(f"{what}: block id {bad}, there are {num_blocks}")
    return ids


def check_same_layers(src: EngineMemory, dst: EngineMemory) -> None:
    """Raises MemoryRefused unless both have the same layers, groups and bytes of each region.

    Where the bytes lie (segments, offsets, strides) may differ.
    """
    if src.num_layers != dst.num_layers:
        raise MemoryRefused(f"{src.num_layers} layers against {dst.num_layers} here")
    for index, (a, b) in enumerate(zip(src.layers, dst.layers, strict=True)):
        sizes = [r.nbytes for r in a.regions], [r.nbytes for r in b.regions]
        if a.group != b.group or sizes[0] != sizes[1]:
            raise MemoryRefused(
                f"layer {index} ({b.name!r}): group {a.group}, regions of {sizes[0]} bytes,"
                f" against group {b.group}, regions of {sizes[1]} bytes here"
            )


@dataclass(frozen=True, slots=True)
class UniformRun:
    """Regions that are a constant step apart on both sides, of equal size: one 3-D view each.

    Numbers only, no views, so that a cached plan keeps no memory mapped.
    """

    regions: int
    nbytes: int
    src_offset: int
    src_step: int
    src_stride: int
    dst_offset: int
    dst_step: int
    dst_stride: int

    def views(self, src: EngineMemory, dst: EngineMemory) -> tuple[Bytes, Bytes]:
        """uint8 [regions, blocks, nbytes] of both sides."""
        return (
            src.view(
                self.src_offset,
                (self.regions, src.num_blocks, self.nbytes),
                (self.src_step, self.src_stride, 1),
            ),
            dst.view(
                self.dst_offset,
                (self.regions, dst.num_blocks, self.nbytes),
                (self.dst_step, self.dst_stride, 1),
            ),
        )


def uniform_runs(
    src: EngineMemory, dst: EngineMemory, group: int, first_layer: int, num_layers: int
) -> tuple[UniformRun, ...]:
    """Cuts the regions of a group's layers into as few uniform runs as their order allows.

    The memories have passed `check_same_layers`, the range `check_range`.
    """
    a, b = src.tables[group], dst.tables[group]
    rows = a.rows(first_layer, num_layers)
    columns = (a.offset[rows], a.stride[rows], b.offset[rows], b.stride[rows], b.nbytes[rows])
    entries = list(zip(*(column.tolist() for column in columns), strict=True))
    runs: list[UniformRun] = []
    i = 0
    while i < len(entries):
        src_offset, src_stride, dst_offset, dst_stride, nbytes = entries[i]
        shape = (src_stride, dst_stride, nbytes)
        src_step = dst_step = 0
        j = i + 1
        while j < len(entries):
            x, sx, y, sy, n = entries[j]
            if (sx, sy, n) != shape:
                break
            steps = (x - entries[j - 1][0], y - entries[j - 1][2])
            if j == i + 1 and min(steps) > 0:
                src_step, dst_step = steps
            elif steps != (src_step, dst_step):
                break
            j += 1
        runs.append(
            UniformRun(
                j - i, nbytes, src_offset, src_step, src_stride, dst_offset, dst_step, dst_stride
            )
        )
        i = j
    return tuple(runs)


def id_runs(src: Ids, dst: Ids) -> list[tuple[int, int, int]]:
    """(source id, destination id, count) of stretches in which both lists count up by one."""
    runs: list[tuple[int, int, int]] = []
    if src.size == 0:
        return runs
    pairs = zip(src.tolist(), dst.tolist(), strict=True)
    a, b = next(pairs)
    n = 1
    for x, y in pairs:
        if x == a + n and y == b + n:
            n += 1
        else:
            runs.append((a, b, n))
            a, b, n = x, y, 1
    runs.append((a, b, n))
    return runs


class Call(NamedTuple):
    """One numpy copy: `dst[r, d] = src[r, s]` for a run's regions `r` and ranges of blocks."""

    run: int
    regions: slice
    src: slice
    dst: slice
    nbytes: int


def calls(
    runs: tuple[UniformRun, ...], blocks: list[tuple[int, int, int]], max_nbytes: int
) -> Iterator[Call]:
    """Cuts a piece into copies of at most `max_nbytes` bytes (or of one region of one block)."""
    cuts = []
    for index, run in enumerate(runs):
        block = run.regions * run.nbytes
        if block >= max_nbytes:
            step, at_once = max(1, max_nbytes // run.nbytes), 1
        else:
            step, at_once = run.regions, max(1, max_nbytes // block)
        slices = [slice(r, min(r + step, run.regions)) for r in range(0, run.regions, step)]
        cuts.append((index, run.nbytes, at_once, slices))
    for a, b, count in blocks:
        for index, nbytes, at_once, slices in cuts:
            for i in range(0, count, at_once):
                n = min(at_once, count - i)
                src, dst = slice(a + i, a + i + n), slice(b + i, b + i + n)
                for regions in slices:
                    size = (regions.stop - regions.start) * n * nbytes
                    yield Call(index, regions, src, dst, size)


def addresses(
    memory: EngineMemory, group: int, first_layer: int, num_layers: int, ids: Ids
) -> NDArray[np.uint64]:
    """iovec entries (address, bytes), u64 [n, 2], in the order block, layer, region.

    Neighbours in memory are merged. The addresses hold only while the memory is pinned.
    """
    table = memory.tables[group]
    rows = table.rows(first_layer, num_layers)
    start = table.offset[rows] + memory.address
    at = (start + ids[:, None].astype(np.int64) * table.stride[rows]).ravel()
    nbytes = np.broadcast_to(table.nbytes[rows], (ids.size, start.size)).ravel()
    if at.size == 0:
        return np.empty((0, 2), np.uint64)
    first = np.flatnonzero(np.concatenate(([True], at[1:] != at[:-1] + nbytes[:-1])))
    out = np.empty((first.size, 2), np.uint64)
    out[:, 0] = at[first]
    out[:, 1] = np.add.reduceat(nbytes, first)
    return out
