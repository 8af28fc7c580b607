"""Same host, GPU memory: copies straight from the producer's blocks into our own engine's."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

from kvd.errors import KvdError, MemoryRefused
from kvd.memory.cuda.memory import DeviceMemory
from kvd.memory.cuda.plan import Copies, batches, between, enqueue
from kvd.protocol.codes import Code
from kvd.transport.base import PullJob, TransportError
from kvd.transport.gpu_thread import GpuThread
from kvd.transport.jobs import CheckedPiece, Running, check_job, check_mapped

BATCH_BYTES = 64 * 2**20
BATCH_COPIES = 4096
"""Most of one batch: how long a stop, or the engine's death, may have to wait."""
AHEAD = 2
"""Batches of one job on the stream, so that it does not run dry between them."""


class CudaIpcPuller:
    """One attachment. `remote` was opened from the producer engine's own handles."""

    def __init__(
        self, local: DeviceMemory, remote: DeviceMemory, thread: GpuThread, timeout_s: float
    ) -> None:
        """`timeout_s`: work that takes longer is a failure, told when it has ended.

        Raises TransportError if the memories do not fit, or the remote one has no fence.
        """
        check_mapped("cuda_ipc", local, remote)
        self.local = local
        self.remote = remote
        self._thread = thread
        self._timeout_s = timeout_s
        self._stream: Any = None
        self._running = Running()

    async def open(self) -> None:
        """Makes the stream. Raises TransportError."""
        try:
            self._stream = await self._thread.call(self._thread.gpu.driver.stream_create)
        except KvdError as exc:
            raise TransportError(exc.code, exc.detail) from None

    async def pull(self, job: PullJob) -> int:
        """See `Puller.pull`."""
        return await self._running.run(job, lambda: self._pull(job))

    def stop(self, fetch_id: str) -> None:
        """See `Puller.stop`."""
        self._running.stop(fetch_id)

    async def aclose(self) -> None:
        """See `Puller.aclose`."""
        await self._running.aclose()
        stream, self._stream = self._stream, None
        if stream is not None:
            await asyncio.wait(
                {self._thread.call(lambda: self._thread.gpu.driver.stream_destroy(stream))},
                timeout=self._timeout_s,
            )

    async def _pull(self, job: PullJob) -> int:
        pieces = check_job(job, self.local, self.remote.num_blocks)
        if self._stream is None:
            raise TransportError(Code.CANCELLED, "the attachment is closed")
        try:
            self.local.pin()
        except MemoryRefused:
            raise TransportError(Code.ENGINE_GONE, "our engine's memory is being closed") from None
        try:
            try:
                self.remote.pin()
            except MemoryRefused:
                raise TransportError(Code.PEER_LOST, "the peer's memory is being closed") from None
            try:
                self._check_fence(job, "before")
                await self._copy(job, pieces)
                self._check_fence(job, "after")
            finally:
                self.remote.unpin()
        finally:
            self.local.unpin()
        return job.nbytes

    async def _copy(self, job: PullJob, pieces: list[CheckedPiece]) -> None:
        """Returns, or raises, only when nothing that was put on the stream is left."""
        running: deque[asyncio.Future[None]] = deque()
        failure: TransportError | None = None
        parts = deque(await self._planned(pieces))
        while parts or running:
            if failure is None:
                failure = self._interrupted(job)
            if failure is not None:
                parts.clear()
            while parts and len(running) < AHEAD:
                running.append(self._launch(parts.popleft()))
            if running:
                failure = await self._ended(running.popleft()) or failure
        if failure is not None:
            raise failure

    async def _planned(self, pieces: list[CheckedPiece]) -> list[Copies]:
        def plan() -> list[Copies]:
            found: list[Copies] = []
            for piece in pieces:
                p = piece.piece
                layers = (p.first_layer, p.num_layers)
                copies = between(self.remote, self.local, p.group, layers, (piece.src, piece.dst))
                found.extend(batches(copies, BATCH_BYTES, BATCH_COPIES))
            return found

        try:
            return await self._thread.call(plan)
        except KvdError as exc:
            raise TransportError(exc.code, exc.detail) from None

    def _launch(self, part: Copies) -> asyncio.Future[None]:
        driver, stream = self._thread.gpu.driver, self._stream
        return self._thread.launch(stream, lambda: enqueue(driver, part, stream))

    async def _ended(self, work: asyncio.Future[None]) -> TransportError | None:
        started = time.monotonic()
        await asyncio.wait({work}, timeout=self._timeout_s)
        late = not work.done()
        if late:
            # Its bytes may still land, so the job is not over. Should it never end, whoever
            # watches the thread ends this process.
            await asyncio.wait({work})
        try:
            work.result()
        except KvdError as exc:
            return TransportError(exc.code, exc.detail)
        if late:
            return TransportError(
                Code.DEADLINE, f"a copy on the GPU took {time.monotonic() - started:.1f} s"
            )
        return None

    def _interrupted(self, job: PullJob) -> TransportError | None:
        if self._running.stopped(job):
            return TransportError(Code.CANCELLED, f"job {job.job} was stopped")
        if self.local.closing:
            return TransportError(Code.ENGINE_GONE, "our engine is gone")
        if self.remote.closing:
            return TransportError(Code.PEER_LOST, "the peer's memory is being closed")
        return None

    def _check_fence(self, job: PullJob, when: str) -> None:
        try:
            word = self.remote.fence_word(job.fence_slot)
        except MemoryRefused as exc:
            raise TransportError(Code.BAD_MESSAGE, exc.detail) from None
        if word != job.fence_word:
            raise TransportError(
                Code.FENCED,
                f"fence slot {job.fence_slot} {when} the copy: {word:#x}, not {job.fence_word:#x}",
            )
