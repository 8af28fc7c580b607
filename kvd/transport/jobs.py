"""What every puller does alike: checking a job's pieces, and bringing its outcome to the loop."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from kvd.core.instructions import Piece
from kvd.errors import MemoryRefused
from kvd.memory.engine import EngineMemory
from kvd.memory.plan import Ids, unpack_ids
from kvd.protocol.codes import Code
from kvd.transport.base import PullJob, TransportError


@dataclass(frozen=True, slots=True)
class CheckedPiece:
    """A piece whose group, layers and ids were found to exist on both sides."""

    piece: Piece
    indices: Ids
    src: Ids
    dst: Ids
    block_nbytes: int


def check_job(job: PullJob, local: EngineMemory, remote_blocks: int) -> list[CheckedPiece]:
    """Unpacks and checks a job's pieces before anything is copied.

    Raises TransportError: BAD_MESSAGE for ids that the peer named and does not have, BAD_MEMORY
    for what does not exist here, INTERNAL where lists or byte counts contradict each other.
    """
    checked: list[CheckedPiece] = []
    total = 0
    for piece in job.pieces:
        if not len(piece.indices) == len(piece.src) == len(piece.dst):
            raise TransportError(
                Code.INTERNAL,
                f"job {job.job}: {len(piece.indices) // 4} indices, {len(piece.src) // 4} source"
                f" and {len(piece.dst) // 4} destination ids",
            )
        try:
            nbytes = local.block_nbytes(piece.group, piece.first_layer, piece.num_layers)
            dst = unpack_ids(piece.dst, local.num_blocks, f"job {job.job}: destination")
        except MemoryRefused as exc:
            raise TransportError(Code.BAD_MEMORY, exc.detail) from None
        try:
            src = unpack_ids(piece.src, remote_blocks, f"job {job.job}: the peer's blocks")
            indices = unpack_ids(piece.indices, 2**32 - 1, f"job {job.job}: block indices")
        except MemoryRefused as exc:
            raise TransportError(Code.BAD_MESSAGE, exc.detail) from None
        checked.append(CheckedPiece(piece, indices, src, dst, nbytes))
        total += nbytes * int(src.size)
    if total != job.nbytes:
        raise TransportError(
            Code.INTERNAL, f"job {job.job}: its pieces have {total} bytes, not {job.nbytes}"
        )
    return checked


class Outcome:
    """The one result of a job, set from any thread, awaited on the loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._result: int | TransportError | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def set(self, result: int | TransportError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._set, result)

    def _set(self, result: int | TransportError) -> None:
        if self._result is None:
            self._result = result
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters.clear()

    async def wait(self) -> int:
        """Waits even when cancelled: who returned from a pull relies on its copies having ended.

        The cancellation is passed on afterwards.
        """
        cancelled: asyncio.CancelledError | None = None
        while self._result is None:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError as exc:
                cancelled = exc
        if cancelled is not None:
            raise cancelled
        if isinstance(self._result, TransportError):
            raise self._result
        return self._result
