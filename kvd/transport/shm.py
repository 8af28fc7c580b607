"""Same host: copies straight from the producer's mapped segments into our own engine's blocks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

from kvd.errors import MemoryRefused
from kvd.memory.engine import EngineMemory
from kvd.memory.host import Bytes
from kvd.memory.plan import Call, UniformRun, calls, id_runs, uniform_runs
from kvd.protocol.codes import Code
from kvd.transport.base import PullJob, TransportError
from kvd.transport.checksum import blocks_crc
from kvd.transport.copy_pool import Batch, CopyPool
from kvd.transport.jobs import CheckedPiece, Outcome, check_job, check_mapped

CALL_BYTES = 4 * 2**20
"""Most bytes of one numpy call: how long a stop, or the engine's death, may have to wait."""

MIN_BATCH_BYTES = 2 * 2**20
MAX_BATCH_BYTES = 16 * 2**20
"""Bytes that a thread takes at a time: half of its share of what is left, within these, so that
all threads come to the end of a job together."""

_owners = itertools.count(1)


class ShmPuller:
    """One attachment over shared memory. `remote` is mapped read-only and has a fence table."""

    def __init__(
        self, local: EngineMemory, remote: EngineMemory, pool: CopyPool, *, checked: bool = False
    ) -> None:
        """`checked` compares checksums of source and destination after each job's copies.

        Raises TransportError if the memories do not fit, or the remote one has no fence.
        """
        check_mapped("shm", local, remote)
        self.owner = next(_owners)
        self.local = local
        self.remote = remote
        self.num_threads = pool.num_threads
        self.checked = checked
        self._pool = pool
        self._closed = False
        self._jobs: dict[int, _Job] = {}
        self._runs: dict[tuple[int, int, int], tuple[UniformRun, ...]] = {}

    async def pull(self, job: PullJob) -> int:
        """See `Puller.pull`."""
        if self._closed:
            raise TransportError(Code.CANCELLED, "the attachment is closed")
        if job.job in self._jobs:
            raise TransportError(Code.DUPLICATE, f"job {job.job} is running")
        pieces = check_job(job, self.local, self.remote.num_blocks)
        work = _Job(self, job, pieces)
        self._jobs[job.job] = work
        try:
            self._pool.submit(work)
        except RuntimeError:
            del self._jobs[job.job]
            work.abandon()
            raise TransportError(Code.CANCELLED, "the daemon is stopping") from None
        try:
            return await work.outcome.wait()
        finally:
            del self._jobs[job.job]

    def stop(self, fetch_id: str) -> None:
        """See `Puller.stop`."""
        for work in list(self._jobs.values()):
            if work.job.fetch_id == fetch_id:
                self._stop(work)

    async def aclose(self) -> None:
        """See `Puller.aclose`."""
        self._closed = True
        works = list(self._jobs.values())
        for work in works:
            self._stop(work)
        await asyncio.gather(*(work.outcome.wait() for work in works), return_exceptions=True)

    def _stop(self, work: _Job) -> None:
        work.stopped = True
        self._pool.drop(work)

    def runs(self, piece: CheckedPiece) -> tuple[UniformRun, ...]:
        """The uniform runs of a piece's layers; kept, because a fetch asks for few ranges."""
        p = piece.piece
        key = (p.group, p.first_layer, p.num_layers)
        runs = self._runs.get(key)
        if runs is None:
            if len(self._runs) >= 4096:
                self._runs.clear()
            runs = self._runs[key] = uniform_runs(self.remote, self.local, *key)
        return runs


