"""The fence table: one 64-bit word per offer, which says whether the offer's blocks may be read.

The engine's own process is the only writer. Readers (its daemon, and daemons on the same host)
map the table read-only, copy, and then check that the word still has the value that the offer
was made with. So the rule is: the word is dropped *before* the blocks can be written again.

Why plain stores are enough. A word is 8 bytes, aligned to 8, and written by one store
instruction: x86-64 and aarch64 make such a store visible as a whole. What must hold besides is
the order of "drop the word" before "write new data into the block", as seen by a reader that
loads the block first and the word after it.

- x86-64 keeps ordinary stores in order. Non-temporal stores, which an engine's copy routines may
  use, are the exception, so `drop` ends with a locked instruction (taking a lock), which drains
  the store buffer.
- aarch64 may reorder stores, and no Python lock is a full barrier there. `drop` ends with
  membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED), which begins and ends with a full barrier on the
  calling CPU whoever is registered for it. Where the kernel does not offer that, the table is
  refused: a fence that may be seen late is worse than none.

Words are never used twice in one table, so a slot that serves the next offer cannot make the
last one look alive.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import sys
import time
from _thread import allocate_lock
from collections import deque
from collections.abc import Callable

from connector_shim.errors import ClientError
from kvd.protocol.codes import Code

DEAD = 0
WORD = 8

# Not yet named by the `fcntl` module of Python 3.11.
_F_SEAL_FUTURE_WRITE = 0x0010

_MEMBARRIER_SYSCALL = {"aarch64": 283}
_MEMBARRIER_CMD_QUERY = 0
_MEMBARRIER_CMD_GLOBAL_EXPEDITED = 1 << 1


class FenceTable:
    """Not thread-safe: arm and drop from the thread that owns the client.

    `fd` is a read-only descriptor of the table, to be passed to the daemon. The table is sealed:
    its size is fixed, and (Linux 5.1 and later) nobody but this mapping can write it.
    Raises ClientError UNSUPPORTED on a machine whose stores cannot be ordered from here.
    """

    def __init__(self, slots: int = 16_384, *, first_word: int | None = None) -> None:
        if slots < 1:
            raise ClientError(Code.UNSUPPORTED, f"a fence table needs at least 1 slot, not {slots}")
        if sys.byteorder != "little":
            raise ClientError(Code.UNSUPPORTED, "the fence table needs a little-endian machine")
        self._barrier = _find_barrier(platform.machine())
        self.slots = slots
        self._next = time.time_ns() if first_word is None else first_word
        self._free: deque[int] = deque(range(slots))
        self._armed: dict[tuple[str, int], tuple[int, int]] = {}
        nbytes = slots * WORD
        fd = os.memfd_create("kvd-fence", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            _seal(fd)
            self.fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("B").cast("Q")

    def __len__(self) -> int:
        """How many words are alive."""
        return len(self._armed)

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._armed

    def arm(self, transfer_id: str, generation: int) -> tuple[int, int]:
        """Gives the offer a slot and a word of its own; returns (slot, word).

        Raises ClientError: DUPLICATE if it is armed already, OVERLOADED if no slot is free.
        """
        key = (transfer_id, generation)
        if key in self._armed:
            raise ClientError(
                Code.DUPLICATE,
                f"transfer {transfer_id!r} generation {generation} is offered already",
            )
        if not self._free:
            raise ClientError(
                Code.OVERLOADED, f"all {self.slots} slots of the fence table are in use"
            )
        slot = self._free.popleft()
        word = self._next
        self._next += 1
        self._armed[key] = (slot, word)
        self._words[slot] = word
        return slot, word

    def drop(self, transfer_id: str, generation: int) -> bool:
        """From here on no read of the offer's blocks counts. False if it was not armed."""
        held = self._armed.pop((transfer_id, generation), None)
        if held is None:
            return False
        self._words[held[0]] = DEAD
        self._barrier()
        self._free.append(held[0])
        return True

    def drop_all(self) -> int:
        """Drops every word; returns how many were alive."""
        count = len(self._armed)
        for slot, _ in self._armed.values():
            self._words[slot] = DEAD
            self._free.append(slot)
        self._armed.clear()
        self._barrier()
        return count

    def word(self, slot: int) -> int:
        """The slot's present value; 0 is dead."""
        return self._words[slot]

    def close(self) -> None:
        """Drops every word, then unmaps. Readers keep a mapping in which all words are dead."""
        if self.fd < 0:
            return
        self.drop_all()
        self._words.release()
        self._map.close()
        os.close(self.fd)
        self.fd = -1


def _seal(fd: int) -> None:
    """Fix the size, and let no one else write; the mapping that exists already still can."""
    size = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, size | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, size | fcntl.F_SEAL_SEAL)


def _find_barrier(machine: str) -> Callable[[], None]:
    if machine in ("x86_64", "AMD64"):
        lock = allocate_lock()

        def locked_instruction() -> None:
            with lock:
                pass

        return locked_instruction

    number = _MEMBARRIER_SYSCALL.get(machine)
    if number is None:
        raise ClientError(Code.UNSUPPORTED, f"no fence table on {machine}: no known store barrier")
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long

    def membarrier(command: int) -> int:
        return int(syscall(ctypes.c_long(number), ctypes.c_int(command), ctypes.c_uint(0), 0))

    offered = membarrier(_MEMBARRIER_CMD_QUERY)
    if offered < 0 or not offered & _MEMBARRIER_CMD_GLOBAL_EXPEDITED:
        raise ClientError(
            Code.UNSUPPORTED,
            f"no fence table on {machine}: membarrier(2) is missing or forbidden "
            "(allow it in the container's seccomp profile)",
        )

    def barrier() -> None:
        if membarrier(_MEMBARRIER_CMD_GLOBAL_EXPEDITED) != 0:
            # It was offered a moment ago, so this is not expected; going on would be unsafe.
            raise ClientError(Code.INTERNAL, f"membarrier failed: errno {ctypes.get_errno()}")

    return barrier
