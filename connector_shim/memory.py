"""Describing an engine's KV memory to its daemon: segments (shareable memory) and layouts in them.

A *segment* is one piece of memory that can be passed as a file descriptor. A *layer layout* says
where each block of a layer lies in it, as regions `[offset + block * stride, +nbytes)`.
"""

from __future__ import annotations

import fcntl
import glob
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from connector_shim.errors import ClientError
from kvd.protocol.codes import Code
from kvd.protocol.types import Geometry, LayerLayout, Region, SegmentKind

if TYPE_CHECKING:
    import torch

SHM_DIR = "/dev/shm"  # noqa: S108 - where POSIX shared memory lives
MAX_REGIONS = 64


@dataclass(frozen=True, slots=True)
class Segment:
    """`fd` is -1 for kinds that travel as a `handle`. `nbytes` is the size that may be used.

    Memory of a GPU is `[offset, offset + nbytes)` of an allocation of `base_nbytes` bytes.
    """

    segment: int
    nbytes: int
    fd: int = -1
    kind: SegmentKind = "memfd"
    device: str = "cpu"
    handle: bytes = b""
    offset: int = 0
    base_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class MemoryDescription:
    """Everything that Register needs. The client duplicates the fds that it is given here."""

    segments: tuple[Segment, ...]
    layers: tuple[LayerLayout, ...]
    geometry: Geometry
    num_blocks: int

    @property
    def num_groups(self) -> int:
        return 1 + max((layer.group for layer in self.layers), default=-1)

    @property
    def on_gpu(self) -> bool:
        return any(segment.device != "cpu" for segment in self.segments)

    def close(self) -> None:
        """Closes the descriptors; for whoever made the description, once it is not needed."""
        for segment in self.segments:
            if segment.fd >= 0:
                os.close(segment.fd)


def geometry_layers(layers: Sequence[LayerLayout]) -> list[tuple[str, int, list[int]]]:
    """`Geometry.layers` of these layouts: (name, group, bytes per block of each region)."""
    return [(layer.name, layer.group, [r.nbytes for r in layer.regions]) for layer in layers]


