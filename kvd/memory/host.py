"""Host address space: one reservation for an engine, its segments mapped side by side inside it.

One reservation instead of one mapping per segment, because layers that lie in separate segments of
equal size are then a uniform step apart, and one strided numpy call can copy a block of all of
them. A reservation is unmapped by reference count: every array made from it keeps it alive, so a
forgotten view delays the unmapping and can never be left dangling.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvd.errors import MemoryRefused
from kvd.protocol.codes import Code

Bytes = NDArray[np.uint8]

_HUGE = 2 * 2**20
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MADV_DONTFORK = 10
_MADV_DONTDUMP = 16
_MADV_POPULATE_READ = 22
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _mmap(address: int | None, nbytes: int, prot: int, flags: int, fd: int) -> int:
    result = _libc.mmap(address, nbytes, prot, flags, fd, 0)
    if result is None or result == _FAILED:
        err = ctypes.get_errno()
        raise OSError(err, os.strerror(err))
    return int(result)


def _unmap(address: int, nbytes: int, done: Callable[[], None]) -> None:
    _libc.munmap(address, nbytes)
    done()


def page_align(nbytes: int) -> int:
    """Bytes of address space that a segment takes: whole pages, or whole 2 MiB if it is large."""
    unit = _HUGE if nbytes >= _HUGE else mmap.PAGESIZE
    return -(-nbytes // unit) * unit


class Reservation:
    """`nbytes` bytes of address space, inaccessible until files are mapped into it.

    `writable` holds for all of it. `unmapped` is called once, on whatever thread drops the last
    reference, after the address space was given back.
    """

    def __init__(self, nbytes: int, *, writable: bool, unmapped: Callable[[], None]) -> None:
        total = nbytes + _HUGE
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            start = _mmap(None, total, 0, flags, -1)
        except OSError as exc:
            raise MemoryRefused(
                f"cannot reserve {total} bytes of address space: {exc.strerror}", Code.NO_SPACE
            ) from None
        finalizer = weakref.finalize(self, _unmap, start, total, unmapped)
        # At exit threads may still be copying; the kernel unmaps when they are gone.
        finalizer.atexit = False
        self.address = -(-start // _HUGE) * _HUGE
        self.nbytes = nbytes
        self.writable = writable

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "typestr": "|u1",
            "shape": (self.nbytes,),
            "data": (self.address, not self.writable),
        }

    def array(self) -> Bytes:
        """uint8 [nbytes] over the whole reservation; touching an unmapped part is a fault."""
        return np.asarray(self)

    def map(self, offset: int, fd: int, nbytes: int) -> None:
        """Maps the first `nbytes` bytes of a file at `offset`, and faults them all in.

        Raises OSError. Faulting in here is what turns a full tmpfs into an error instead of a
        SIGBUS later on.
        """
        address = self.address + offset
        prot = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
        flags = mmap.MAP_SHARED | _MAP_FIXED
        _mmap(address, nbytes, prot, flags, fd)
        _libc.madvise(address, nbytes, _MADV_DONTDUMP)
        _libc.madvise(address, nbytes, _MADV_DONTFORK)
        if _libc.madvise(address, nbytes, _MADV_POPULATE_READ) == 0:
            return
        err = ctypes.get_errno()
        if err != errno.EINVAL:
            raise OSError(err, os.strerror(err))
        # Kernels before 5.14: fault in by mapping again, which cannot tell about a full tmpfs.
        _mmap(address, nbytes, prot, flags | mmap.MAP_POPULATE, fd)
