"""The bench's KV memory: one memfd for each layer, as vLLM keeps its layers, shared by everyone.

The harness makes the memfds; the two client processes and the limit program get the same ones, so
that all of them move the same pages.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from connector_shim.memory import MemoryDescription, Segment, geometry_layers
from kvd.bench.oracle import Words
from kvd.bench.presets import BLOCK_TOKENS
from kvd.protocol.types import Geometry, LayerLayout, Region


@dataclass(frozen=True, slots=True)
class Shape:
    """`blocks` blocks in each of `layers` layers, `piece` bytes each."""

    layers: int
    blocks: int
    piece: int

    @property
    def layer_nbytes(self) -> int:
        return self.blocks * self.piece


def pool_blocks(wanted: int, piece: int) -> int:
    """Blocks of a pool out of which `wanted` are used: some stay free, and layers end on a page."""
    blocks = wanted + max(4, wanted // 8)
    while blocks * piece % mmap.PAGESIZE:
        blocks += 1
    return blocks


def allocate(shape: Shape) -> list[int]:
    """One memfd for each layer, all pages taken. Raises OSError if the memory cannot be had."""
    fds: list[int] = []
    try:
        for layer in range(shape.layers):
            fds.append(os.memfd_create(f"kvd-bench-{layer}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            os.posix_fallocate(fds[-1], 0, shape.layer_nbytes)
            fcntl.fcntl(fds[-1], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        for fd in fds:
            os.close(fd)
        raise
    return fds


def map_pools(fds: Sequence[int], shape: Shape) -> list[Words]:
    """Map every layer; returns uint64 [blocks, piece // 8] for each."""
    return [
        np.frombuffer(mmap.mmap(fd, shape.layer_nbytes), np.uint64).reshape(shape.blocks, -1)
        for fd in fds
    ]


def describe(fds: Sequence[int], shape: Shape) -> MemoryDescription:
    """What the client registers: segment and layer `i` is memfd `i`."""
    layers = tuple(
        LayerLayout(
            name=f"layer.{index}", group=0, regions=[Region(index, 0, shape.piece, shape.piece)]
        )
        for index in range(shape.layers)
    )
    geometry = Geometry(
        model="kvd-bench",
        kv_dtype="uint8",
        block_size=BLOCK_TOKENS,
        total_kv_heads=1,
        kv_heads_per_rank=1,
        head_size=shape.piece // BLOCK_TOKENS,
        layout="bytes",
        layers=geometry_layers(layers),
    )
    segments = tuple(Segment(i, shape.layer_nbytes, fd) for i, fd in enumerate(fds))
    return MemoryDescription(segments, layers, geometry, shape.blocks)