def shared_blocks(
    num_layers: int,
    num_blocks: int,
    block_bytes: int,
    *,
    block_size: int = 16,
    model: str = "bytes",
    groups: Sequence[int] | None = None,
) -> tuple[MemoryDescription, mmap.mmap]:
    """Plain shared memory as KV blocks, for engines that are not vLLM, for tests and benchmarks.

    Layer `l`'s block `b` is the bytes `[(l * num_blocks + b) * block_bytes, +block_bytes)` of the
    mapping that is returned. `groups[l]` is the layer's KV cache group (all 0 if not given);
    `block_size` is tokens per block. The caller closes both: `MemoryDescription.close` and the
    mapping. Raises ClientError NO_SPACE when the memory cannot be had.
    """
    nbytes = num_layers * num_blocks * block_bytes
    if min(num_layers, num_blocks, block_bytes) < 1:
        raise ClientError(Code.BAD_MEMORY, "layers, blocks and block bytes must all be positive")
    fd = os.memfd_create("kvd-blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Taken now: pages that cannot be had later would end in SIGBUS, in somebody else.
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        mapping = mmap.mmap(fd, nbytes)
    except OSError as exc:
        os.close(fd)
        raise ClientError(Code.NO_SPACE, f"no {nbytes} bytes of shared memory: {exc}") from exc
    layers = tuple(
        LayerLayout(
            name=f"layer.{index}",
            group=groups[index] if groups is not None else 0,
            regions=[Region(0, index * num_blocks * block_bytes, block_bytes, block_bytes)],
        )
        for index in range(num_layers)
    )
    geometry = Geometry(
        model=model,
        kv_dtype="uint8",
        block_size=block_size,
        total_kv_heads=1,
        kv_heads_per_rank=1,
        head_size=max(1, block_bytes // block_size),
        layout="bytes",
        layers=geometry_layers(layers),
    )
    segments = (Segment(segment=0, nbytes=nbytes, fd=fd),)
    return MemoryDescription(segments, layers, geometry, num_blocks), mapping


def regions_of(
    shape: Sequence[int],
    strides_bytes: Sequence[int],
    itemsize: int,
    block_axis: int,
    base_offset: int,
    segment: int,
) -> list[Region]:
    """The regions of one layer's KV tensor, axes that lie together merged.

    `strides_bytes` are bytes per step of each axis, `base_offset` the bytes from the segment's
    start to the tensor's first element. K and V apart give two regions, a leading block axis one.
    Raises ClientError BAD_MEMORY, naming the axis, for strides that are negative, zero or
    overlapping, and UNSUPPORTED for a layout of more than 64 regions.
    """
    _check_strides(shape, strides_bytes, itemsize, block_axis)
    inner = [
        (strides_bytes[axis], shape[axis])
        for axis in range(len(shape))
        if axis != block_axis and shape[axis] > 1
    ]
    inner.sort()
    nbytes = itemsize
    while inner and inner[0][0] == nbytes:
        nbytes *= inner.pop(0)[1]
    count = 1
    for _, extent in inner:
        count *= extent
    if count > MAX_REGIONS:
        raise ClientError(
            Code.UNSUPPORTED,
            f"a block of shape {tuple(shape)} with strides {tuple(strides_bytes)} falls into "
            f"{count} pieces of {nbytes} bytes; at most {MAX_REGIONS} are supported",
        )
    inner.reverse()
    steps = [[stride * index for index in range(extent)] for stride, extent in inner]
    return [
        Region(segment, base_offset + sum(offsets), strides_bytes[block_axis], nbytes)
        for offsets in product(*steps)
    ]


def layout_string(
    axes: Sequence[str], shape: Sequence[int], strides_bytes: Sequence[int], block_axis: int
) -> str:
    """Order of the axes within a block, outermost first: "kv,head,token,dim".

    For `Geometry.layout`. Axes of extent 1 are left out: they move no byte, and their strides
    mean nothing.
    """
    within = [
        (strides_bytes[axis], axes[axis])
        for axis in range(len(shape))
        if axis != block_axis and shape[axis] > 1
    ]
    return ",".join(name for _, name in sorted(within, key=lambda entry: -entry[0]))


def _check_strides(
    shape: Sequence[int], strides_bytes: Sequence[int], itemsize: int, block_axis: int
) -> None:
    if len(shape) != len(strides_bytes) or not 0 <= block_axis < len(shape):
        raise ClientError(
            Code.BAD_MEMORY,
            f"shape {tuple(shape)}, strides {tuple(strides_bytes)} and block axis {block_axis} "
            "do not belong together",
        )
    for axis, (extent, stride) in enumerate(zip(shape, strides_bytes, strict=True)):
        if extent < 1:
            raise ClientError(Code.BAD_MEMORY, f"axis {axis} is empty: shape {tuple(shape)}")
        if stride < 0:
            raise ClientError(Code.BAD_MEMORY, f"axis {axis} has a negative stride: {stride}")
        if stride == 0 and extent > 1:
            raise ClientError(Code.BAD_MEMORY, f"axis {axis} has a zero stride: it is broadcast")
    span = itemsize
    walk = sorted((strides_bytes[axis], shape[axis], axis) for axis in range(len(shape)))
    for stride, extent, axis in walk:
        if extent == 1:
            continue
        if stride < span:
            raise ClientError(
                Code.BAD_MEMORY,
                f"axis {axis} has an overlapping stride: {stride} bytes a step, but what lies "
                f"within one step spans {span}",
            )
        span += (extent - 1) * stride


def share_cpu_storage(storage: torch.UntypedStorage) -> int:
    """Moves a CPU storage into shared memory in place; returns a descriptor, which the caller owns.

    Views of the storage follow, their contents are kept; a storage that is shared already stays
    where it is. Raises ClientError NO_SPACE (the storage is unchanged) when /dev/shm is too
    small, naming the sizes and the way out.
    """
    nbytes = storage.nbytes()
    free = _shm_free()
    if free < nbytes and not storage.is_shared():
        raise _no_space(nbytes, free)
    before = _shm_files()
    try:
        fd, _ = storage._share_fd_cpu_()
    except RuntimeError as exc:
        # torch made the file before it found that there is no room, and leaves it behind.
        _remove_leftover(before, nbytes)
        raise _no_space(nbytes, _shm_free(), str(exc)) from exc
    # The descriptor that torch returns belongs to the storage, which closes it at its end.
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)


def _no_space(nbytes: int, free: int, cause: str = "") -> ClientError:
    mib = 2**20
    return ClientError(
        Code.NO_SPACE,
        f"the KV cache needs {nbytes / mib:.0f} MiB in {SHM_DIR}, which has {free / mib:.0f} MiB "
        "free. Make it larger (docker run --shm-size, or in Kubernetes an emptyDir with "
        f"medium: Memory and a sizeLimit mounted at {SHM_DIR}), or make the KV cache smaller"
        + (f" ({cause})" if cause else ""),
    )


def _shm_free() -> int:
    usage = os.statvfs(SHM_DIR)
    return usage.f_bavail * usage.f_frsize


def _shm_files() -> set[str]:
    return set(glob.glob(f"{SHM_DIR}/torch_{os.getpid()}_*"))


def _remove_leftover(before: set[str], nbytes: int) -> None:
    """Only a file of this process that was not there before, with the size that was asked for."""
    for path in _shm_files() - before:
        try:
            if os.stat(path).st_size in (0, nbytes):
                os.unlink(path)
        except FileNotFoundError:
            continue
