"""How GPU memory of this engine can be shared: found out from what each allocation really is.

Only the CUDA driver's public calls are used, and only when a KV tensor is on a GPU.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from typing import Any

from connector_shim.errors import ClientError
from connector_shim.memory import Segment
from kvd.protocol.codes import Code

HANDLE_NBYTES = 64
"""Of a CUDA IPC handle, and of a fabric handle."""

_WAY_OUT = (
    "start vLLM without enable_sleep_mode and without "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)


class DeviceExporter:
    """Describes stretches of device memory as segments. Each allocation is exported once.

    Descriptors that it made belong to the segments. A context must be current, as it is on a
    worker's own thread.
    """

    def __init__(self, driver: Any = None) -> None:
        """`driver` is `cuda.bindings.driver`, or a stand-in. Raises ClientError (UNSUPPORTED)."""
        if driver is None:
            try:
                driver = importlib.import_module("cuda.bindings.driver")
            except ImportError as error:
                raise ClientError(
                    Code.UNSUPPORTED,
                    f"KV memory on a GPU needs cuda-bindings in vLLM's environment ({error}): "
                    "pip install 'vllm-kvd[cuda]'",
                ) from None
        self._driver = driver
        self._handles: dict[int, bytes] = {}

    def export(self, segment: int, address: int, nbytes: int) -> Segment:
        """`[address, address + nbytes)` as a segment. Raises ClientError: UNSUPPORTED, with the
        setting of vLLM that changes it, for memory that cannot be shared."""
        names = self._driver.CUpointer_attribute
        legacy, kinds, ordinal = self._attributes(
            address,
            names.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            names.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
            names.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        )
        device = self._uuid(int(ordinal))
        if legacy:
            return self._legacy(segment, address, nbytes, device)
        return self._vmm(segment, address, nbytes, device, int(kinds))

    def _legacy(self, segment: int, address: int, nbytes: int, device: str) -> Segment:
        start, size = self._call("cuMemGetAddressRange", address)
        base = int(start)
        self._check_range(address, nbytes, base, int(size))
        handle = self._handles.get(base)
        if handle is None:
            opaque = self._call("cuIpcGetMemHandle", base)
            handle = self._handles[base] = ctypes.string_at(opaque.getPtr(), HANDLE_NBYTES)
        return Segment(
            segment=segment,
            nbytes=nbytes,
            kind="cuda_ipc",
            device=device,
            handle=handle,
            offset=address - base,
            base_nbytes=int(size),
        )

    def _vmm(self, segment: int, address: int, nbytes: int, device: str, kinds: int) -> Segment:
        names = self._driver.CUpointer_attribute
        types = self._driver.CUmemAllocationHandleType
        fd_kind, fabric_kind = (
            types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            types.CU_MEM_HANDLE_TYPE_FABRIC,
        )
        if not kinds & (int(fd_kind) | int(fabric_kind)):
            raise ClientError(
                Code.UNSUPPORTED,
                "the KV cache lies in memory that no other process can open: no CUDA IPC, and no "
                f"shareable handle type; {_WAY_OUT}, or with its default allocator",
            )
        base, size = (
            int(value)
            for value in self._attributes(
                address,
                names.CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
                names.CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
            )
        )
        self._check_range(address, nbytes, base, size)
        allocation = self._call("cuMemRetainAllocationHandle", address)
        fd, handle = -1, b""
        try:
            if kinds & int(fd_kind):
                fd = int(self._call("cuMemExportToShareableHandle", allocation, fd_kind, 0))
            else:
                opaque = self._call("cuMemExportToShareableHandle", allocation, fabric_kind, 0)
                handle = ctypes.string_at(opaque.getPtr(), HANDLE_NBYTES)
        finally:
            self._release(allocation, fd)
        return Segment(
            segment=segment,
            nbytes=nbytes,
            fd=fd,
            kind="vmm",
            device=device,
            handle=handle,
            offset=address - base,
            base_nbytes=size,
        )

    def _release(self, allocation: Any, fd: int) -> None:
        try:
            self._call("cuMemRelease", allocation)
        except ClientError:
            if fd >= 0:
                os.close(fd)
            raise

    def _check_range(self, address: int, nbytes: int, base: int, size: int) -> None:
        if not base <= address or address + nbytes > base + size:
            raise ClientError(
                Code.UNSUPPORTED,
                f"{nbytes} bytes of the KV cache span more than one allocation (this one has "
                f"{size} bytes, {address - base} of them before the cache); {_WAY_OUT}",
            )

    def _attributes(self, address: int, *names: Any) -> tuple[Any, ...]:
        return tuple(self._call("cuPointerGetAttributes", len(names), list(names), address))

    def _uuid(self, ordinal: int) -> str:
        device = self._call("cuDeviceGet", ordinal)
        text = bytes(self._call("cuDeviceGetUuid", device).bytes).hex()
        return "GPU-" + "-".join(
            text[start:end] for start, end in ((0, 8), (8, 12), (12, 16), (16, 20), (20, 32))
        )

    def _call(self, name: str, *args: Any) -> Any:
        try:
            result, *values = getattr(self._driver, name)(*args)
        except Exception as error:
            raise ClientError(Code.UNSUPPORTED, f"{name}: {error}") from None
        if int(result) != 0:
            what = getattr(result, "name", str(result))
            raise ClientError(
                Code.UNSUPPORTED,
                f"the KV cache on the GPU cannot be shared ({name}: {what}); {_WAY_OUT}",
            )
        return values[0] if len(values) == 1 else values
