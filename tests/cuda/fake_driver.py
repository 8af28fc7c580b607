"""A driver for tests, with the signatures of `cuda.bindings.driver`, that moves real bytes.

Device memory is a memfd mapped into this process, and its addresses are real ones. Handles of
allocations name the process and descriptor, so that another process with such a driver can open
them; within one process, each `FakeDriver` stands for a process of its own. Streams make progress
when an event is looked at, as late as a script says. Everything that was made is counted until it
is given back (`live`).
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import cuda.bindings.driver as real

from tests.cuda.script import Fail, Late, Script

R = real.CUresult
OK = (R.CUDA_SUCCESS,)
GRANULARITY = 4096
_HANDLE = struct.Struct("<8sqqqq")
_MAGIC = b"fakecuda"
_instances = itertools.count(1)
UUIDS = [bytes([n]) * 16 for n in range(1, 9)]

LEGACY, VMM, EXPORTABLE = "legacy", "vmm", "vmm-exportable"


class Bad(Exception):
    """The call fails with this result."""


@dataclass(slots=True, eq=False)
class Allocation:
    kind: str
    fd: int
    nbytes: int
    address: int
    map: mmap.mmap | None = None


@dataclass(slots=True, eq=False)
class Event:
    stream: Stream | None = None
    upto: int = 0
    not_yet: int = 0


@dataclass(slots=True, eq=False)
class Stream:
    """`ops` return True once they are done; the first that is not holds up the others."""

    ops: deque[Callable[[], bool]] = field(default_factory=deque)
    done: int = 0
    put: int = 0
    broken: Any = None

    def push(self, op: Callable[[], bool]) -> None:
        self.put += 1
        self.ops.append(op)

    def progress(self) -> None:
        while self.ops and self.ops[0]():
            self.ops.popleft()
            self.done += 1


class Uuid:
    def __init__(self, raw: bytes) -> None:
        self.bytes = raw


class FakeDriver:
    """`gate()` is called once for each copy that is about to be made; the copy, and all that is
    behind it on its stream, waits until what it returned is true."""

    def __init__(self, *, version: int = 13_000, devices: int = 1, engine_on: int = 0) -> None:
        self.script = Script()
        self.version = version
        self.num_devices = devices
        self._engine_on = engine_on
        self.live: Counter[str] = Counter()
        self.gate: Callable[[], Callable[[], bool]] | None = None
        self._lock = threading.RLock()
        self._instance = next(_instances)
        self._allocations: dict[int, Allocation] = {}
        self._handles: dict[int, Allocation] = {}
        self._reserved: dict[int, int] = {}
        self._next = itertools.count(1)
        self._next_space = itertools.count(0x7000_0000_0000, 0x1_0000_0000)
        self._moved: dict[int, tuple[int, int, mmap.mmap]] = {}
        self._streams: dict[int, Stream] = {}
        self._events: dict[int, Event] = {}
        self._bound = threading.local()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cu") and name[2:3].isupper():
            raise AttributeError(name)  # a call that is not faked must not reach the real driver
        return getattr(real, name)

    # --- for tests -----------------------------------------------------------------------------

    def engine_alloc(self, nbytes: int, kind: str = LEGACY) -> int:
        """Memory of the engine whose process this driver is: its address."""
        with self._lock:
            return self._new(nbytes, kind).address

    def descriptors(self) -> list[int]:
        """Of all memory, in the order in which it was made."""
        return [allocation.fd for allocation in self._allocations.values()]

    def memory(self, address: int, nbytes: int) -> Any:
        """The bytes there, as a numpy array over them."""
        import numpy as np

        raw = (ctypes.c_uint8 * nbytes).from_address(self._host(address))
        return np.ctypeslib.as_array(raw)

    def close(self) -> None:
        """Gives all memory of tests back."""
        with self._lock:
            for allocation in list(self._allocations.values()):
                self._drop(allocation)

    # --- devices -------------------------------------------------------------------------------

    def cuInit(self, Flags: int) -> Any:
        return self._do("cuInit", lambda: None, context=False)

    def cuDriverGetVersion(self) -> Any:
        return self._do("cuDriverGetVersion", lambda: self.version, context=False)

    def cuDeviceGetCount(self) -> Any:
        return self._do("cuDeviceGetCount", lambda: self.num_devices, context=False)

    def cuDeviceGet(self, ordinal: int) -> Any:
        return self._do("cuDeviceGet", lambda: ordinal, context=False)

    def cuDeviceGetUuid(self, dev: Any) -> Any:
        return self._do("cuDeviceGetUuid", lambda: Uuid(UUIDS[dev]), context=False)

    def cuDeviceGetName(self, length: int, dev: Any) -> Any:
        return self._do("cuDeviceGetName", lambda: b"Fake GPU\0\0", context=False)

    def cuDevicePrimaryCtxRetain(self, dev: Any) -> Any:
        return self._do("cuDevicePrimaryCtxRetain", lambda: self._make("context", dev), False)

    def cuDevicePrimaryCtxRelease(self, dev: Any) -> Any:
        return self._do("cuDevicePrimaryCtxRelease", lambda: self._unmake("context"), False)

    def cuCtxSetCurrent(self, ctx: Any) -> Any:
        return self._do("cuCtxSetCurrent", lambda: setattr(self._bound, "ctx", ctx), False)

    # --- memory of others ----------------------------------------------------------------------

    def cuIpcGetMemHandle(self, dptr: Any) -> Any:
        def get() -> Any:
            allocation = self._at(int(dptr))
            if allocation.kind != LEGACY:
                raise Bad("CUDA_ERROR_INVALID_VALUE")
            handle = real.CUipcMemHandle()
            packed = _HANDLE.pack(
                _MAGIC, self._instance, os.getpid(), allocation.fd, allocation.nbytes
            )
            ctypes.memmove(handle.getPtr(), packed.ljust(64, b"\0"), 64)
            return handle

        return self._do("cuIpcGetMemHandle", get)

    def cuIpcOpenMemHandle(self, handle: Any, Flags: int) -> Any:
        def open_() -> Any:
            assert isinstance(handle, real.CUipcMemHandle)
            raw = ctypes.string_at(handle.getPtr(), _HANDLE.size)
            magic, instance, pid, fd, nbytes = _HANDLE.unpack(raw)
            if magic != _MAGIC:
                raise Bad("CUDA_ERROR_INVALID_VALUE")
            if instance == self._instance and pid == os.getpid():
                raise Bad("CUDA_ERROR_INVALID_CONTEXT")  # of our own process
            return real.CUdeviceptr(self._import(f"/proc/{pid}/fd/{fd}", nbytes).address)

        return self._do("cuIpcOpenMemHandle", open_)

    def cuIpcCloseMemHandle(self, dptr: Any) -> Any:
        return self._do("cuIpcCloseMemHandle", lambda: self._close_import(int(dptr)))

    def cuMemGetAddressRange(self, dptr: Any) -> Any:
        def get() -> Any:
            allocation = self._at(int(dptr))
            return real.CUdeviceptr(allocation.address), allocation.nbytes

        return self._do("cuMemGetAddressRange", get)

    def cuPointerGetAttributes(self, numAttributes: int, attributes: Any, ptr: Any) -> Any:
        A = real.CUpointer_attribute

        def get() -> Any:
            allocation = self._at(int(ptr))
            fds = int(real.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
            known = {
                A.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: allocation.kind == LEGACY,
                A.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: (
                    fds if allocation.kind == EXPORTABLE else 0
                ),
                A.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: self._engine_on,
                A.CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: allocation.address,
                A.CU_POINTER_ATTRIBUTE_MAPPING_SIZE: allocation.nbytes,
            }
            return ([known[one] for one in attributes],)

        return self._do("cuPointerGetAttributes", get)

    def cuMemRetainAllocationHandle(self, addr: Any) -> Any:
        def retain() -> Any:
            allocation = self._at(int(addr))
            if allocation.kind == LEGACY:
                raise Bad("CUDA_ERROR_INVALID_VALUE")
            return self._handle(allocation)

        return self._do("cuMemRetainAllocationHandle", retain)

    def cuMemExportToShareableHandle(self, handle: Any, handleType: Any, flags: int) -> Any:
        def export() -> Any:
            allocation = self._handles[int(handle)]
            if allocation.kind != EXPORTABLE:
                raise Bad("CUDA_ERROR_NOT_SUPPORTED")
            return os.dup(allocation.fd)

        return self._do("cuMemExportToShareableHandle", export)

    def cuMemImportFromShareableHandle(self, osHandle: Any, shHandleType: Any) -> Any:
        def import_() -> Any:
            fd = os.dup(osHandle)
            size = os.fstat(fd).st_size
            allocation = Allocation("imported", fd, size, 0)
            return self._handle(allocation)

        return self._do("cuMemImportFromShareableHandle", import_)

    def cuMemRelease(self, handle: Any) -> Any:
        def release() -> None:
            allocation = self._handles.pop(int(handle))
            self._unmake("handle")
            if allocation.kind == "imported" and allocation.map is None:
                os.close(allocation.fd)

        return self._do("cuMemRelease", release)

    def cuMemAddressReserve(self, size: int, alignment: int, addr: Any, flags: int) -> Any:
        def reserve() -> Any:
            if size % GRANULARITY:
                raise Bad("CUDA_ERROR_INVALID_VALUE")
            address = next(self._next_space)
            self._reserved[address] = size
            self._make("reservation")
            return real.CUdeviceptr(address)

        return self._do("cuMemAddressReserve", reserve)

    def cuMemAddressFree(self, ptr: Any, size: int) -> Any:
        def free() -> None:
            if int(ptr) in self._allocations or self._reserved.pop(int(ptr)) != size:
                raise Bad("CUDA_ERROR_INVALID_VALUE")
            self._unmake("reservation")

        return self._do("cuMemAddressFree", free)

    def cuMemMap(self, ptr: Any, size: int, offset: int, handle: Any, flags: int) -> Any:
        def map_() -> None:
            allocation = self._handles[int(handle)]
            if size != allocation.nbytes or size > self._reserved.get(int(ptr), 0):
                raise Bad("CUDA_ERROR_INVALID_VALUE")
            allocation.map = mmap.mmap(allocation.fd, size)
            allocation.address = int(ptr)
            self._allocations[int(ptr)] = allocation
            host = ctypes.addressof(ctypes.c_char.from_buffer(allocation.map))
            self._moved[int(ptr)] = (size, host, allocation.map)
            self._make("mapping")

        return self._do("cuMemMap", map_)

    def cuMemUnmap(self, ptr: Any, size: int) -> Any:
        def unmap() -> None:
            allocation = self._allocations.pop(int(ptr))
            del self._moved[int(ptr)]
            os.close(allocation.fd)
            self._unmake("mapping")

        return self._do("cuMemUnmap", unmap)

    def cuMemSetAccess(self, ptr: Any, size: int, desc: Any, count: int) -> Any:
        def allow() -> None:
            assert all(isinstance(one, real.CUmemAccessDesc) for one in desc)
            assert len(desc) == count

        return self._do("cuMemSetAccess", allow)

    # --- own memory ----------------------------------------------------------------------------

    def cuMemAlloc(self, bytesize: int) -> Any:
        def alloc() -> Any:
            self._make("alloc")
            return real.CUdeviceptr(self._new(bytesize, LEGACY).address)

        return self._do("cuMemAlloc", alloc)

    def cuMemFree(self, dptr: Any) -> Any:
        def free() -> None:
            self._drop(self._allocations[int(dptr)])
            self._unmake("alloc")

        return self._do("cuMemFree", free)

    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> Any:
        def alloc() -> Any:
            self._make("host")
            return self._new(bytesize, "host").address

        return self._do("cuMemHostAlloc", alloc)

    def cuMemFreeHost(self, p: Any) -> Any:
        def free() -> None:
            self._drop(self._allocations[int(p)])
            self._unmake("host")

        return self._do("cuMemFreeHost", free)

    # --- streams and events --------------------------------------------------------------------

    def cuStreamCreate(self, Flags: int) -> Any:
        def create() -> Any:
            number = self._make("stream")
            self._streams[number] = Stream()
            return real.CUstream(number)

        return self._do("cuStreamCreate", create)

    def cuStreamDestroy(self, hStream: Any) -> Any:
        def destroy() -> None:
            # The real one lets the work that is on it go on.
            del self._streams[int(hStream)]
            self._unmake("stream")

        return self._do("cuStreamDestroy", destroy)

    def cuEventCreate(self, Flags: int) -> Any:
        def create() -> Any:
            number = self._make("event")
            self._events[number] = Event()
            return real.CUevent(number)

        return self._do("cuEventCreate", create)

    def cuEventDestroy(self, hEvent: Any) -> Any:
        def destroy() -> None:
            del self._events[int(hEvent)]
            self._unmake("event")

        return self._do("cuEventDestroy", destroy)

    def cuEventRecord(self, hEvent: Any, hStream: Any) -> Any:
        def record() -> None:
            event, stream = self._events[int(hEvent)], self._streams[int(hStream)]
            event.stream, event.upto = stream, stream.put

        return self._do("cuEventRecord", record)

    def cuEventQuery(self, hEvent: Any) -> Any:
        behaviour = self.script.enter("cuEventQuery")
        with self._lock:
            event = self._events[int(hEvent)]
            if isinstance(behaviour, Fail):
                return (getattr(R, behaviour.error),)
            if isinstance(behaviour, Late):
                event.not_yet = behaviour.looks
            if event.not_yet:
                event.not_yet -= 1
                return (R.CUDA_ERROR_NOT_READY,)
            if event.stream is not None:
                if event.stream.broken is not None:
                    return (event.stream.broken,)
                event.stream.progress()
                if event.stream.done < event.upto:
                    return (R.CUDA_ERROR_NOT_READY,)
            return OK

    # --- copies --------------------------------------------------------------------------------

    def cuMemcpyBatchAsync(
        self, dsts: Any, srcs: Any, sizes: Any, count: int, attrs: Any, attrsIdxs: Any,
        numAttrs: int, hStream: Any,
    ) -> Any:  # fmt: skip
        def copy() -> None:
            # What the real one checks before it calls the driver.
            for pointers in (dsts, srcs):
                if not all(isinstance(one, real.CUdeviceptr) for one in pointers):
                    raise TypeError("not CUdeviceptr")
            assert all(isinstance(one, real.CUmemcpyAttributes) for one in attrs)
            assert len(dsts) == len(srcs) == len(sizes) == count > 0
            assert list(attrsIdxs) == [0]
            assert numAttrs == 1
            parts = [(int(d), int(s), n) for d, s, n in zip(dsts, srcs, sizes, strict=True)]
            self._enqueue(hStream, parts)

        return self._do("cuMemcpyBatchAsync", copy)

    def cuMemcpy2DAsync(self, pCopy: Any, hStream: Any) -> Any:
        def copy() -> None:
            assert isinstance(pCopy, real.CUDA_MEMCPY2D)
            dst, src = int(pCopy.dstDevice), int(pCopy.srcDevice)
            assert pCopy.dstPitch >= pCopy.WidthInBytes <= pCopy.srcPitch
            rows = range(pCopy.Height)
            parts = [
                (dst + r * pCopy.dstPitch, src + r * pCopy.srcPitch, pCopy.WidthInBytes)
                for r in rows
            ]
            self._enqueue(hStream, parts)

        return self._do("cuMemcpy2DAsync", copy)

    def cuMemcpyAsync(self, dst: Any, src: Any, ByteCount: int, hStream: Any) -> Any:
        parts = [(int(dst), int(src), ByteCount)]
        return self._do("cuMemcpyAsync", lambda: self._enqueue(hStream, parts))

    # --- inside --------------------------------------------------------------------------------

    def _do(self, name: str, work: Callable[[], Any], context: bool = True) -> Any:
        behaviour = self.script.enter(name)
        if isinstance(behaviour, Fail):
            return (getattr(R, behaviour.error),)
        if context and getattr(self._bound, "ctx", None) is None:
            return (R.CUDA_ERROR_INVALID_CONTEXT,)
        with self._lock:
            try:
                value = work()
            except Bad as bad:
                return (getattr(R, str(bad)),)
        if isinstance(value, tuple):
            return (R.CUDA_SUCCESS, *value)
        return OK if value is None else (R.CUDA_SUCCESS, value)

    def _make(self, what: str, value: Any = None) -> Any:
        self.live[what] += 1
        return next(self._next) if value is None else value + 1000

    def _unmake(self, what: str) -> None:
        self.live[what] -= 1
        assert self.live[what] >= 0, f"{what} given back twice"

    def _new(self, nbytes: int, kind: str) -> Allocation:
        fd = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
        size = -(-nbytes // GRANULARITY) * GRANULARITY if kind in (VMM, EXPORTABLE) else nbytes
        os.ftruncate(fd, size)
        return self._mapped(kind, fd, size)

    def _mapped(self, kind: str, fd: int, nbytes: int) -> Allocation:
        mapped = mmap.mmap(fd, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        allocation = Allocation(kind, fd, nbytes, address, mapped)
        self._allocations[address] = allocation
        return allocation

    def _import(self, path: str, nbytes: int) -> Allocation:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            raise Bad("CUDA_ERROR_INVALID_HANDLE") from None
        self._make("import")
        return self._mapped("ipc", fd, nbytes)

    def _close_import(self, address: int) -> None:
        allocation = self._allocations.get(address)
        if allocation is None or allocation.kind != "ipc":
            raise Bad("CUDA_ERROR_INVALID_VALUE")
        self._drop(allocation)
        self._unmake("import")

    def _drop(self, allocation: Allocation) -> None:
        self._allocations.pop(allocation.address, None)
        self._moved.pop(allocation.address, None)
        allocation.map = None
        os.close(allocation.fd)

    def _handle(self, allocation: Allocation) -> Any:
        number = self._make("handle")
        self._handles[number] = allocation
        return real.CUmemGenericAllocationHandle(number)

    def _at(self, address: int) -> Allocation:
        for allocation in self._allocations.values():
            if allocation.address <= address < allocation.address + allocation.nbytes:
                return allocation
        raise Bad("CUDA_ERROR_INVALID_VALUE")

    def _host(self, address: int) -> int:
        """Where the bytes of an address really are: mapped memory has one of its own."""
        for start, (nbytes, host, _) in self._moved.items():
            if start <= address < start + nbytes:
                return host + address - start
        return address

    def _check(self, address: int, nbytes: int) -> None:
        allocation = self._at(address)
        if address + nbytes > allocation.address + allocation.nbytes:
            raise Bad("CUDA_ERROR_INVALID_VALUE")

    def _enqueue(self, hStream: Any, parts: list[tuple[int, int, int]]) -> None:
        for dst, src, nbytes in parts:
            self._check(dst, nbytes)
            self._check(src, nbytes)
        may_go: Callable[[], bool] | None = None

        def op() -> bool:
            nonlocal may_go
            if self.gate is not None and may_go is None:
                may_go = self.gate()
            if may_go is not None and not may_go():
                return False
            for dst, src, nbytes in parts:
                ctypes.memmove(self._host(dst), self._host(src), nbytes)
            return True

        self._streams[int(hStream)].push(op)
