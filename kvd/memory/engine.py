"""EngineMemory: one engine rank's KV memory and fence table, mapped into this daemon.

Opened once at registration (or at attach, read-only, for a peer's memory), closed at pin count 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvd.errors import MemoryRefused
from kvd.memory.fence import FenceReader
from kvd.memory.host import Bytes, Reservation, page_align
from kvd.memory.layout import RegionTable, check_layers, region_tables
from kvd.memory.segments import importer
from kvd.protocol.peer import SegmentInfo
from kvd.protocol.types import LayerLayout

MAX_SEGMENTS = 4096


class Stager(Protocol):
    """Host memory between a socket and memory that no socket can reach."""

    def room(self, nbytes: int) -> Bytes:
        """Where to receive `nbytes` bytes, for `put`."""
        ...

    def take(self, stretches: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Copies (address, bytes) stretches into host memory; where they lie there."""
        ...

    def put(self, stretches: NDArray[np.uint64]) -> None:
        """Copies what was received into stretches of the engine's memory."""
        ...

    def close(self) -> None: ...


class EngineMemory:
    """KV blocks of one engine rank. Make it with `open`.

    Layers are addressed by their global index; the layers of group `g` in a range are those
    whose `.group` is `g`. Pins count who reads or writes the memory at the moment: it is unmapped
    only when it was asked to close and nobody holds a pin.
    """

    def __init__(
        self,
        *,
        segments: Sequence[tuple[SegmentInfo, int]],
        layers: Sequence[LayerLayout],
        num_blocks: int,
        fence: tuple[int, int] | None,
        writable: bool,
    ) -> None:
        self._lock = threading.Lock()
        self._pins = 0
        self._closing = False
        self._gone = _Gone(1 if fence is None else 2)
        self._fds: list[int] = []
        self._block_nbytes: dict[tuple[int, int, int], int] = {}
        self._fence: FenceReader | None = None
        self._root: Bytes | None = None

        self.layers = tuple(layers)
        self.num_layers = len(self.layers)
        self.num_blocks = num_blocks
        self.num_groups = max((layer.group for layer in self.layers), default=-1) + 1
        self.fence_slots = 0 if fence is None else fence[1]
        self.writable = writable

        sizes = _sizes(segments)
        self._check_segments(segments)
        check_layers(self.layers, num_blocks, sizes)
        self.nbytes = sum(sizes.values())
        self.address = 0
        """Where offsets of `tables` are counted from."""
        placed = self._map(segments)
        try:
            if fence is not None:
                self._fence = FenceReader(*fence, unmapped=self._gone.one)
        except BaseException:
            self._unmap_segments()
            raise
        self.tables: tuple[RegionTable, ...] = region_tables(self.layers, self.num_groups, placed)

    device = "cpu"
    """What the segments' memory belongs to: "cpu", or a GPU's UUID."""

    def _check_segments(self, segments: Sequence[tuple[SegmentInfo, int]]) -> None:
        for info, fd in segments:
            importer(info).check(info, fd, writable=self.writable)

    def _map(self, segments: Sequence[tuple[SegmentInfo, int]]) -> dict[int, int]:
        """Maps checked segments; returns the offset of each from `address`."""
        placed: dict[int, int] = {}
        total = 0
        for info, _ in segments:
            placed[info.segment] = total
            total += page_align(info.nbytes)
        space = Reservation(total, writable=self.writable, unmapped=self._gone.one)
        self.address = space.address
        for info, fd in segments:
            importer(info).map(info, fd, space, placed[info.segment])
        self._root = space.array()
        return placed

    def _unmap_segments(self) -> None:
        """Gives the segments' address space back; every view of it was dropped."""
        with self._lock:
            self._root = None

    @classmethod
    def open(
        cls,
        *,
        segments: Sequence[tuple[SegmentInfo, int]],
        layers: Sequence[LayerLayout],
        num_blocks: int,
        fence: tuple[int, int] | None,
        writable: bool,
        make: Callable[..., EngineMemory] | None = None,
    ) -> EngineMemory:
        """Maps segments (info, fd) and the fence table (fd, slots); blocks, so call it on a thread.
        Kinds of memory that travel as a handle have the descriptor -1.

        All descriptors are taken over and are closed when this raises. `writable` is for our own
        engine's segments; a fence table is always read-only. `make` is the class, where it is
        not this one. Raises MemoryRefused.
        """
        fds = [fd for _, fd in segments] + ([] if fence is None else [fence[0]])
        memory: EngineMemory | None = None
        why = MemoryRefused("not opened")
        try:
            memory = (make or cls)(
                segments=segments,
                layers=layers,
                num_blocks=num_blocks,
                fence=fence,
                writable=writable,
            )
        except MemoryRefused as exc:
            # A new exception, raised outside of this block: the old one keeps frames alive, and
            # with them what was mapped before it.
            why = MemoryRefused(exc.detail, exc.code)
        finally:
            if memory is None:
                _close_fds(fds)
        if memory is None:
            raise why
        if writable:
            memory._fds = [fd for fd in fds if fd >= 0]
        else:
            _close_fds(fds)
        return memory

    def block_nbytes(self, group: int, first_layer: int = 0, num_layers: int | None = None) -> int:
        """Bytes of one block of `group` in layers `[first_layer, first_layer + num_layers)`."""
        if num_layers is None:
            num_layers = self.num_layers - first_layer
        known = self._block_nbytes.get((group, first_layer, num_layers))
        if known is not None:
            return known
        self.check_range(group, first_layer, num_layers)
        table = self.tables[group]
        nbytes = int(table.nbytes[table.rows(first_layer, num_layers)].sum())
        if len(self._block_nbytes) < 4096:
            self._block_nbytes[group, first_layer, num_layers] = nbytes
        return nbytes

    def check_range(self, group: int, first_layer: int, num_layers: int) -> None:
        """Raises MemoryRefused unless the group and the layers exist."""
        if not 0 <= group < self.num_groups:
            raise MemoryRefused(f"group {group}: there are {self.num_groups}")
        if first_layer < 0 or num_layers < 0 or first_layer + num_layers > self.num_layers:
            raise MemoryRefused(
                f"layers [{first_layer}, {first_layer + num_layers}): there are {self.num_layers}"
            )

    def fence_word(self, slot: int) -> int:
        """The fence table's word in `slot` now; raises MemoryRefused without one or outside it."""
        fence = self._fence
        if fence is None:
            gone = "is closed" if self._closing else "was never passed"
            raise MemoryRefused(f"fence slot {slot}: the engine's fence table {gone}")
        if not 0 <= slot < fence.slots:
            # Raised here and not by the reader: an exception keeps the frames that it passed
            # through, and a frame of the reader would keep the table mapped.
            slots, fence = fence.slots, None
            raise MemoryRefused(f"fence slot {slot}: the table has {slots}")
        return fence.word(slot)

    def view(self, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Bytes:
        """uint8 view at `offset` of the reservation. Only while pinned, and dropped before unpin:
        the memory stays mapped for as long as a view of it lives."""
        root = self._root
        if root is None:
            raise MemoryRefused("the engine's memory is closed")
        return np.ndarray(shape, np.uint8, buffer=root, offset=offset, strides=strides)

    def stager(self) -> Stager | None:
        """What a thread needs to move this memory over a socket; None if nothing. The caller
        closes it, on the same thread."""
        return None

    def share(self) -> list[int]:
        """New descriptors for a peer on this host: one per segment that has one, in order, the
        fence table last.

        They are open for reading only, and the files' modes are set so that nobody but root can
        open them for writing again. The caller closes them. Raises MemoryRefused.
        """
        if not self.writable:
            raise MemoryRefused("memory of a peer's engine is not passed on")
        shared: list[int] = []
        with self._lock:
            if self._closing:
                raise MemoryRefused("the engine's memory is being closed")
            try:
                for fd in self._fds:
                    shared.append(self._read_only(fd))  # noqa: PERF401 - those made are closed
            except OSError as exc:
                _close_fds(shared)
                raise MemoryRefused(f"cannot share memory: {exc}") from None
        return shared

    def _read_only(self, fd: int) -> int:
        os.fchmod(fd, 0o400)
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)

    def pin(self) -> None:
        """Keeps the memory mapped until `unpin`; raises MemoryRefused once it is to be closed."""
        with self._lock:
            if self._closing:
                raise MemoryRefused("the engine's memory is being closed")
            self._pins += 1

    def unpin(self) -> None:
        with self._lock:
            if self._pins <= 0:
                raise RuntimeError("unpin without pin")
            self._pins -= 1
            last = self._closing and self._pins == 0
        if last:
            self._start_unmap()

    @contextlib.contextmanager
    def pinned(self) -> Iterator[None]:
        self.pin()
        try:
            yield
        finally:
            self.unpin()

    @property
    def closing(self) -> bool:
        """Set once the memory is to be closed: whoever holds a pin should let go soon."""
        return self._closing

    @property
    def closed(self) -> bool:
        """True when nothing of it is mapped any more."""
        return self._gone.event.is_set()

    def close_when_unpinned(self) -> None:
        """Asks for the memory to be unmapped as soon as no pin is held; returns at once."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            now = self._pins == 0
        if now:
            self._start_unmap()

    def wait_closed_blocking(self, timeout_s: float) -> bool:
        """Waits on a thread until everything is unmapped; False when that took too long."""
        return self._gone.event.wait(timeout_s)

    async def wait_closed(self, timeout_s: float) -> bool:
        """Waits on the loop until everything is unmapped; False when that took too long."""
        if self.closed:
            return True
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def told() -> None:
            with contextlib.suppress(RuntimeError):  # the loop may be gone by then
                loop.call_soon_threadsafe(done.set)

        self._gone.tell(told)
        try:
            async with asyncio.timeout(timeout_s):
                await done.wait()
        except TimeoutError:
            return False
        finally:
            self._gone.forget(told)
        return True

    def _start_unmap(self) -> None:
        # Giving back many GiB takes a while, and the caller may be the event loop.
        threading.Thread(target=self._unmap, name="kvd-unmap", daemon=True).start()

    def _unmap(self) -> None:
        with self._lock:
            fds, self._fds = self._fds, []
            fence, self._fence = self._fence, None
        _close_fds(fds)
        del fence
        self._unmap_segments()


class _Gone:
    """Told by each mapping when it is unmapped. Does not refer to the EngineMemory, so that one
    which is dropped without being closed is unmapped too."""

    def __init__(self, mappings: int) -> None:
        # Re-entrant: a garbage collection inside the lock may drop the last view.
        self._lock = threading.RLock()
        self._left = mappings
        self._callbacks: list[Callable[[], None]] = []
        self.event = threading.Event()

    def one(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left > 0:
                return
            self.event.set()
            callbacks = list(self._callbacks)
        for callback in callbacks:
            callback()

    def tell(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if not self.event.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def forget(self, callback: Callable[[], None]) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._callbacks.remove(callback)


def _sizes(segments: Sequence[tuple[SegmentInfo, int]]) -> dict[int, int]:
    if not 1 <= len(segments) <= MAX_SEGMENTS:
        raise MemoryRefused(f"{len(segments)} segments: must be between 1 and {MAX_SEGMENTS}")
    sizes: dict[int, int] = {}
    for info, _ in segments:
        if info.segment in sizes:
            raise MemoryRefused(f"segment {info.segment} is described twice")
        sizes[info.segment] = info.nbytes
    return sizes


def _close_fds(fds: Sequence[int]) -> None:
    for fd in (fd for fd in fds if fd >= 0):
        with contextlib.suppress(OSError):
            os.close(fd)
