"""An engine's KV memory on a GPU, opened in this daemon."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from kvd.errors import MemoryRefused
from kvd.memory.cuda.device import Gpu
from kvd.memory.cuda.space import KINDS, DeviceSpace, check_segment
from kvd.memory.cuda.staging import PinnedStager
from kvd.memory.engine import EngineMemory
from kvd.memory.host import Bytes
from kvd.protocol.peer import SegmentInfo

Open = Callable[..., EngineMemory]
"""The arguments of `EngineMemory.open`."""


class DeviceMemory(EngineMemory):
    """Like EngineMemory, but offsets in `tables` are addresses on `gpu`, which no code of this
    process can touch: the copies are the driver's."""

    def __init__(self, *, gpu: Gpu, **described: Any) -> None:
        self.gpu = gpu
        self._space: DeviceSpace | None = None
        super().__init__(**described)

    def _check_segments(self, segments: Sequence[tuple[SegmentInfo, int]]) -> None:
        devices = {info.device for info, _ in segments}
        if len(devices) > 1:
            raise MemoryRefused(f"segments on several devices: {', '.join(sorted(devices))}")
        self.device = devices.pop()
        if self.writable and self.device != self.gpu.uuid:
            raise MemoryRefused(
                f"the engine's memory is on {self.device}, this daemon serves {self.gpu.uuid}"
            )
        for info, fd in segments:
            check_segment(info, fd)

    def _map(self, segments: Sequence[tuple[SegmentInfo, int]]) -> dict[int, int]:
        space = DeviceSpace(self.gpu, writable=self.writable)
        placed: dict[int, int] = {}
        try:
            for info, fd in segments:
                placed[info.segment] = space.open(info, fd)
        except BaseException:
            space.close()
            raise
        self._space = space
        return placed

    def _unmap_segments(self) -> None:
        space, self._space = self._space, None
        if space is not None:
            space.close()
            self._gone.one()

    def view(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Bytes:
        raise MemoryRefused("memory of a GPU cannot be looked at from here")

    def stager(self) -> PinnedStager:
        return PinnedStager(self.gpu)

    def _read_only(self, fd: int) -> int:
        if fd != self._fds[-1]:  # memory of the GPU; what a peer may do is set when it maps it
            return os.dup(fd)
        return super()._read_only(fd)


def memory_opener(gpu: Gpu | None) -> Open:
    """`EngineMemory.open` for every kind of memory that a daemon with this GPU can have."""

    def open_memory(
        *, segments: Sequence[tuple[SegmentInfo, int]], **described: Any
    ) -> EngineMemory:
        make = None
        if gpu is not None and any(info.kind in KINDS for info, _ in segments):
            make = partial(DeviceMemory, gpu=gpu)
        return EngineMemory.open(segments=segments, make=make, **described)

    return open_memory
