"""The producer's end of one communicator: gathers into staging, checks the fence, then sends.

A chunk that lies in one piece in the engine's blocks is sent from there, and the fence is checked
when the send has ended; only then is the chunk told to be valid.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

import numpy as np
import structlog

from kvd.errors import KvdError, MemoryRefused
from kvd.memory.cuda.memory import DeviceMemory
from kvd.memory.cuda.plan import gather, one_run
from kvd.protocol import peer as wire
from kvd.protocol.codes import Code
from kvd.transport.base import TicketView, TransportError
from kvd.transport.nccl_comm import PRODUCER, Comm
from kvd.transport.options import TransportOptions
from kvd.transport.tcp_serving import Refusal, fault, resolve
from kvd.transport.tcp_wire import Request

log = structlog.get_logger("kvd.nccl")

CLOSING_S = 0.5
"""How long a send may go on reading from an engine's memory that is to be closed."""
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class _Run:
    """One piece of an engine's memory. The address holds while a pin can be had."""

    view: TicketView
    memory: DeviceMemory
    address: int


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One that is ready, in its staging buffer; or, with `run`, to be sent from there instead.
    A buffer is taken then too: so there are never more chunks than the ring has."""

    want: wire.NcclWant
    slot: int
    run: _Run | None


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
        on_read: Callable[[bytes], None],
    ) -> None:
        self.comm_id = opened.comm
        self.comm = comm
        self.failure: TransportError | None = None
        self._unique_id = opened.unique_id
        self._chunk_nbytes = min(opened.chunk_nbytes, options.nccl_chunk_bytes)
        self._ring = min(opened.ring, options.nccl_ring)
        self._direct_nbytes = options.nccl_direct_bytes if opened.late else 0
        self._options = options
        self._ticket = ticket
        self._send = send
        self._on_read = on_read
        self._up = asyncio.Event()
        self._free: list[int] = []
        self._freed = asyncio.Event()
        self._wanted: set[int] = set()
        """Chunks that were asked for and not told to go: no more than the consumer has buffers."""
        self._going: set[int] = set()
        """Chunks whose send was posted, and not seen to have ended."""
        self._staged: dict[int, _Chunk] = {}
        """Chunks that are ready and were not asked to go."""
        self._lent: dict[asyncio.Future[None], DeviceMemory] = {}
        """Sends that read from an engine's memory, which is pinned until they have ended."""
        self._gathering: set[asyncio.Task[None]] = set()
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
                staging = self._start(self._stage(message))
                self._gathering.add(staging)
                staging.add_done_callback(self._gathering.discard)
            case wire.NcclGo():
                chunk = self._staged.pop(message.seq, None)
                if chunk is None:
                    self.fail(TransportError(Code.BAD_MESSAGE, "a chunk that is not ready"))
                    return
                self._wanted.discard(message.seq)
                if message.send:
                    self._going.add(message.seq)
                    # Posted here and now: sends go in the order in which receives were posted.
                    self._start(self._sent(chunk, *self._post(chunk)))
                else:
                    self._done(message.seq, chunk.slot)
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
        if self._gathering:
            await asyncio.wait(set(self._gathering), timeout=self._options.data_timeout_s)
        await self.comm.end()
        if self._lent:
            self._start(self._hung(set(self._lent.values()), set(self._lent)))

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
            run = await self._gather(want, slot)
        except Refusal as refusal:
            self._done(want.seq, slot)
            self._ready(want.seq, refusal.code, refusal.detail)
            return
        except KvdError as exc:
            self.fail(TransportError(exc.code, exc.detail))
            return
        if self.failure is None:
            self._staged[want.seq] = _Chunk(want, slot, run)
            self._ready(want.seq, Code.OK, "", late=run is not None)

    async def _gather(self, want: wire.NcclWant, slot: int) -> _Run | None:
        """Fills the slot; or returns where the bytes lie in one piece, if long enough."""
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
        _pin(view.memory)
        try:
            stretches = resolve(view, request)
            self._check(view, want)
            address = one_run(stretches, self._direct_nbytes)
            if address is not None:
                # Not pinned until it goes, which is up to the other side.
                return _Run(view, view.memory, address)
            copying = self.comm.copy(gather(stretches, slot), slot)
            await asyncio.wait({copying})
            copying.result()
            # All bytes are in staging by now: this check is what makes them valid.
            self._check(view, want)
            return None
        finally:
            view.memory.unpin()

    def _check(self, view: TicketView, want: wire.NcclWant) -> None:
        wrong = fault(view, open_=self._ticket(want.ticket) is not None)
        if wrong is not None:
            raise wrong

    def _post(self, chunk: _Chunk) -> tuple[asyncio.Future[None], Refusal | None]:
        """The send, and why its bytes are not valid, if that is known before."""
        run, nbytes = chunk.run, chunk.want.nbytes
        if run is None:
            return self.comm.send(chunk.slot, nbytes), None
        try:
            self._check(run.view, chunk.want)
            _pin(run.memory)
        except Refusal as refusal:
            # The receive is posted, so that bytes must go; any will do.
            return self.comm.send(chunk.slot, nbytes), refusal
        sending = self.comm.send(run.address, nbytes)
        self._lent[sending] = run.memory
        sending.add_done_callback(lambda _: self._lent.pop(sending).unpin())
        return sending, None

    async def _sent(
        self, chunk: _Chunk, sending: asyncio.Future[None], wrong: Refusal | None
    ) -> None:
        try:
            await self._wait(sending)
            sending.result()
        except (KvdError, TransportError) as exc:
            self.fail(TransportError(exc.code, f"nccl: sending: {exc.detail}"))
            return
        seq = chunk.want.seq
        if chunk.run is not None and self.failure is None:
            try:
                if wrong is not None:
                    raise wrong
                # Nothing reads from the blocks any more: this check is what makes them valid.
                self._check(chunk.run.view, chunk.want)
                self._ready(seq, Code.OK, "")
            except Refusal as refusal:
                wrong = refusal
                self._ready(seq, refusal.code, refusal.detail)
        if wrong is None and self.failure is None:
            self._on_read(chunk.want.ticket)
        self._done(seq, chunk.slot)

    async def _wait(self, sending: asyncio.Future[None]) -> None:
        """Raises TransportError: the send takes too long, or may not read any longer."""
        limit = self._options.data_timeout_s
        late = TransportError(Code.DEADLINE, f"took more than {limit:g} s")
        deadline = time.monotonic() + limit
        memory = self._lent.get(sending)
        while not sending.done():
            now = time.monotonic()
            if memory is not None and memory.closing and now + CLOSING_S < deadline:
                deadline = now + CLOSING_S
                late = TransportError(Code.ENGINE_GONE, "the producer engine is gone")
            if now >= deadline:
                raise late
            tick = deadline - now if memory is None else min(deadline - now, LOOK_S)
            await asyncio.wait({sending}, timeout=tick)

    async def _hung(self, memories: set[DeviceMemory], sends: set[asyncio.Future[None]]) -> None:
        """The communicator is gone and sends still read: a GPU that hangs, which ends the daemon
        in the end, since the engine's memory cannot be given back."""
        gpu = memories.pop().gpu
        with gpu.waiting():
            await asyncio.wait(sends)

    def _ready(self, seq: int, code: Code, detail: str, *, late: bool = False) -> None:
        self._send(wire.NcclReady(self.comm_id, seq, str(code), detail[:500], late))

    def _done(self, seq: int, slot: int) -> None:
        self._wanted.discard(seq)
        self._going.discard(seq)
        self._free.append(slot)
        self._freed.set()

    def _start(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _pin(memory: DeviceMemory) -> None:
    """Raises Refusal."""
    try:
        memory.pin()
    except MemoryRefused:
        raise Refusal(Code.ENGINE_GONE, "the producer engine is gone") from None
