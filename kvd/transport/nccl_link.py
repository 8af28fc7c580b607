"""The consumer's end of one communicator: staging buffers, requests in order, and its failure."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import structlog

from kvd.core.instructions import Piece
from kvd.errors import KvdError
from kvd.protocol import peer as wire
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr
from kvd.transport.base import TransportError
from kvd.transport.nccl_comm import CONSUMER, Comm
from kvd.transport.options import TransportOptions
from kvd.transport.tcp_wire import code_of

log = structlog.get_logger("kvd.nccl")

LOOK_S = 0.2
"""How often NCCL is asked whether it has failed, while something is waited for."""


class Link:
    """`open` once, then `want`, `receive` and `release` for each chunk; `fail` or `close` ends it.

    `send` passes a message to the producer's daemon. `slots` are the staging buffers that are
    free; who takes one gives it back with `release`.
    """

    def __init__(
        self,
        comm_id: str,
        addr: PeerAddr,
        comm: Comm,
        options: TransportOptions,
        send: Callable[[wire.NcclToProducer], None],
    ) -> None:
        self.comm_id = comm_id
        self.addr = addr
        self.comm = comm
        self.failure: TransportError | None = None
        self.up = False
        self.users = 0
        self.used_at = time.monotonic()
        self.chunk_nbytes = 0
        self.direct_nbytes = options.nccl_direct_bytes
        self.late_bytes = 0
        self.slots: asyncio.Queue[int] = asyncio.Queue()
        self._options = options
        self._send = send
        self._seq = itertools.count(1)
        self._opened: asyncio.Future[wire.NcclOpened] = asyncio.get_running_loop().create_future()
        self._ready: dict[int, asyncio.Future[bool]] = {}
        """Chunks that were asked for; the result: whether they are judged only when sent."""
        self._verdicts: dict[int, asyncio.Future[None]] = {}
        self._failed = asyncio.Event()
        self._closing: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether anything uses it now."""
        return self.users > 0 or bool(self._ready)

    async def open(self, unique_id: bytes) -> None:
        """Joins together with the producer's daemon. Raises TransportError; it has failed then."""
        options = self._options
        self._send(
            wire.NcclOpen(
                self.comm_id,
                unique_id,
                options.nccl_chunk_bytes,
                options.nccl_ring,
                late=options.nccl_direct_bytes > 0,
            )
        )
        try:
            async with asyncio.timeout(options.nccl_init_timeout_s):
                answer = await self._opened
            if answer.code != Code.OK:
                raise TransportError(code_of(answer.code), f"nccl: {answer.detail[:500]}")
            if not 0 < answer.chunk_nbytes <= options.nccl_chunk_bytes or not (
                0 < answer.ring <= options.nccl_ring
            ):
                raise TransportError(Code.BAD_MESSAGE, "nccl: buffers that were not asked for")
            self.chunk_nbytes = answer.chunk_nbytes
            starting = asyncio.ensure_future(
                self.comm.start(CONSUMER, unique_id, answer.chunk_nbytes, answer.ring)
            )
            starting.add_done_callback(lambda done: done.exception())  # told below, if wanted
            failed = asyncio.ensure_future(self._failed.wait())
            await asyncio.wait({starting, failed}, return_when=asyncio.FIRST_COMPLETED)
            failed.cancel()
            self._check()  # the other side may know better why it does not come about
            starting.result()
        except TimeoutError:
            error = TransportError(Code.DEADLINE, f"{self.addr} did not join a communicator")
            self.fail(error)
            raise error from None
        except TransportError as exc:
            self.fail(exc)
            raise
        self._check()
        for slot in self.comm.slots:
            self.slots.put_nowait(slot)
        self.up = True

    # --- messages of the producer's daemon ------------------------------------------------------

    def hear(self, message: wire.NcclToConsumer) -> None:
        match message:
            case wire.NcclOpened():
                if not self._opened.done():
                    self._opened.set_result(message)
            case wire.NcclReady():
                error = None
                if message.code != Code.OK:
                    error = TransportError(code_of(message.code), message.detail[:500])
                ready, verdict = self._ready.get(message.seq), self._verdicts.get(message.seq)
                if ready is not None:
                    _settle(ready, message.late, error)
                elif verdict is not None and not message.late:
                    _settle(verdict, None, error)
            case wire.NcclClosed():
                self.fail(
                    TransportError(
                        code_of(message.code), f"{self.addr} ended it: {message.detail[:500]}"
                    )
                )

    # --- one chunk ------------------------------------------------------------------------------

    def want(
        self, ticket: bytes, piece: Piece, layers: tuple[int, int], indices: bytes, nbytes: int
    ) -> int:
        """Asks for a chunk; its number. `ready(number)` is done when it may be received."""
        self._check()
        seq = next(self._seq)
        self._ready[seq] = asyncio.get_running_loop().create_future()
        self._send(wire.NcclWant(self.comm_id, seq, ticket, piece.group, *layers, indices, nbytes))
        return seq

    def ready(self, seq: int) -> asyncio.Future[bool]:
        return self._ready[seq]

    def receive(
        self, seq: int, slot: int, nbytes: int
    ) -> tuple[asyncio.Future[None], asyncio.Future[None]]:
        """Posts the receive for a chunk that is ready; only then may the other side send.

        The second future is the producer's verdict: done when the bytes are known to be valid. Who
        wants it no longer cancels it.
        """
        self._check()
        verdict: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._ready.pop(seq).result():
            self._verdicts[seq] = verdict
            verdict.add_done_callback(lambda _: self._verdicts.pop(seq, None))
        else:
            verdict.set_result(None)  # it was told together with being ready
        received = self.comm.recv(
            slot, nbytes, lambda: self._send(wire.NcclGo(self.comm_id, seq, True))
        )
        return received, verdict

    def release(self, slot: int) -> None:
        """The staging buffer is free again."""
        self.used_at = time.monotonic()
        if self.failure is None:
            self.slots.put_nowait(slot)

    def give_up(self, seq: int, slot: int) -> None:
        """Nobody wants the chunk; its buffer is free once the other side has heard of it."""
        ready = self._ready.get(seq)
        if ready is None:
            self.release(slot)
            return

        def heard(ready: asyncio.Future[bool]) -> None:
            self._ready.pop(seq, None)
            if not ready.cancelled() and ready.exception() is None and self.failure is None:
                self._send(wire.NcclGo(self.comm_id, seq, False))
            self.release(slot)

        ready.add_done_callback(heard)

    def receive_in_vain(self, received: asyncio.Future[None], slot: int, nbytes: int) -> None:
        """What is under way still arrives, in staging only; its buffer is free after that."""

        def arrived(received: asyncio.Future[None]) -> None:
            if received.exception() is None:
                self.late_bytes += nbytes
                self.release(slot)

        received.add_done_callback(arrived)

    async def wait(self, what: str, work: asyncio.Future[Any], stopped: asyncio.Event) -> bool:
        """Waits for a step of a chunk; False if `stopped` came first.

        Raises TransportError: the step's own, or that of the link, which has then failed. A step
        without end for data_timeout_s fails the link.
        """
        began, limit = time.monotonic(), self._options.data_timeout_s
        watch: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(one.wait()) for one in (stopped, self._failed)
        ]
        try:
            while not work.done():
                # A chunk that ends is progress for all that queue behind it.
                left = max(began, self.used_at) + limit - time.monotonic()
                if left <= 0:
                    self.fail(
                        TransportError(Code.DEADLINE, f"nccl: {what} took more than {limit:g} s")
                    )
                self._check()
                if stopped.is_set():
                    return False
                await asyncio.wait(
                    {work, *watch},
                    timeout=min(left, LOOK_S),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not work.done() and not stopped.is_set() and self.failure is None:
                    error = await self.comm.healthy()
                    if error is not None:
                        self.fail(error)
        finally:
            for one in watch:
                one.cancel()
        try:
            work.result()
        except TransportError:
            raise
        except KvdError as exc:
            # NCCL or the GPU failed: what is behind it on the stream cannot be trusted.
            error = TransportError(exc.code, f"nccl: {what}: {exc.detail}")
            self.fail(error)
            raise error from None
        # Of a communicator that is being ended, operations end that were never done.
        self._check()
        return True

    # --- the end --------------------------------------------------------------------------------

    def fail(self, error: TransportError) -> None:
        """Everything that waits fails, the other side is told, and the communicator is ended."""
        if self.failure is not None:
            return
        self.failure = error
        self.up = False
        self._failed.set()
        self._send(wire.NcclClose(self.comm_id))
        waiting: list[asyncio.Future[Any]] = [
            *self._ready.values(),
            *self._verdicts.values(),
            self._opened,
        ]
        for future in waiting:
            _settle(future, None, TransportError(error.code, error.detail))
        self._ready.clear()
        if error.code is not Code.CANCELLED:
            log.warning(
                "nccl_failed", peer=str(self.addr), code=str(error.code), detail=error.detail
            )
        self._closing = asyncio.ensure_future(self.comm.end())

    async def close(self) -> None:
        """Ends it in order; returns when the communicator is gone, or was given up."""
        self.fail(TransportError(Code.CANCELLED, "the communicator was closed"))
        assert self._closing is not None
        await asyncio.shield(self._closing)

    def _check(self) -> None:
        if self.failure is not None:
            raise TransportError(self.failure.code, self.failure.detail)


def _settle(future: asyncio.Future[Any], result: Any, error: TransportError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
        future.exception()  # nobody may be waiting any more
