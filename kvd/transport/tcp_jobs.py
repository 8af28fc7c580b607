"""The consumer's jobs over `tcp`: cut into chunks, queued for the streams, each ended once."""

from __future__ import annotations

import enum
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from kvd.errors import MemoryRefused
from kvd.memory.engine import EngineMemory
from kvd.memory.plan import Ids
from kvd.protocol.codes import Code
from kvd.transport.base import PullJob, TransportError
from kvd.transport.jobs import CheckedPiece, Outcome
from kvd.transport.tcp_wire import MAX_COUNT, Request

MIN_CHUNK_BYTES = 4 * 2**20
MAX_CHUNK_BYTES = 16 * 2**20
"""Bytes of one request, within which a job is spread evenly over the streams. A request costs both
ends some work that does not depend on its size; what is under way is received in vain when its
fetch is stopped."""


class State(enum.Enum):
    """Where a chunk is. Only while it is LANDING may its bytes reach the engine's blocks."""

    QUEUED = enum.auto()
    ASKED = enum.auto()
    LANDING = enum.auto()
    LANDED = enum.auto()
    ENDED = enum.auto()


class Job:
    """A job that runs; it keeps the local engine's memory pinned. Guarded by the queue's lock."""

    def __init__(self, job: PullJob, local: EngineMemory) -> None:
        self.job = job
        self.outcome = Outcome()
        self.chunks: list[Chunk] = []
        self.left = 0
        self.failure: TransportError | None = None
        self._local = local
        try:
            local.pin()
        except MemoryRefused:
            raise TransportError(Code.ENGINE_GONE, "our engine's memory is being closed") from None

    @property
    def over(self) -> bool:
        """Nothing more of it is wanted."""
        return self.failure is not None

    def finish(self) -> None:
        self._local.unpin()
        self.outcome.set(self.job.nbytes if self.failure is None else self.failure)


class Chunk:
    """One request's worth of a job, and the destination ids of its blocks."""

    def __init__(self, job: Job, request: Request, dst: Ids) -> None:
        self.job = job
        self.request = request
        self.dst = dst
        self.state = State.QUEUED
        self.again = False


