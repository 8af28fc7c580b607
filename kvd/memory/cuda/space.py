"""Segments of one engine, opened on this daemon's GPU, and closed in the reverse order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import structlog

from kvd.errors import MemoryRefused
from kvd.memory.cuda.device import Gpu
from kvd.memory.cuda.driver import FABRIC_HANDLE_NBYTES, IPC_HANDLE_NBYTES, CudaError
from kvd.protocol.codes import Code
from kvd.protocol.peer import SegmentInfo

log = structlog.get_logger("kvd.memory")

KINDS = ("cuda_ipc", "vmm")


class DeviceSpace:
    """`open` each segment, then `close` once; a failed `open` leaves nothing of its segment."""

    def __init__(self, gpu: Gpu, *, writable: bool) -> None:
        self._gpu = gpu
        self._writable = writable
        self._undo: list[Callable[[], None]] = []

    def open(self, info: SegmentInfo, fd: int) -> int:
        """The segment's address here. `fd` stays the caller's. Raises MemoryRefused."""
        before = len(self._undo)
        try:
            self._gpu.bind()
            base = self._open_ipc(info) if info.kind == "cuda_ipc" else self._open_vmm(info, fd)
            return base + info.offset
        except BaseException as exc:
            self._unwind(before)
            if isinstance(exc, CudaError):
                raise MemoryRefused(f"segment {info.segment}: {exc.detail}", exc.code) from None
            raise

    def close(self) -> None:
        """Gives everything back. A step that fails is logged, and the others are still done."""
        # Without a context nothing can be given back, and each step says so.
        with contextlib.suppress(CudaError):
            self._gpu.bind()
        self._unwind(0)

    def _unwind(self, to: int) -> None:
        while len(self._undo) > to:
            undo = self._undo.pop()
            try:
                undo()
            except CudaError as exc:
                log.error("device_memory_not_released", detail=exc.detail)

    def _open_ipc(self, info: SegmentInfo) -> int:
        base = self._gpu.imports.open(info.handle)
        self._undo.append(lambda: self._gpu.imports.close(info.handle))
        start, nbytes = self._gpu.driver.address_range(base)
        if start != base or nbytes != info.base_nbytes:
            raise MemoryRefused(
                f"segment {info.segment}: its handle opens {nbytes} bytes, {base - start} into "
                f"an allocation, and not the {info.base_nbytes} bytes that were described"
            )
        return base

    def _open_vmm(self, info: SegmentInfo, fd: int) -> int:
        driver, nbytes = self._gpu.driver, info.base_nbytes
        fabric = info.handle
        handle = driver.vmm_import_fabric(fabric) if fabric else driver.vmm_import_fd(fd)
        # The mapping holds the memory by itself; the handle is released in any case.
        release = self._once(lambda: driver.vmm_release(handle))
        self._undo.append(release)
        base = driver.reserve(nbytes)
        self._undo.append(lambda: driver.unreserve(base, nbytes))
        driver.map(base, nbytes, handle)
        self._undo.append(lambda: driver.unmap(base, nbytes))
        self._allow(base, nbytes)
        release()
        return base

    def _allow(self, base: int, nbytes: int) -> None:
        gpu = self._gpu
        try:
            gpu.driver.set_access(base, nbytes, gpu.ordinal, writable=self._writable)
        except CudaError as exc:
            if self._writable or exc.code not in (Code.UNSUPPORTED, Code.BAD_MEMORY):
                raise
            # Not every driver knows read-only mappings; the rule then holds by code alone.
            gpu.driver.set_access(base, nbytes, gpu.ordinal, writable=True)

    @staticmethod
    def _once(call: Callable[[], None]) -> Callable[[], None]:
        done = False

        def once() -> None:
            nonlocal done
            if not done:
                done = True
                call()

        return once


def check_segment(info: SegmentInfo, fd: int) -> None:
    """Raises MemoryRefused if what is described cannot be, whatever the driver says."""
    what = f"segment {info.segment}"
    if info.kind not in KINDS:
        raise MemoryRefused(f"{what}: {info.kind} among segments of a GPU")
    if info.nbytes <= 0:
        raise MemoryRefused(f"{what}: {info.nbytes} bytes")
    end = info.offset + info.nbytes
    if end > info.base_nbytes:
        raise MemoryRefused(
            f"{what}: ends at byte {end}, its allocation has {info.base_nbytes} bytes"
        )
    if info.kind == "cuda_ipc" and len(info.handle) != IPC_HANDLE_NBYTES:
        raise MemoryRefused(f"{what}: a CUDA IPC handle of {len(info.handle)} bytes")
    if info.kind == "vmm" and info.handle and len(info.handle) != FABRIC_HANDLE_NBYTES:
        raise MemoryRefused(f"{what}: a fabric handle of {len(info.handle)} bytes")
    if info.has_fd and fd < 0:
        raise MemoryRefused(f"{what}: no descriptor was passed")
