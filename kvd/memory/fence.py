"""Reads a fence table: one little-endian u64 per slot, written by its engine's shim alone."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvd.errors import MemoryRefused
from kvd.memory.host import Reservation, page_align
from kvd.memory.segments import check_file, map_file
from kvd.protocol.codes import Code

WORD = 8
MAX_SLOTS = 2**24

_libc = ctypes.CDLL(None, use_errno=True)
_MEMBARRIER_AARCH64 = 283
_PRIVATE_EXPEDITED = 1 << 3
_REGISTER_PRIVATE_EXPEDITED = 1 << 4


def _nothing() -> None:
    return


def _membarrier() -> None:
    _libc.syscall(_MEMBARRIER_AARCH64, _PRIVATE_EXPEDITED, 0, 0)


def load_barrier(machine: str | None = None) -> Callable[[], None]:
    """A function that keeps loads before it from being done after loads that follow it.

    x86-64 never reorders loads, so nothing is needed there; on aarch64 the kernel's membarrier
    does it. Elsewhere the second check of a fence word would prove nothing: MemoryRefused.
    """
    machine = platform.machine() if machine is None else machine
    if machine in ("x86_64", "AMD64"):
        return _nothing
    if machine in ("aarch64", "arm64"):
        if _libc.syscall(_MEMBARRIER_AARCH64, _REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0:
            return _membarrier
        raise MemoryRefused("fence table: this kernel has no membarrier", Code.UNSUPPORTED)
    raise MemoryRefused(
        f"fence table: checks after a copy are not proven on {machine}", Code.UNSUPPORTED
    )


class FenceReader:
    """A fence table of `slots` words, mapped read-only from `fd` (which stays the caller's).

    `unmapped` is called once the table's address space was given back. Raises MemoryRefused.
    """

    def __init__(self, fd: int, slots: int, *, unmapped: Callable[[], None]) -> None:
        if not 1 <= slots <= MAX_SLOTS:
            raise MemoryRefused(f"fence table: {slots} slots, must be between 1 and {MAX_SLOTS}")
        self.slots = slots
        self._barrier = load_barrier()
        check_file("fence table", fd, slots * WORD, writable=False)
        space = Reservation(page_align(slots * WORD), writable=False, unmapped=unmapped)
        map_file("fence table", fd, slots * WORD, space, 0)
        self._words: NDArray[np.uint64] = space.array()[: slots * WORD].view("<u8")

    def word(self, slot: int) -> int:
        """The word of a slot below `slots`, loaded after everything that the caller read before."""
        self._barrier()
        return int(self._words[slot])
