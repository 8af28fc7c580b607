"""Scatter-gather on sockets by address, without a Python object per stretch of memory.

A block of a model with many layers is many stretches; one `Vector` describes all of a message in
one array that the kernel reads directly. The calls release the GIL.
"""

from __future__ import annotations

import ctypes
import os

import numpy as np
from numpy.typing import NDArray

from kvd.memory.host import Bytes

MAX_IOV = 1024
CALL_BYTES = 16 * 2**20
"""Most bytes of one call. How long a stop may have to wait does not hang on it alone: a call ends,
with what it has got, once it has waited for the socket's timeout (`tcp_socket.TICK_S`) in all."""

HEAD_ROOM = 64
"""So that a head goes out in one call with a whole `CALL_BYTES` of payload."""

Stretches = NDArray[np.uint64]


class _MsgHdr(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("namelen", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iovlen", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("controllen", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.sendmsg, _libc.recvmsg):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = (ctypes.c_int, ctypes.POINTER(_MsgHdr), ctypes.c_int)


def stretch(buffer: Bytes) -> Stretches:
    """One entry over a whole contiguous array, which the caller keeps alive."""
    return np.array([[buffer.ctypes.data, buffer.nbytes]], np.uint64)


class Vector:
    """Memory stretches (address, bytes), u64 [n, 2], sent or filled from first to last.

    The memory must stay mapped for as long as calls are made.
    """

    def __init__(self, stretches: Stretches) -> None:
        self.nbytes = int(stretches[:, 1].sum())
        if stretches.size and int(stretches[:, 1].max()) > CALL_BYTES:
            stretches = _cut(stretches)
        self._iov: Stretches = np.array(stretches, np.uint64, order="C")
        self._end = np.cumsum(self._iov[:, 1].astype(np.int64))
        self._next = 0
        self._header = _MsgHdr()
        self.done = 0

    @classmethod
    def repeated(cls, scratch: Bytes, nbytes: int) -> Vector:
        """`nbytes` bytes that come from, or go to, `scratch` over and over."""
        return cls(_repeat(scratch, nbytes))

    @property
    def left(self) -> int:
        """Bytes still to be sent or filled."""
        return self.nbytes - self.done

    def send(self, fd: int, flags: int = 0) -> int:
        """One sendmsg of what is left; returns the bytes taken. Raises OSError."""
        return self.advance(self._call(_libc.sendmsg, fd, flags))

    def receive(self, fd: int, flags: int = 0) -> int:
        """One recvmsg into what is left; returns the bytes filled, 0 at the end of the stream."""
        return self.advance(self._call(_libc.recvmsg, fd, flags))

    def redirect(self, scratch: Bytes) -> None:
        """What is left comes from, or goes to, `scratch` instead, over and over."""
        self._iov = _repeat(scratch, self.left)
        self._end = self.done + np.cumsum(self._iov[:, 1].astype(np.int64))
        self._next = 0

    def _call(self, call: ctypes._NamedFuncPointer, fd: int, flags: int) -> int:
        first = self._next
        last = int(self._end.searchsorted(self.done + CALL_BYTES + HEAD_ROOM, side="right"))
        last = min(max(last, first + 1), first + MAX_IOV, len(self._end))
        self._header.iov = self._iov.ctypes.data + 16 * first
        self._header.iovlen = last - first
        result = int(call(fd, ctypes.byref(self._header), flags))
        if result < 0:
            err = ctypes.get_errno()
            raise OSError(err, os.strerror(err))
        return result

    def next_stretch(self) -> tuple[int, int]:
        """Address and bytes of what is next, for calls that take one stretch at a time."""
        address, nbytes = self._iov[self._next]
        return int(address), int(nbytes)

    def advance(self, nbytes: int) -> int:
        """Notes that so many bytes were sent or filled; returns them."""
        self.done += nbytes
        first = int(self._end.searchsorted(self.done, side="right"))
        self._next = first
        if first < len(self._end):
            entry = self._iov[first]
            left = int(self._end[first]) - self.done
            entry[0] += np.uint64(int(entry[1]) - left)
            entry[1] = left
        return nbytes


def _repeat(scratch: Bytes, nbytes: int) -> Stretches:
    full, rest = divmod(nbytes, scratch.nbytes)
    entries = np.empty((full + bool(rest), 2), np.uint64)
    entries[:, 0] = scratch.ctypes.data
    entries[:, 1] = scratch.nbytes
    if rest:
        entries[-1, 1] = rest
    return entries


def _cut(stretches: Stretches) -> Stretches:
    entries = [
        (address + at, min(CALL_BYTES, nbytes - at))
        for address, nbytes in stretches.tolist()
        for at in range(0, nbytes, CALL_BYTES)
    ]
    return np.array(entries, np.uint64)
