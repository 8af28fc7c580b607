"""The producer's end of one communicator: gathers into staging, checks the fence, then sends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import structlog

from kvd.errors import KvdError, MemoryRefused
from kvd.memory.cuda.memory import DeviceMemory
from kvd.memory.cuda.plan import gather
from kvd.protocol import peer as wire
from kvd.protocol.codes import Code
from kvd.transport.base import TicketView, TransportError
from kvd.transport.nccl_comm import PRODUCER, Comm
from kvd.transport.options import TransportOptions
from kvd.transport.tcp_serving import Refusal, fault, resolve
from kvd.transport.tcp_wire import Request

log = structlog.get_logger("kvd.nccl")


class Serving:
    """`join` once; then what the consumer's daemon says. `on_ended` is called once, at the end."""

    def __init__(
        self,
        opened: wire.NcclOpen,
        comm: Comm,
        options: TransportOptions,
        *,
        ticket: Callable[[bytes], TicketView | None],
        send: Callable[[wire.NcclToConsumer], None],
    ) -> None:
        self.comm_id = opened.comm
        self.comm = comm
        self.failure: TransportError | None = None
        self._unique_id = opened.unique_id
        self._chunk_nbytes = min(opened.chunk_nbytes, options.nccl_chunk_bytes)
        self._ring = min(opened.ring, options.nccl_ring)
        self._options = options
        self._ticket = ticket
        self._send = send
        self._up = asyncio.Event()
        self._free: list[int] = []
        self._freed = asyncio.Event()
        self._wanted: set[int] = set()
        """Chunks that were asked for and not told to go: no more than the consumer has buffers."""
        self._going: set[int] = set()
        """Chunks whose send was posted, and not seen to have ended."""
        self._staged: dict[int, tuple[int, int]] = {}
        """Slot and bytes of chunks that are ready and were not asked to go."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        return bool(self._wanted or self._tasks)

    async def join(self) -> None:
        """Answers, then joins. A failure ends it."""
        if not self._chunk_nbytes or not self._ring:
            self.fail(TransportError(Code.BAD_MESSAGE, "a ring without buffers"))
            return
        self._send(wire.NcclOpened(self.comm_id, str(Code.OK), "", self._chunk_nbytes, self._ring))
        try:
            await self.comm.start(PRODUCER, self._unique_id, self._chunk_nbytes, self._ring)
        except TransportError as exc:
            self.fail(exc)
            return
        self._free = list(self.comm.slots)
        self._up.set()

    def hear(self, message: wire.NcclToProducer) -> None:
        if self.failure is not None:
            return
        match message:
            case wire.NcclWant():
                again = message.seq in self._wanted or message.seq in self._going
                if again or len(self._wanted) >= self._ring:
                    self.fail(TransportError(Code.BAD_MESSAGE, "more chunks than buffers"))
                    return
                self._wanted.add(message.seq)
                self._start(self._stage(message))
            case wire.NcclGo():
                staged = self._staged.pop(message.seq, None)
                if staged is None:
                    self.fail(TransportError(Code.BAD_MESSAGE, "a chunk that is not ready"))
                    return
                self._wanted.discard(message.seq)
                if message.send:
                    self._going.add(message.seq)
                    # Posted here and now: sends go in the order in which receives were posted.
                    self._start(self._sent(message.seq, staged[0], self.comm.send(*staged)))
                else:
                    self._done(message.seq, staged[0])
            case wire.NcclClose():
                self.fail(TransportError(Code.CANCELLED, "the other side closed it"))
            case _:
                pass

    def fail(self, error: TransportError) -> None:
        """Nothing more is served, the other side is told, and the communicator is ended."""
        if self.failure is not None:
            return
        self.failure = error
        self._freed.set()
        self._send(wire.NcclClosed(self.comm_id, str(error.code), error.detail[:500]))
        if error.code is not Code.CANCELLED:
            log.warning("nccl_failed", comm=self.comm_id, code=str(error.code), detail=error.detail)
        self._closing = asyncio.ensure_future(self._end())

    async def close(self) -> None:
        """Ends it; returns when the communicator is gone, or was given up."""
        self.fail(TransportError(Code.CANCELLED, "the communicator was closed"))
        assert self._closing is not None
        await asyncio.shield(self._closing)

    async def _end(self) -> None:
        # Gathering reads an engine's memory, and ends by itself; the buffers stay until then.
        gathering = [task for task in self._tasks if not task.done()]
        if gathering:
            await asyncio.wait(gathering, timeout=self._options.data_timeout_s)
        await self.comm.end()

    # --- one chunk ------------------------------------------------------------------------------

    async def _stage(self, want: wire.NcclWant) -> None:
        await self._up.wait()
        # The consumer may have all of a chunk before we see that its send has ended.
        while not self._free and self.failure is None:
            self._freed.clear()
            await self._freed.wait()
        if self.failure is not None:
            return
        slot = self._free.pop()
        try:
            await self._gather(want, slot)
        except Refusal as refusal:
            self._done(want.seq, slot)
            self._ready(want.seq, refusal.code, refusal.detail)
            return
        except KvdError as exc:
            self.fail(TransportError(exc.code, exc.detail))
            return
        if self.failure is None:
            self._staged[want.seq] = (slot, want.nbytes)
            self._ready(want.seq, Code.OK, "")

    async def _gather(self, want: wire.NcclWant, slot: int) -> None:
        view = self._ticket(want.ticket)
        if view is None:
            raise Refusal(Code.UNKNOWN_TRANSFER, "no such ticket, or it is closed")
        if not isinstance(view.memory, DeviceMemory):
            raise Refusal(Code.UNSUPPORTED, "the producer's memory is not on a GPU")
        if want.nbytes > self._chunk_nbytes or not want.indices or len(want.indices) % 4:
            raise Refusal(Code.BAD_MESSAGE, f"a chunk of {want.nbytes} bytes")
        request = Request(
            0,
            want.ticket,
            want.group,
            want.first_layer,
            want.num_layers,
            want.nbytes,
            np.frombuffer(want.indices, "<u4"),
        )
        try:
            view.memory.pin()
        except MemoryRefused:
            raise Refusal(Code.ENGINE_GONE, "the producer engine is gone") from None
        try:
            stretches = resolve(view, request)
            self._check(view, want)
            copying = self.comm.copy(gather(stretches, slot), slot)
            await asyncio.wait({copying})
            copying.result()
            # All bytes are in staging by now: this check is what makes them valid.
            self._check(view, want)
        finally:
            view.memory.unpin()

    def _check(self, view: TicketView, want: wire.NcclWant) -> None:
        wrong = fault(view, open_=self._ticket(want.ticket) is not None)
        if wrong is not None:
            raise wrong

    async def _sent(self, seq: int, slot: int, sending: asyncio.Future[None]) -> None:
        limit = self._options.data_timeout_s
        await asyncio.wait({sending}, timeout=limit)
        if not sending.done():
            self.fail(TransportError(Code.DEADLINE, f"nccl: sending took more than {limit:g} s"))
            return
        try:
            sending.result()
        except KvdError as exc:
            self.fail(TransportError(exc.code, f"nccl: sending: {exc.detail}"))
            return
        self._done(seq, slot)

    def _ready(self, seq: int, code: Code, detail: str) -> None:
        self._send(wire.NcclReady(self.comm_id, seq, str(code), detail[:500]))

    def _done(self, seq: int, slot: int) -> None:
        self._wanted.discard(seq)
        self._going.discard(seq)
        self._free.append(slot)
        self._freed.set()

    def _start(self, coroutine: object) -> None:
        task: asyncio.Task[None] = asyncio.ensure_future(coroutine)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
