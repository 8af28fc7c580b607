"""An engine whose KV memory is on a real GPU, in a process of its own; no vLLM.

Its words are mirrored in host memory, so that what a test writes and checks goes through copies of
its own. With torch it can also keep a compute stream busy, and rewrite blocks by kernels.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from connector_shim.device_memory import DeviceExporter
from connector_shim.memory import MemoryDescription
from kvd.memory.cuda.device import Gpu, open_gpu
from kvd.memory.cuda.driver import Copy2D
from kvd.memory.cuda.staging import PinnedStager
from tests.integration.daemon.engine import Commands, Engine, Result, main

PART = 64 * 2**20
FAKES = "KVD_TEST_FAKE_GPU"
"""Set in the environment: the fakes of tests/cuda instead of a GPU, to try the script itself."""


def install_fakes_if_asked(engine_on: int = 0) -> None:
    if not os.environ.get(FAKES):
        return
    from tests.cuda.daemon import install

    install(engine_on)


def allocate(gpu: Gpu, nbytes: int, kind: str) -> int:
    """Device memory that other processes can open: "cuda_ipc", or "vmm" by a descriptor."""
    module = gpu.driver._m
    if kind == "cuda_ipc":
        return gpu.driver.alloc(nbytes)
    if os.environ.get(FAKES):
        return int(module.engine_alloc(nbytes, "vmm-exportable"))
    prop = module.CUmemAllocationProp()
    prop.type = module.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    prop.location.type = module.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    prop.location.id = gpu.ordinal
    kinds = module.CUmemAllocationHandleType
    prop.requestedHandleTypes = kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    unit = 2 * 2**20
    size = -(-nbytes // unit) * unit
    handle = gpu.driver._call("cuMemCreate", size, prop, 0)
    address = gpu.driver.reserve(size)
    gpu.driver.map(address, size, handle)
    gpu.driver.set_access(address, size, gpu.ordinal, writable=True)
    gpu.driver.vmm_release(handle)
    return address


class GpuEngine(Engine):
    """`gpu`: as in `device = cuda:N`; `kind`: how its memory is allocated."""

    def __init__(self, socket: str, engine_id: str, *, gpu: int, kind: str, **setup: Any) -> None:
        self.gpu = open_gpu(f"cuda:{gpu}")
        self.gpu.bind()
        self._kind = kind
        self._stream = self.gpu.driver.stream_create()
        self._event = self.gpu.driver.event_create()
        self._stager = PinnedStager(self.gpu)
        super().__init__(socket, engine_id, **setup)

    def make_memory(
        self, num_layers: int, num_blocks: int, block_bytes: int, model: str
    ) -> tuple[MemoryDescription, mmap.mmap]:
        described, mirror = super().make_memory(num_layers, num_blocks, block_bytes, model)
        self.nbytes = len(mirror)
        self.address = allocate(self.gpu, self.nbytes, self._kind)
        segment = DeviceExporter(self.gpu.driver._m).export(0, self.address, self.nbytes)
        assert segment.kind == self._kind, f"{segment.kind} memory, {self._kind} was wanted"
        described.close()
        return replace(described, segments=(segment,)), mirror

    def fill(self) -> None:
        super().fill()
        for at, mirror in self._parts():
            self._stager.room(mirror.size)[:] = mirror
            self._stager.put(np.array([[self.address + at, mirror.size]], np.uint64))

    def wrong(self, seed: int, pairs: Any) -> int:
        for at, mirror in self._parts():
            self._stager.take(np.array([[self.address + at, mirror.size]], np.uint64))
            mirror[:] = self._stager.room(mirror.size)
        return super().wrong(seed, pairs)

    def _parts(self) -> Iterator[tuple[int, np.ndarray]]:
        """The mirror's bytes, in parts, and where each begins."""
        whole = self.words.reshape(-1).view(np.uint8)
        for at in range(0, self.nbytes, PART):
            yield at, whole[at : at + PART]

    def copy(self, dst: int, src: int, nbytes: int) -> float:
        """One plain copy; the seconds that it took."""
        driver = self.gpu.driver
        began = time.monotonic()
        driver.copy_2d(Copy2D(dst, nbytes, src, nbytes, nbytes, 1), self._stream)
        driver.event_record(self._event, self._stream)
        while not driver.event_done(self._event):
            pass
        return time.monotonic() - began


