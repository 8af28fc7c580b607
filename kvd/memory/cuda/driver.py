"""The CUDA driver, as far as kvd needs it: addresses are plain integers, errors are `CudaError`.

`Driver` stands on a module with the functions of `cuda.bindings.driver`, which is imported only
when a device is asked for; tests give it another module with the same signatures.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvd.errors import KvdError
from kvd.protocol.codes import Code

MODULE = "cuda.bindings.driver"
BATCH_SINCE = 13_000
"""Driver version from which cuda-bindings 13 has cuMemcpyBatchAsync in the form that it calls."""
IPC_HANDLE_NBYTES = 64
FABRIC_HANDLE_NBYTES = 64

_CODES = {
    "CUDA_ERROR_OUT_OF_MEMORY": Code.NO_SPACE,
    "CUDA_ERROR_NO_DEVICE": Code.UNSUPPORTED,
    "CUDA_ERROR_STUB_LIBRARY": Code.UNSUPPORTED,
    "CUDA_ERROR_NOT_SUPPORTED": Code.UNSUPPORTED,
    "CUDA_ERROR_NOT_PERMITTED": Code.UNSUPPORTED,
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": Code.UNSUPPORTED,
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": Code.UNSUPPORTED,
    "CUDA_ERROR_INVALID_VALUE": Code.BAD_MEMORY,
    "CUDA_ERROR_INVALID_HANDLE": Code.BAD_MEMORY,
    "CUDA_ERROR_INVALID_RESOURCE_TYPE": Code.BAD_MEMORY,
    "CUDA_ERROR_MAP_FAILED": Code.BAD_MEMORY,
    "CUDA_ERROR_ALREADY_MAPPED": Code.BAD_MEMORY,
    "CUDA_ERROR_NOT_FOUND": Code.BAD_MEMORY,
}
"""Everything else is TRANSPORT_ERROR."""

_BROKEN = frozenset(
    {
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_DEINITIALIZED",
    }
)
"""After these, nothing works in this process any more."""


class CudaError(KvdError):
    """A call that failed. `broken`: the context is lost, only a new process helps."""

    def __init__(self, call: str, result: str, code: Code, *, broken: bool = False) -> None:
        super().__init__(f"{call}: {result}", code)
        self.call = call
        self.result = result
        self.broken = broken


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """`uuid` is written as nvidia-smi writes it: GPU-8-4-4-4-12 hexadecimal digits."""

    ordinal: int
    uuid: str
    name: str


@dataclass(frozen=True, slots=True)
class Copy2D:
    """`height` rows of `width` bytes; all addresses and pitches in bytes."""

    dst: int
    dst_pitch: int
    src: int
    src_pitch: int
    width: int
    height: int


def format_uuid(raw: bytes) -> str:
    """16 bytes as "GPU-..."."""
    h = raw.hex()
    return f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


def load_driver() -> Driver:
    """The real driver, ready to use. Raises CudaError (UNSUPPORTED), whose detail is one line."""
    try:
        module = importlib.import_module(MODULE)
    except ImportError as exc:
        raise CudaError(
            "import", f"{MODULE} is not installed ({exc}): pip install 'vllm-kvd[cuda]'",
            Code.UNSUPPORTED,
        ) from None  # fmt: skip
    return Driver(module)


class Driver:
    """One method per thing that kvd does with the driver. Thread-safe, as the driver is; most
    calls need a context bound to the calling thread (`bind`)."""

    def __init__(self, module: Any) -> None:
        """Initialises the driver. Raises CudaError."""
        self._m = module
        self._call("cuInit", 0)
        self.version: int = self._call("cuDriverGetVersion")
        self.has_batch = self.version >= BATCH_SINCE and hasattr(module, "cuMemcpyBatchAsync")

    # --- devices and contexts ------------------------------------------------------------------

    def devices(self) -> list[DeviceInfo]:
        """All that this process may see."""
        found = []
        for ordinal in range(self._call("cuDeviceGetCount")):
            device = self._call("cuDeviceGet", ordinal)
            uuid = format_uuid(bytes(self._call("cuDeviceGetUuid", device).bytes))
            name = bytes(self._call("cuDeviceGetName", 128, device)).split(b"\0")[0]
            found.append(DeviceInfo(ordinal, uuid, name.decode(errors="replace")))
        return found

    def retain_context(self, ordinal: int) -> Any:
        """The device's primary context, which the engines' runtime uses too."""
        return self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", ordinal))

    def release_context(self, ordinal: int) -> None:
        self._call("cuDevicePrimaryCtxRelease", self._call("cuDeviceGet", ordinal))

    def bind(self, context: Any) -> None:
        """Makes it the calling thread's context."""
        self._call("cuCtxSetCurrent", context)

    # --- memory of other processes -------------------------------------------------------------

    def ipc_open(self, handle: bytes) -> int:
        """The base address of an allocation of another process. Never of our own process."""
        flags = self._m.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        opaque = self._m.CUipcMemHandle()
        ctypes.memmove(opaque.getPtr(), handle, IPC_HANDLE_NBYTES)
        return int(self._call("cuIpcOpenMemHandle", opaque, int(flags)))

    def ipc_close(self, base: int) -> None:
        self._call("cuIpcCloseMemHandle", base)

    def address_range(self, address: int) -> tuple[int, int]:
        """(base, bytes) of the allocation that an address lies in."""
        base, nbytes = self._call("cuMemGetAddressRange", address)
        return int(base), int(nbytes)

    def vmm_import_fd(self, fd: int) -> Any:
        """A handle to memory that was exported as a descriptor, which stays the caller's."""
        kind = self._m.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return self._call("cuMemImportFromShareableHandle", fd, kind)

    def vmm_import_fabric(self, handle: bytes) -> Any:
        """The same for a fabric handle."""
        kind = self._m.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
        opaque = self._m.CUmemFabricHandle()
        ctypes.memmove(opaque.getPtr(), handle, FABRIC_HANDLE_NBYTES)
        return self._call("cuMemImportFromShareableHandle", opaque.getPtr(), kind)

    def vmm_release(self, handle: Any) -> None:
        self._call("cuMemRelease", handle)

    def reserve(self, nbytes: int) -> int:
        """Address space; `nbytes` is a multiple of the allocation's granularity."""
        return int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))

    def unreserve(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)

    def set_access(self, address: int, nbytes: int, ordinal: int, *, writable: bool) -> None:
        """Lets a device use a mapping; memory that is not writable is read-only there."""
        m = self._m
        access = m.CUmemAccessDesc()
        access.location.type = m.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal
        flags = m.CUmemAccess_flags
        access.flags = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            if writable
            else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        self._call("cuMemSetAccess", address, nbytes, [access], 1)

    # --- our own memory ------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> int:
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def host_alloc(self, nbytes: int) -> int:
        """Pinned host memory."""
        return int(self._call("cuMemHostAlloc", nbytes, 0))

    def host_free(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    # --- streams and events --------------------------------------------------------------------

    def stream_create(self) -> Any:
        """One that does not wait for the default stream."""
        return self._call("cuStreamCreate", int(self._m.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def stream_destroy(self, stream: Any) -> None:
        self._call("cuStreamDestroy", stream)

    def event_create(self) -> Any:
        return self._call("cuEventCreate", int(self._m.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def event_destroy(self, event: Any) -> None:
        self._call("cuEventDestroy", event)

    def event_record(self, event: Any, stream: Any) -> None:
        self._call("cuEventRecord", event, stream)

    def event_done(self, event: Any) -> bool:
        """Whether everything before the event has ended. Raises CudaError if it failed."""
        result = self._raw("cuEventQuery", event)[0]
        if result == self._m.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._check("cuEventQuery", result)
        return True

    # --- copies --------------------------------------------------------------------------------

    def copy_batch(
        self, dst: Sequence[int], src: Sequence[int], nbytes: Sequence[int], stream: Any
    ) -> None:
        """Copies that do not depend on each other, in one call, in stream order as a whole."""
        m = self._m
        attributes = m.CUmemcpyAttributes()
        order = m.CUmemcpySrcAccessOrder
        attributes.srcAccessOrder = order.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        overlap = m.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
        attributes.flags = int(overlap)
        pointer = m.CUdeviceptr
        self._call(
            "cuMemcpyBatchAsync",
            [pointer(a) for a in dst],
            [pointer(a) for a in src],
            list(nbytes),
            len(nbytes),
            [attributes],
            [0],
            1,
            stream,
        )

    def copy_2d(self, copy: Copy2D, stream: Any) -> None:
        """Rows at a constant step, of device memory or of pinned host memory."""
        if copy.height == 1:
            self._call("cuMemcpyAsync", copy.dst, copy.src, copy.width, stream)
            return
        m = self._m
        what = m.CUDA_MEMCPY2D()
        # Unified: the address says where the memory is.
        what.srcMemoryType = what.dstMemoryType = m.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        what.srcDevice, what.srcPitch = copy.src, copy.src_pitch
        what.dstDevice, what.dstPitch = copy.dst, copy.dst_pitch
        what.WidthInBytes, what.Height = copy.width, copy.height
        self._call("cuMemcpy2DAsync", what, stream)

    # --- inside --------------------------------------------------------------------------------

    def _raw(self, name: str, *args: Any) -> tuple[Any, ...]:
        try:
            results: tuple[Any, ...] = getattr(self._m, name)(*args)
        except Exception as exc:
            # No driver on this machine, or one without this function.
            text = str(exc).splitlines()[0] if str(exc) else repr(exc)
            raise CudaError(name, text, Code.UNSUPPORTED) from None
        return results

    def _call(self, name: str, *args: Any) -> Any:
        result, *values = self._raw(name, *args)
        self._check(name, result)
        if len(values) == 1:
            return values[0]
        return tuple(values) if values else None

    def _check(self, name: str, result: Any) -> None:
        if result == self._m.CUresult.CUDA_SUCCESS:
            return
        what = getattr(result, "name", str(result))
        code = _CODES.get(what, Code.TRANSPORT_ERROR)
        raise CudaError(name, what, code, broken=what in _BROKEN)
