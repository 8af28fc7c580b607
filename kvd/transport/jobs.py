"""What every puller does alike: checking a job's pieces, and bringing its outcome to the loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from kvd.core.instructions import Piece
from kvd.errors import MemoryRefused
from kvd.memory.engine import EngineMemory
from kvd.memory.plan import Ids, check_same_layers, unpack_ids
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


def check_writable(local: EngineMemory) -> None:
    """Raises TransportError."""
    if not local.writable:
        raise TransportError(Code.BAD_MEMORY, "our own engine's memory is mapped read-only")


def check_layers(local: EngineMemory, remote: EngineMemory) -> None:
    """Raises TransportError if the memories do not fit."""
    try:
        check_same_layers(remote, local)
    except MemoryRefused as exc:
        raise TransportError(Code.BAD_MEMORY, exc.detail) from None


def check_mapped(transport: str, local: EngineMemory, remote: EngineMemory) -> None:
    """For transports that read the producer's memory themselves.

    Raises TransportError if the memories do not fit, or the remote one has no fence.
    """
    check_writable(local)
    if remote.fence_slots == 0:
        raise TransportError(
            Code.TRANSPORT_UNAVAILABLE,
            f"{transport} needs the producer's fence table, none was passed",
        )
    check_layers(local, remote)


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


@dataclass(slots=True)
class _Run:
    fetch_id: str
    task: asyncio.Task[int]
    stopped: asyncio.Event = field(default_factory=asyncio.Event)


class Running:
    """The jobs of one puller that run as coroutines: each is over before its caller goes on."""

    def __init__(self) -> None:
        self._runs: dict[int, _Run] = {}
        self._closed = False

    async def run(self, job: PullJob, pull: Callable[[], Coroutine[Any, Any, int]]) -> int:
        """The job's result. A caller that is cancelled still waits for its end."""
        if self._closed:
            raise TransportError(Code.CANCELLED, "the attachment is closed")
        if job.job in self._runs:
            raise TransportError(Code.DUPLICATE, f"job {job.job} is running")
        task = asyncio.ensure_future(pull())
        self._runs[job.job] = _Run(job.fetch_id, task)
        cancelled: asyncio.CancelledError | None = None
        try:
            while not task.done():
                try:
                    await asyncio.wait({task})
                except asyncio.CancelledError as exc:
                    cancelled = exc
        finally:
            del self._runs[job.job]
        if cancelled is not None:
            task.exception()  # it is nobody's any more
            raise cancelled
        return task.result()

    def stop(self, fetch_id: str) -> None:
        """Asks the fetch's jobs to end soon."""
        for run in self._runs.values():
            if run.fetch_id == fetch_id:
                run.stopped.set()

    def stop_event(self, job: PullJob) -> asyncio.Event:
        """Set once the job is to end soon."""
        return self._runs[job.job].stopped

    def stopped(self, job: PullJob) -> bool:
        return self._runs[job.job].stopped.is_set()

    async def aclose(self) -> None:
        """Stops all of them; returns when they are over."""
        self._closed = True
        for run in self._runs.values():
            run.stopped.set()
        while tasks := [run.task for run in self._runs.values()]:
            await asyncio.wait(tasks)
            await asyncio.sleep(0)
