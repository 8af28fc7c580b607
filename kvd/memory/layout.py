"""Checks layer layouts against their segments, and keeps them as tables of numbers per group."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvd.errors import MemoryRefused
from kvd.protocol.types import NULL_BLOCK, LayerLayout, Region

MAX_LAYERS = 4096
MAX_GROUPS = 256
MAX_REGIONS = 64

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RegionTable:
    """Regions of one group's layers, in the order layer, then region. All columns have one length.

    `layer`: global layer index, ascending. `offset`: of block 0, from the start of the engine's
    reservation. `stride`, `nbytes`: as in `Region`.
    """

    layer: tuple[int, ...]
    offset: Ints
    stride: Ints
    nbytes: Ints

    def rows(self, first_layer: int, num_layers: int) -> slice:
        """The rows of layers `[first_layer, first_layer + num_layers)`."""
        lo = bisect.bisect_left(self.layer, first_layer)
        return slice(lo, bisect.bisect_left(self.layer, first_layer + num_layers, lo))


def check_layers(
    layers: Sequence[LayerLayout], num_blocks: int, segments: Mapping[int, int]
) -> None:
    """Raises MemoryRefused, naming the layer and both numbers, unless every block of every layer
    lies within its segment (`segments`: bytes by segment id) and no two blocks share a byte.

    Layers of *different* groups may share memory: their block tables keep them apart.
    """
    if not 1 <= num_blocks < NULL_BLOCK:
        raise MemoryRefused(f"{num_blocks} blocks: must be between 1 and {NULL_BLOCK - 1}")
    if not layers:
        raise MemoryRefused("no layers")
    if len(layers) > MAX_LAYERS:
        raise MemoryRefused(f"{len(layers)} layers: more than {MAX_LAYERS}")
    names: set[str] = set()
    for layer in layers:
        if layer.name in names:
            raise MemoryRefused(f"layer {layer.name!r} is described twice")
        names.add(layer.name)
        if not 0 <= layer.group < MAX_GROUPS:
            raise MemoryRefused(
                f"layer {layer.name!r}: group {layer.group}, must be below {MAX_GROUPS}"
            )
        if not 1 <= len(layer.regions) <= MAX_REGIONS:
            raise MemoryRefused(
                f"layer {layer.name!r}: {len(layer.regions)} regions,"
                f" must be between 1 and {MAX_REGIONS}"
            )
        for i, region in enumerate(layer.regions):
            _check_region(f"layer {layer.name!r} region {i}", region, num_blocks, segments)
    _check_disjoint(layers, num_blocks)


def _check_region(what: str, region: Region, num_blocks: int, segments: Mapping[int, int]) -> None:
    size = segments.get(region.segment)
    if size is None:
        raise MemoryRefused(f"{what}: segment {region.segment} was not passed")
    if region.nbytes <= 0 or region.offset < 0 or region.stride < 0:
        raise MemoryRefused(
            f"{what}: offset {region.offset}, stride {region.stride}, {region.nbytes} bytes"
        )
    if num_blocks > 1 and region.stride < region.nbytes:
        raise MemoryRefused(
            f"{what}: blocks overlap, stride {region.stride} is less than"
            f" the {region.nbytes} bytes of a block"
        )
    end = region.offset + (num_blocks - 1) * region.stride + region.nbytes
    if end > size:
        raise MemoryRefused(
            f"{what}: {num_blocks} blocks end at byte {end},"
            f" segment {region.segment} has {size} bytes"
        )


def _check_disjoint(layers: Sequence[LayerLayout], num_blocks: int) -> None:
    buckets: dict[tuple[int, int], list[tuple[str, Region]]] = {}
    for layer in layers:
        for i, region in enumerate(layer.regions):
            name = f"layer {layer.name!r} region {i}"
            buckets.setdefault((layer.group, region.segment), []).append((name, region))
    for bucket in buckets.values():
        bucket.sort(key=lambda item: item[1].offset)
        start = np.array([r.offset for _, r in bucket], dtype=np.int64)
        stride = np.array([r.stride for _, r in bucket], dtype=np.int64)
        nbytes = np.array([r.nbytes for _, r in bucket], dtype=np.int64)
        end = start + (num_blocks - 1) * stride + nbytes
        for i in range(len(bucket) - 1):
            # Later regions start at or after this one; those that start before its end interleave.
            last = int(np.searchsorted(start, end[i]))
            rest = slice(i + 1, max(last, i + 1))
            gap = start[rest] - start[i]
            step = stride[i]
            if num_blocks == 1:
                bad = gap < nbytes[i]
            else:
                phase = gap % step
                bad = (stride[rest] != step) | (phase < nbytes[i]) | (phase + nbytes[rest] > step)
            if bad.any():
                j = i + 1 + int(np.argmax(bad))
                (one, a), (two, b) = bucket[i], bucket[j]
                raise MemoryRefused(
                    f"{two} overlaps {one}: offset {b.offset} stride {b.stride} {b.nbytes} bytes"
                    f" against offset {a.offset} stride {a.stride} {a.nbytes} bytes"
                )


def region_tables(
    layers: Sequence[LayerLayout], num_groups: int, placed: Mapping[int, int]
) -> tuple[RegionTable, ...]:
    """Tables by group; `placed` gives each segment's offset in the reservation."""
    rows: list[list[tuple[int, int, int, int]]] = [[] for _ in range(num_groups)]
    for index, layer in enumerate(layers):
        for region in layer.regions:
            offset = placed[region.segment] + region.offset
            rows[layer.group].append((index, offset, region.stride, region.nbytes))
    tables = []
    for group in rows:
        columns = np.array(group, dtype=np.int64).reshape(-1, 4).T.copy()
        order = tuple(row[0] for row in group)
        tables.append(RegionTable(order, columns[1], columns[2], columns[3]))
    return tuple(tables)