class GpuCommands(Commands):
    engine: GpuEngine

    def rewrite(self, seed: int) -> Result:
        """Fills all blocks anew, as producer `seed`."""
        self.engine.seed = seed
        self.engine.fill()
        return {}

    def plain_copy(self, nbytes: int, times: int) -> Result:
        """Device to device, the fastest of some."""
        driver = self.engine.gpu.driver
        other = driver.alloc(nbytes)
        took = [self.engine.copy(other, self.engine.address, nbytes) for _ in range(times)]
        driver.free(other)
        return {"seconds": min(took)}

    def timed_fetch(self, transfer_id: str, blocks: list[int], **how: Any) -> Result:
        began = time.monotonic()
        done = self.fetch(transfer_id, blocks, **how)
        return {**done, "seconds": time.monotonic() - began}

    def fenced_offer(self, transfer_id: str, blocks: list[int], seed: int, load: int) -> Result:
        """As a worker does it: kernels compute the blocks on a stream that is busy, and the offer
        is made once the event behind them was seen."""
        import torch

        device = torch.device("cuda", self.engine.gpu.ordinal)
        self.engine.seed = seed
        Engine.fill(self.engine)
        tensor = self._tensor(torch, device)
        source = torch.from_numpy(self.engine.words.view(np.int64)).to(device)
        a = torch.randn(4096, 4096, device=device, dtype=torch.float16)
        for _ in range(load):
            a = torch.nn.functional.normalize(a @ a)
        tensor.copy_(source)
        event = torch.cuda.Event()
        event.record()
        at_once = event.query()
        while not event.query():
            time.sleep(1e-4)
        self.engine.offer(transfer_id, blocks)
        return {"was_busy": not at_once}

    def fenced_rewrite(self, transfer_id: str, load: int) -> Result:
        """Takes the offer back, and rewrites its blocks at once by kernels."""
        import torch

        device = torch.device("cuda", self.engine.gpu.ordinal)
        self.engine.client.revoke(transfer_id, 1)
        tensor = self._tensor(torch, device)
        for value in range(load):
            tensor.fill_(value)
        self.engine.poll()
        return {}

    def _tensor(self, torch: Any, device: Any) -> Any:
        engine = self.engine

        class View:
            __cuda_array_interface__ = {  # noqa: RUF012
                "shape": engine.words.shape,
                "typestr": "<i8",
                "data": (engine.address, False),
                "version": 3,
            }

        return torch.as_tensor(View(), device=device)

    def matmul(self, seconds: float) -> Result:
        """Starts a loop of matrix multiplications beside; `matmul_rate` says how it went."""
        import torch

        device = torch.device("cuda", self.engine.gpu.ordinal)
        self._rates: list[float] = []
        ready = threading.Event()

        def loop() -> None:
            a = torch.randn(4096, 4096, device=device, dtype=torch.float16)
            stream = torch.cuda.Stream(device)
            end = time.monotonic() + seconds
            with torch.cuda.stream(stream):
                while time.monotonic() < end:
                    began = time.monotonic()
                    for _ in range(20):
                        a @ a
                    stream.synchronize()  # this loop's own, in a test
                    self._rates.append(20 / (time.monotonic() - began))
                    ready.set()

        self._loop = threading.Thread(target=loop)
        self._loop.start()
        ready.wait(30)
        return {}

    def matmul_rate(self) -> Result:
        """Products a second, the median; ends the loop."""
        self._loop.join()
        return {"rate": float(np.median(self._rates)), "samples": len(self._rates)}


if __name__ == "__main__":
    install_fakes_if_asked(int(os.environ.get("KVD_TEST_ENGINE_ON", "0")))
    sys.exit(main(GpuEngine, GpuCommands))
