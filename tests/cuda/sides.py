"""Engines whose KV memory is on a fake GPU, for the contract suite."""

from __future__ import annotations

import os

from connector_shim.device_memory import DeviceExporter
from kvd.memory.cuda.device import Gpu
from kvd.memory.cuda.driver import Driver
from kvd.memory.cuda.memory import DeviceMemory, memory_opener
from kvd.memory.engine import EngineMemory
from kvd.protocol.peer import SegmentInfo
from tests.contract.rig import Shape, Side
from tests.cuda.fake_driver import EXPORTABLE, LEGACY, FakeDriver

OFFSET = 4096 + 64
"""Where a segment begins in its allocation."""


def fake_gpu(module: FakeDriver, ordinal: int = 0) -> Gpu:
    driver = Driver(module)
    return Gpu(driver, driver.devices()[ordinal])


class CudaSide(Side):
    """Segments are parts of allocations of the engine's own process, of one kind."""

    kind = "cuda_ipc"

    def __init__(self, shape: Shape, num_blocks: int, style: str) -> None:
        self.engine = FakeDriver()
        self.gpu = fake_gpu(self.engine)
        super().__init__(shape, num_blocks, style)

    def make_segments(self, sizes: list[int]) -> list[SegmentInfo]:
        self.gpu.bind()
        exporter = DeviceExporter(self.engine)
        infos = []
        for i, size in enumerate(sizes):
            kind = EXPORTABLE if self.kind == "vmm" else LEGACY
            base = self.engine.engine_alloc(OFFSET + size + 100, kind)
            one = exporter.export(i, base + OFFSET, size)
            assert one.kind == self.kind
            if one.fd >= 0:
                self._fds.append(one.fd)
            self.segments.append(self.engine.memory(base + OFFSET, size))
            infos.append(
                SegmentInfo(i, one.kind, size, one.device, one.handle, one.offset, one.base_nbytes)
            )
        return infos

    def descriptors(self) -> list[int]:
        """Of the allocations in which the segments lie, and of the fence table."""
        return [*self.engine.descriptors(), self._fds[-1]]

    def open_on(self, gpu: Gpu, *, writable: bool) -> DeviceMemory:
        fds = [os.dup(fd) for fd in self._fds]
        return self._device(self.open_fds(fds, writable=writable, opener=memory_opener(gpu)))

    def open_shared_on(self, gpu: Gpu, owner: EngineMemory) -> DeviceMemory:
        fds = owner.share()
        return self._device(self.open_fds(fds, writable=False, opener=memory_opener(gpu)))

    def close(self) -> None:
        super().close()
        self.engine.close()

    @staticmethod
    def _device(memory: EngineMemory) -> DeviceMemory:
        assert isinstance(memory, DeviceMemory)
        return memory


class VmmSide(CudaSide):
    kind = "vmm"