class Queue:
    """Chunks of all jobs of one puller, in order. Thread-safe."""

    def __init__(self, local: EngineMemory, num_streams: int, *, checked: bool = False) -> None:
        self.local = local
        self._checked = checked
        self._num_streams = num_streams
        self._cond = threading.Condition()
        self._queue: deque[Chunk] = deque()
        self._jobs: dict[int, Job] = {}
        self._numbers = itertools.count(1)
        self._closed = False
        self._progress = time.monotonic()
        self.late_bytes = 0

    @property
    def closed(self) -> bool:
        return self._closed

    # --- the puller's side ------------------------------------------------------------------

    def submit(self, job: PullJob, pieces: list[CheckedPiece]) -> Job:
        """Queues a job; raises TransportError."""
        running = Job(job, self.local)
        for piece in pieces:
            self._cut(running, piece)
        running.left = len(running.chunks)
        with self._cond:
            refused = self._closed or job.job in self._jobs
            if not refused and running.left:
                self._jobs[job.job] = running
                if len(self._jobs) == 1:
                    self._progress = time.monotonic()
                self._queue.extend(running.chunks)
                self._cond.notify_all()
        if refused:
            running.failure = (
                TransportError(Code.CANCELLED, "the attachment is closed")
                if self._closed
                else TransportError(Code.DUPLICATE, f"job {job.job} is running")
            )
        if refused or not running.left:
            running.finish()
        return running

    def stop(self, fetch_id: str) -> None:
        """Ends the fetch's jobs with CANCELLED as soon as none of their bytes can land."""
        self._fail_where(
            lambda job: job.job.fetch_id == fetch_id,
            TransportError(Code.CANCELLED, "the fetch was stopped"),
        )

    def fail_all(self, error: TransportError) -> None:
        """Ends all jobs likewise."""
        self._fail_where(lambda job: True, error)

    def close(self) -> list[Job]:
        """Stops everything, and lets the streams end; returns the jobs that were running."""
        with self._cond:
            self._closed = True
            jobs = list(self._jobs.values())
            self._cond.notify_all()
        self.fail_all(TransportError(Code.CANCELLED, "the attachment is closed"))
        return jobs

    # --- the streams' side ------------------------------------------------------------------

    def take(self, *, wait: bool) -> Chunk | None:
        """The next chunk to ask for; None if there is none, or (`wait`) once it is closed."""
        with self._cond:
            while wait and not self._queue and not self._closed:
                self._cond.wait()
            if not self._queue:
                return None
            chunk = self._queue.popleft()
            chunk.state = State.ASKED
            return chunk

    def wait_or_closed(self, timeout_s: float) -> None:
        """Pauses a stream whose connection was refused while others have theirs."""
        with self._cond:
            if not self._closed:
                self._cond.wait_for(lambda: self._closed, timeout_s)

    def put_back(self, chunks: Iterable[Chunk]) -> None:
        """Queues chunks again that were asked for in vain, ahead of all others."""
        with self._cond:
            for chunk in reversed(list(chunks)):
                if chunk.state is State.ASKED:
                    chunk.state = State.QUEUED
                    self._queue.appendleft(chunk)
            self._cond.notify_all()

    def begin_landing(self, chunk: Chunk) -> bool:
        """False if the chunk's bytes must not reach the blocks any more."""
        with self._cond:
            if chunk.state is not State.ASKED:
                return False
            chunk.state = State.LANDING
            return True

    def landed(self, chunk: Chunk) -> None:
        """Every byte is in its block; what is missing is the producer's COMMIT."""
        self._leave_landing(chunk, State.LANDED)

    def give_up(self, chunk: Chunk) -> None:
        """A chunk of a job that is over no longer writes into blocks."""
        self._leave_landing(chunk, State.ENDED)

    def end(self, chunk: Chunk, error: TransportError | None = None) -> None:
        """A chunk ended; the first error ends the whole job."""
        finished: list[Job] = []
        with self._cond:
            if chunk.state is not State.ENDED:
                chunk.state = State.ENDED
                chunk.job.left -= 1
                if error is not None:
                    self._fail(chunk.job, error)
                finished = self._sweep([chunk.job])
        for job in finished:
            job.finish()

    def moved(self) -> None:
        """Some bytes arrived."""
        self._progress = time.monotonic()

    def still_for(self) -> float:
        """Seconds since anything arrived on any stream, or since the first job was queued."""
        return time.monotonic() - self._progress

    def count_late(self, nbytes: int) -> None:
        with self._cond:
            self.late_bytes += nbytes

    # --- inside -----------------------------------------------------------------------------

    def _cut(self, running: Job, piece: CheckedPiece) -> None:
        if piece.block_nbytes == 0:
            return
        share = -(-running.job.nbytes // self._num_streams)
        nbytes = min(max(share, MIN_CHUNK_BYTES), MAX_CHUNK_BYTES)
        at_once = min(max(1, nbytes // piece.block_nbytes), MAX_COUNT)
        for at in range(0, int(piece.dst.size), at_once):
            dst = piece.dst[at : at + at_once]
            request = Request(
                next(self._numbers) & 0xFFFFFFFF,
                running.job.ticket,
                piece.piece.group,
                piece.piece.first_layer,
                piece.piece.num_layers,
                piece.block_nbytes * int(dst.size),
                piece.indices[at : at + at_once],
                self._checked,
            )
            running.chunks.append(Chunk(running, request, dst))

    def _fail_where(self, which: Callable[[Job], bool], error: TransportError) -> None:
        with self._cond:
            jobs = [job for job in self._jobs.values() if which(job)]
            for job in jobs:
                self._fail(job, TransportError(error.code, error.detail))
            finished = self._sweep(jobs)
        for job in finished:
            job.finish()

    def _fail(self, job: Job, error: TransportError) -> None:
        if job.failure is not None:
            return
        job.failure = error
        self._queue = deque(chunk for chunk in self._queue if chunk.job is not job)
        for chunk in job.chunks:
            if chunk.state in (State.QUEUED, State.ASKED, State.LANDED):
                chunk.state = State.ENDED
                job.left -= 1

    def _leave_landing(self, chunk: Chunk, state: State) -> None:
        with self._cond:
            chunk.state = state
            if state is State.LANDED and chunk.job.over:
                chunk.state = State.ENDED
            if chunk.state is State.ENDED:
                chunk.job.left -= 1
            finished = self._sweep([chunk.job])
        for job in finished:
            job.finish()

    def _sweep(self, jobs: Iterable[Job]) -> list[Job]:
        finished = []
        for job in jobs:
            if job.left == 0 and self._jobs.get(job.job.job) is job:
                del self._jobs[job.job.job]
                finished.append(job)
        return finished
