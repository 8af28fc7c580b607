"""One communicator of two ranks: its thread, streams and staging buffers, and how it is ended.

Everything that may hang runs on the thread, and is waited for with a deadline. NCCL only ever
touches the staging buffers, so nothing that NCCL does late can reach an engine's blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import structlog

from kvd.errors import KvdError
from kvd.memory.cuda.device import Gpu
from kvd.memory.cuda.driver import CudaError
from kvd.memory.cuda.plan import Copies, enqueue
from kvd.protocol.codes import Code
from kvd.transport.base import TransportError
from kvd.transport.gpu_thread import GpuThread
from kvd.transport.nccl_lib import CommSettings, Nccl, NcclError
from kvd.transport.options import TransportOptions

log = structlog.get_logger("kvd.nccl")

POLL_S = 50e-6
CONSUMER, PRODUCER = 0, 1
"""Ranks: the consumer's daemon makes the unique id."""


class Comm:
    """`start`, then operations, then `end`, always. Methods are called on the loop."""

    def __init__(
        self,
        gpu: Gpu,
        lib: Nccl,
        options: TransportOptions,
        name: str,
        *,
        copier: GpuThread,
        on_lost: Callable[[str], None],
        on_abandoned: Callable[[], None],
    ) -> None:
        """`copier`: the thread for copies between blocks and staging, on which no call of NCCL can
        hang. `on_lost(why)`: only a new process helps. `on_abandoned()`: a thread that hangs in a
        call had to be left behind, with its staging buffers."""
        self.name = name
        self.slots: list[int] = []
        """Addresses of the staging buffers."""
        self._gpu = gpu
        self._lib = lib
        self._options = options
        self._on_lost = on_lost
        self._on_abandoned = on_abandoned
        self._thread = GpuThread(gpu, f"kvd-nccl-{name}"[:15], self._broken)
        self._comm: Any = None
        self._copier = copier
        self._copying: set[asyncio.Future[None]] = set()
        self._copies: dict[int, Any] = {}
        """A stream for each staging buffer, so that a copy that is slow holds up no other."""
        self._transfers: Any = None
        self._peer = CONSUMER
        self._chunk_nbytes = 0
        self._ending: asyncio.Task[None] | None = None
        self._orphan = False

    @property
    def ended(self) -> bool:
        return self._ending is not None and self._ending.done()

    @property
    def staging_bytes(self) -> int:
        """GPU memory of its staging buffers."""
        return len(self.slots) * self._chunk_nbytes

    @property
    def stuck_for(self) -> float:
        """Seconds that its thread has been in one call, or its oldest work on a stream."""
        return max(self._thread.call_for, self._thread.work_for)

    # --- beginning -----------------------------------------------------------------------------

    async def start(self, rank: int, unique_id: bytes, chunk_nbytes: int, ring: int) -> None:
        """Joins. Raises TransportError, within nccl_init_timeout_s; `end` follows all the same."""
        limit = self._options.nccl_init_timeout_s
        deadline = time.monotonic() + limit
        self._chunk_nbytes = chunk_nbytes
        self._peer = PRODUCER if rank == CONSUMER else CONSUMER
        settings = CommSettings(self._options.nccl_max_ctas, self._options.nccl_channels)

        def begin() -> None:
            driver = self._gpu.driver
            self._transfers = driver.stream_create()
            for _ in range(ring):
                self.slots.append(driver.alloc(chunk_nbytes))
                self._copies[self.slots[-1]] = driver.stream_create()
            comm = self._lib.init(rank, unique_id, settings)
            if self._orphan:  # nobody waited so long
                self._lib.abort(comm)
                return
            self._comm = comm
            self._settle(comm, deadline)

        begun = self._thread.call(begin)
        await asyncio.wait({begun}, timeout=limit)
        if not begun.done():
            raise TransportError(Code.DEADLINE, f"no communicator within {limit:g} s")
        try:
            begun.result()
        except KvdError as exc:
            raise TransportError(exc.code, exc.detail) from None

    def _settle(self, comm: Any, deadline: float) -> None:
        """On the thread: until NCCL has done what it was asked."""
        while self._lib.busy(comm):
            if time.monotonic() > deadline:
                raise NcclError("the call did not end in time", Code.DEADLINE)
            time.sleep(POLL_S)

    # --- operations ----------------------------------------------------------------------------

    def copy(self, copies: Copies, slot: int) -> asyncio.Future[None]:
        """Between blocks and a staging buffer; done when the GPU has done it."""
        driver, stream = self._gpu.driver, self._copies[slot]
        copying = self._copier.launch(stream, lambda: enqueue(driver, copies, stream))
        self._copying.add(copying)
        copying.add_done_callback(self._copying.discard)
        return copying

    def send(self, address: int, nbytes: int) -> asyncio.Future[None]:
        """Done when the bytes are gone. Sends are made in the order of the calls."""
        return self._post(self._lib.send, address, nbytes, lambda: None)

    def recv(self, address: int, nbytes: int, posted: Callable[[], None]) -> asyncio.Future[None]:
        """Done when the bytes are there. `posted` is called, on the loop, once NCCL has taken the
        request; receives are made in the order of the calls, and told of in that order.

        What NCCL gives up passes on the stream as if it had been done. So the stream's word counts
        only if NCCL, asked after it, knows of nothing wrong and was not told to end.
        """
        comm = self._comm
        there: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def confirm() -> None:
            if self._ending is not None:
                raise NcclError("the communicator was ended meanwhile")
            self._lib.busy(comm)

        def settle(last: asyncio.Future[None]) -> None:
            error = last.exception()
            if error is None:
                there.set_result(None)
            else:
                there.set_exception(error)
                there.exception()  # nobody may be waiting any more

        def passed(received: asyncio.Future[None]) -> None:
            if received.exception() is None:
                self._thread.call(confirm).add_done_callback(settle)
            else:
                settle(received)

        self._post(self._lib.recv, address, nbytes, posted).add_done_callback(passed)
        return there

    def _post(
        self,
        operation: Callable[[int, int, Any, int, Any], None],
        address: int,
        nbytes: int,
        posted: Callable[[], None],
    ) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        comm, stream, peer = self._comm, self._transfers, self._peer

        def post() -> None:
            operation(address, nbytes, comm, peer, stream)
            # Nothing may be put on the stream while NCCL is still about to use it.
            self._settle(comm, time.monotonic() + self._options.data_timeout_s)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(posted)

        return self._thread.launch(stream, post)

    async def healthy(self) -> TransportError | None:
        """What NCCL knows to have failed, if its thread can be asked."""
        comm = self._comm
        if comm is None or self._thread.call_for:
            return None
        asked = self._thread.call(lambda: self._lib.busy(comm))
        await asyncio.wait({asked}, timeout=self._options.data_timeout_s)
        try:
            if asked.done():
                asked.result()
        except KvdError as exc:
            return TransportError(exc.code, exc.detail)
        return None

    # --- the end -------------------------------------------------------------------------------

    async def end(self) -> None:
        """Frees everything, by the mildest means that works. The same for all who ask."""
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._end())
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        limit = self._options.nccl_abort_timeout_s
        # Of a call that hangs while it makes the communicator there is nothing to end yet.
        self._orphan = self._comm is None
        if self._comm is not None and not await self._end_comm(limit):
            self._on_lost(f"NCCL communicator {self.name} can neither be ended nor aborted")
            return
        if self._copying:
            # They end by themselves; should they not, the GPU hangs, which is noticed elsewhere.
            await asyncio.wait(set(self._copying), timeout=self._options.gpu_hang_s)
        if self._copying:
            log.error("nccl_staging_in_use", comm=self.name)
            return
        freed = await self._step("free", limit, self._free)
        # One that hangs still ends, and frees what it has, should its call ever return.
        ended = await asyncio.to_thread(self._thread.close, limit if freed else 0.0)
        if not ended:
            log.error("nccl_thread_left_behind", comm=self.name, call_s=self._thread.call_for)
            self._on_abandoned()

    async def _end_comm(self, limit: float) -> bool:
        comm, self._comm = self._comm, None

        def revoke() -> None:
            self._lib.revoke(comm)
            self._settle(comm, time.monotonic() + limit)

        if await self._step("revoke", limit, revoke):
            # One that hangs is not aborted: NCCL lets one thread at a time use a communicator, and
            # both calls free it. Memory freed twice would be worse than a new process.
            return await self._step("destroy", limit, lambda: self._lib.destroy(comm))
        return await self._aborted(comm, limit)

    async def _aborted(self, comm: Any, limit: float) -> bool:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()
        failure: list[KvdError] = []

        def abort() -> None:
            try:
                self._gpu.bind()
                self._lib.abort(comm)
            except (NcclError, CudaError) as exc:
                failure.append(exc)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(done.set)

        log.warning("nccl_abort", comm=self.name)
        threading.Thread(target=abort, name="kvd-nccl-abort", daemon=True).start()
        try:
            async with asyncio.timeout(limit):
                await done.wait()
        except TimeoutError:
            return False
        return not failure

    async def _step(self, what: str, limit: float, step: Callable[[], None]) -> bool:
        """Whether the thread took the step within its time."""
        taken = self._thread.call(step)
        await asyncio.wait({taken}, timeout=limit)
        if not taken.done():
            log.warning("nccl_end_step_hangs", comm=self.name, step=what, seconds=limit)
            return False
        error = taken.exception()
        if error is not None:
            log.warning("nccl_end_step_failed", comm=self.name, step=what, detail=str(error))
        return error is None

    def _free(self) -> None:
        driver = self._gpu.driver
        if self._comm is not None:  # made just when nobody waited for it any more
            self._lib.abort(self._comm)
            self._comm = None
        while self.slots:
            slot = self.slots.pop()
            driver.free(slot)
            stream = self._copies.pop(slot, None)
            if stream is not None:
                driver.stream_destroy(stream)
        if self._transfers is not None:
            driver.stream_destroy(self._transfers)
            self._transfers = None

    def _broken(self, error: CudaError) -> None:
        self._on_lost(f"{self._gpu.uuid}: {error.detail}")
