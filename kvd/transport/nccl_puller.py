"""The consumer's end of `nccl`: chunks are received into staging, then scattered into blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from kvd.core.instructions import Piece
from kvd.errors import KvdError, MemoryRefused
from kvd.memory.cuda.memory import DeviceMemory
from kvd.memory.cuda.plan import cuts_for_runs, scatter
from kvd.memory.plan import Ids, addresses
from kvd.protocol.codes import Code
from kvd.transport.base import PullJob, TransportError
from kvd.transport.jobs import CheckedPiece, Running, check_job, check_writable
from kvd.transport.nccl_link import Link


@dataclass(frozen=True, slots=True)
class _Chunk:
    piece: Piece
    layers: tuple[int, int]
    indices: bytes
    dst: Ids
    nbytes: int


class NcclPuller:
    """One attachment. `get_link` gives the communicator with the producer's daemon, made anew
    when there is none; it raises TransportError."""

    def __init__(
        self,
        local: DeviceMemory,
        remote_blocks: int,
        get_link: Callable[[], Awaitable[Link]],
    ) -> None:
        """Raises TransportError."""
        check_writable(local)
        self.local = local
        self._remote_blocks = remote_blocks
        self._get_link = get_link
        self._running = Running()
        self._late_bytes = 0

    async def open(self) -> None:
        """Makes the communicator, so that a pair that cannot have one is known at once."""
        await self._get_link()

    async def pull(self, job: PullJob) -> int:
        """See `Puller.pull`. The fence is checked by the producer, after it has gathered or, where
        it sends from the engine's blocks, after it has sent."""
        return await self._running.run(job, lambda: self._pull(job))

    def stop(self, fetch_id: str) -> None:
        """See `Puller.stop`."""
        self._running.stop(fetch_id)

    async def aclose(self) -> None:
        """See `Puller.aclose`. The communicator stays, for other attachments."""
        await self._running.aclose()

    def statistics(self) -> dict[str, int]:
        """late_bytes: came after their fetch was stopped, into staging only."""
        return {"late_bytes": self._late_bytes}

    async def _pull(self, job: PullJob) -> int:
        pieces = check_job(job, self.local, self._remote_blocks)
        stopped = self._running.stop_event(job)
        try:
            self.local.pin()
        except MemoryRefused:
            raise TransportError(Code.ENGINE_GONE, "our engine's memory is being closed") from None
        try:
            if job.nbytes:
                link = await self._get_link()
                link.users += 1
                try:
                    await self._move(job, pieces, link, stopped)
                finally:
                    link.users -= 1
        finally:
            self.local.unpin()
        return job.nbytes

    async def _move(
        self, job: PullJob, pieces: list[CheckedPiece], link: Link, stopped: asyncio.Event
    ) -> None:
        """Returns, or raises, only when nothing writes into blocks any more."""
        tasks: set[asyncio.Task[None]] = set()
        failure: TransportError | None = None
        try:
            for chunk in self._chunks(pieces, link):
                slot = await self._slot(job, link, stopped)
                task = asyncio.ensure_future(self._chunk(job, chunk, link, slot, stopped))
                tasks.add(task)
                for done in [one for one in tasks if one.done()]:
                    tasks.discard(done)
                    done.result()
        except Exception as exc:
            failure = _typed(exc)
            stopped.set()  # what is not landing yet need not land
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for result in ended:
            if failure is None and isinstance(result, BaseException):
                failure = _typed(result)
        if failure is not None:
            raise failure

    def _chunks(self, pieces: list[CheckedPiece], link: Link) -> list[_Chunk]:
        found: list[_Chunk] = []
        for checked in pieces:
            piece = checked.piece
            try:
                cuts = cuts_for_runs(
                    self.local,
                    piece.group,
                    (piece.first_layer, piece.num_layers),
                    checked.src,
                    link.chunk_nbytes,
                    link.direct_nbytes,
                )
            except MemoryRefused as exc:
                raise TransportError(exc.code, exc.detail) from None
            for first, count, at_once in cuts:
                block = self.local.block_nbytes(piece.group, first, count)
                for at in range(0, int(checked.dst.size), at_once):
                    dst = checked.dst[at : at + at_once]
                    indices = checked.indices[at : at + at_once].astype("<u4").tobytes()
                    found.append(_Chunk(piece, (first, count), indices, dst, block * int(dst.size)))
        return found

    async def _slot(self, job: PullJob, link: Link, stopped: asyncio.Event) -> int:
        taken: asyncio.Future[Any] = asyncio.ensure_future(link.slots.get())
        try:
            if not await link.wait("a staging buffer", taken, stopped):
                raise TransportError(Code.CANCELLED, f"job {job.job} was stopped")
            if self.local.closing:
                raise TransportError(Code.ENGINE_GONE, "our engine is gone")
        except BaseException:
            if taken.done() and not taken.cancelled():
                link.release(taken.result())
            taken.cancel()
            raise
        slot: int = taken.result()
        return slot

    async def _chunk(
        self, job: PullJob, chunk: _Chunk, link: Link, slot: int, stopped: asyncio.Event
    ) -> None:
        cancelled = TransportError(Code.CANCELLED, f"job {job.job} was stopped")
        try:
            seq = link.want(job.ticket, chunk.piece, chunk.layers, chunk.indices, chunk.nbytes)
        except TransportError:
            link.release(slot)
            raise
        try:
            ready = await link.wait("gathering", link.ready(seq), stopped)
        except TransportError:
            link.give_up(seq, slot)
            raise
        gone = TransportError(Code.ENGINE_GONE, "our engine is gone")
        if not ready or self.local.closing:
            link.give_up(seq, slot)
            raise gone if ready else cancelled
        received, verdict = link.receive(seq, slot, chunk.nbytes)
        try:
            if not await link.wait("receiving", received, stopped):
                self._late_bytes += chunk.nbytes
                link.receive_in_vain(received, slot, chunk.nbytes)
                raise cancelled
            try:
                # Until then the bytes may be anything, and touch no block.
                if not await link.wait("the producer's verdict", verdict, stopped):
                    raise cancelled
                if self.local.closing:
                    raise gone
            except TransportError:
                link.release(slot)
                raise
        finally:
            verdict.cancel()
        await self._land(chunk, link, slot)

    async def _land(self, chunk: _Chunk, link: Link, slot: int) -> None:
        """From staging into blocks: from here on the job is not over before this is."""
        stretches = addresses(self.local, chunk.piece.group, *chunk.layers, chunk.dst)
        landing = link.comm.copy(scatter(stretches, slot), slot)
        await asyncio.wait({landing})
        link.release(slot)
        try:
            landing.result()
        except KvdError as exc:
            raise TransportError(exc.code, exc.detail) from None


def _typed(error: BaseException) -> TransportError:
    if isinstance(error, TransportError):
        return error
    if isinstance(error, KvdError):
        return TransportError(error.code, error.detail)
    return TransportError(Code.INTERNAL, repr(error))