class _Job:
    """A job being copied by the pool. Holds a pin on both memories until it has finished."""

    def __init__(self, puller: ShmPuller, job: PullJob, pieces: list[CheckedPiece]) -> None:
        self.owner = puller.owner
        self.job = job
        self.outcome = Outcome()
        self.stopped = False
        self._local = puller.local
        self._remote = puller.remote
        self._failure: TransportError | None = None
        self._checked = pieces if puller.checked else []
        self._pieces = [(puller.runs(piece), id_runs(piece.src, piece.dst)) for piece in pieces]
        self._left = job.nbytes
        self._shares = 2 * puller.num_threads
        self._begun = False
        self._views: list[list[tuple[Bytes, Bytes]]] = []
        self._calls: Iterator[tuple[int, Call]] = iter(())
        try:
            self._local.pin()
        except MemoryRefused:
            raise TransportError(Code.ENGINE_GONE, "our engine's memory is being closed") from None
        try:
            self._remote.pin()
        except MemoryRefused:
            self._local.unpin()
            raise TransportError(Code.PEER_LOST, "the peer's memory is being closed") from None

    def next_batch(self) -> Batch | None:
        try:
            if not self._begun:
                self._begun = True
                self._begin()
            if self._interrupted():
                return None
            batch: list[tuple[int, Call]] = []
            nbytes = 0
            size = min(max(self._left // self._shares, MIN_BATCH_BYTES), MAX_BATCH_BYTES)
            for piece, call in self._calls:
                batch.append((piece, call))
                nbytes += call.nbytes
                if nbytes >= size:
                    break
            self._left -= nbytes
        except Exception as exc:
            self._fail(exc)
            return None
        return (lambda: self._copy(batch)) if batch else None

    def finish(self) -> None:
        self._views = []
        result: int | TransportError
        wrong = self._compare()
        if self._failure is None and not self.stopped:
            self._check_fence("after")
        if self._failure is not None:
            result = self._failure
        elif self.stopped:
            result = TransportError(Code.CANCELLED, f"job {self.job.job} was stopped")
        elif wrong is not None:
            # Last: a source that its owner took back is no damage.
            result = wrong
        else:
            result = self.job.nbytes
        self.abandon()
        self.outcome.set(result)

    def abandon(self) -> None:
        """Lets go of both memories."""
        self._remote.unpin()
        self._local.unpin()

    def _begin(self) -> None:
        self._check_fence("before")
        if self._failure is not None:
            return
        self._views = [
            [run.views(self._remote, self._local) for run in runs] for runs, _ in self._pieces
        ]
        self._calls = (
            (index, call)
            for index, (runs, blocks) in enumerate(self._pieces)
            for call in calls(runs, blocks, CALL_BYTES)
        )

    def _copy(self, batch: list[tuple[int, Call]]) -> None:
        views = self._views
        try:
            for piece, (run, regions, a, b, _) in batch:
                if self._interrupted():
                    return
                src, dst = views[piece][run]
                dst[regions, b] = src[regions, a]
        except Exception as exc:
            self._fail(exc)

    def _compare(self) -> TransportError | None:
        """Reads source and destination again, and not by the plan that they were copied by."""
        try:
            for at, piece in enumerate(self._checked):
                if self._interrupted():
                    return None
                where = piece.piece.group, piece.piece.first_layer, piece.piece.num_layers
                crcs = [
                    blocks_crc(memory, *where, ids, lambda: not self._interrupted())
                    for memory, ids in ((self._remote, piece.src), (self._local, piece.dst))
                ]
                if None not in crcs and crcs[0] != crcs[1]:
                    return TransportError(
                        Code.INTEGRITY,
                        f"piece {at} of job {self.job.job}: checksum {crcs[1]:#010x} of what"
                        f" arrived, {crcs[0]:#010x} of its source",
                    )
        except Exception as exc:
            self._fail(exc)
        return None

    def _interrupted(self) -> bool:
        if self.stopped or self._failure is not None:
            return True
        if self._local.closing:
            self._failure = TransportError(Code.ENGINE_GONE, "our engine is gone")
        elif self._remote.closing:
            self._failure = TransportError(Code.PEER_LOST, "the peer's memory is being closed")
        return self._failure is not None

    def _check_fence(self, when: str) -> None:
        slot = self.job.fence_slot
        try:
            word = self._remote.fence_word(slot)
        except MemoryRefused as exc:
            self._failure = TransportError(Code.BAD_MESSAGE, exc.detail)
            return
        if word != self.job.fence_word:
            self._failure = TransportError(
                Code.FENCED,
                f"fence slot {slot} {when} the copy: {word:#x}, not {self.job.fence_word:#x}",
            )

    def _fail(self, exc: Exception) -> None:
        # A new exception: the traceback of `exc` would keep views, and so the memory, alive.
        if self._failure is None:
            self._failure = TransportError(Code.INTERNAL, f"copy failed: {exc!r}")
