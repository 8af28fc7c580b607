"""An in-process transport with scripted faults, for tests: copies on the loop, block by block.

It is held to the same contract as the real ones, so what is tested over it holds over them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvd.errors import MemoryRefused
from kvd.memory.engine import EngineMemory
from kvd.memory.plan import id_runs, uniform_runs
from kvd.protocol.codes import Code
from kvd.transport.base import PullJob, TransportError
from kvd.transport.checksum import blocks_crc
from kvd.transport.jobs import CheckedPiece, check_job, check_layers


@dataclass(frozen=True, slots=True)
class Fail:
    """The job fails with `code` once `after` blocks were copied."""

    code: Code = Code.TRANSPORT_ERROR
    after: int = 0


@dataclass(frozen=True, slots=True)
class Hang:
    """The job stands still after `after` blocks, until `release` or a stop."""

    after: int = 0


@dataclass(frozen=True, slots=True)
class Slow:
    """The loop goes round `turns` times before each block."""

    turns: int = 10


@dataclass(frozen=True, slots=True)
class Flip:
    """`flip` is called after `after` blocks: the owner takes its memory back meanwhile."""

    flip: Callable[[], None]
    after: int = 0


Fault = Fail | Hang | Slow | Flip


class FakePuller:
    """Copies from `remote` to `local`; the n-th job that is started gets the n-th fault, if any."""

    def __init__(
        self,
        local: EngineMemory,
        remote: EngineMemory,
        faults: Iterable[Fault | None] = (),
        *,
        checked: bool = False,
    ) -> None:
        check_layers(local, remote)
        self.local = local
        self.remote = remote
        self._checked = checked
        self.hanging = asyncio.Event()
        """Set while a job hangs."""
        self._faults = deque(faults)
        self._released = asyncio.Event()
        self._stopped: dict[int, asyncio.Event] = {}
        self._fetches: dict[int, str] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    def script(self, *faults: Fault | None) -> None:
        """Adds faults for jobs to come."""
        self._faults.extend(faults)

    def release(self) -> None:
        """Lets jobs that hang go on, now and from now on."""
        self._released.set()

    async def pull(self, job: PullJob) -> int:
        """See `Puller.pull`."""
        if self._closed:
            raise TransportError(Code.CANCELLED, "the attachment is closed")
        if job.job in self._stopped:
            raise TransportError(Code.DUPLICATE, f"job {job.job} is running")
        pieces = check_job(job, self.local, self.remote.num_blocks)
        fault = self._faults.popleft() if self._faults else None
        stopped = self._stopped[job.job] = asyncio.Event()
        self._fetches[job.job] = job.fetch_id
        self._idle.clear()
        try:
            with self.local.pinned(), self.remote.pinned():
                self._check_fence(job)
                await self._copy(job, pieces, fault, stopped)
                wrong = self._checked and not all(map(self._arrived, pieces))
                self._check_fence(job)
                if wrong:
                    raise TransportError(Code.INTEGRITY, f"job {job.job}: checksums differ")
        except MemoryRefused as exc:
            raise TransportError(Code.ENGINE_GONE, exc.detail) from None
        finally:
            del self._stopped[job.job], self._fetches[job.job]
            if not self._stopped:
                self._idle.set()
        return job.nbytes

    def stop(self, fetch_id: str) -> None:
        """See `Puller.stop`."""
        for number, fetch in self._fetches.items():
            if fetch == fetch_id:
                self._stopped[number].set()

    async def aclose(self) -> None:
        """See `Puller.aclose`."""
        self._closed = True
        for stopped in self._stopped.values():
            stopped.set()
        await self._idle.wait()

    async def _copy(
        self,
        job: PullJob,
        pieces: list[CheckedPiece],
        fault: Fault | None,
        stopped: asyncio.Event,
    ) -> None:
        done = 0
        blocks = [
            (piece, a + i, b + i)
            for piece in pieces
            for a, b, n in id_runs(piece.src, piece.dst)
            for i in range(n)
        ]
        for piece, a, b in blocks:
            await self._meddle(fault, done, stopped)
            if stopped.is_set():
                raise TransportError(Code.CANCELLED, f"job {job.job} was stopped")
            self._copy_block(piece, a, b)
            done += 1
            await asyncio.sleep(0)
        await self._meddle(fault, done, stopped)
        if stopped.is_set():
            raise TransportError(Code.CANCELLED, f"job {job.job} was stopped")

    def _copy_block(self, piece: CheckedPiece, a: int, b: int) -> None:
        p = piece.piece
        for run in uniform_runs(self.remote, self.local, p.group, p.first_layer, p.num_layers):
            src, dst = run.views(self.remote, self.local)
            dst[:, b] = src[:, a]

    def _arrived(self, piece: CheckedPiece) -> bool:
        where = piece.piece.group, piece.piece.first_layer, piece.piece.num_layers
        source = blocks_crc(self.remote, *where, piece.src, lambda: True)
        return source == blocks_crc(self.local, *where, piece.dst, lambda: True)

    async def _meddle(self, fault: Fault | None, done: int, stopped: asyncio.Event) -> None:
        match fault:
            case Fail(code, after) if done == after:
                raise TransportError(code, f"scripted, after {done} blocks")
            case Hang(after) if done == after and not self._released.is_set():
                self.hanging.set()
                waits = [asyncio.ensure_future(e.wait()) for e in (self._released, stopped)]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
                    self.hanging.clear()
            case Slow(turns):
                for _ in range(turns):
                    await asyncio.sleep(0)
            case Flip(flip, after) if done == after:
                flip()
            case _:
                pass

    def _check_fence(self, job: PullJob) -> None:
        try:
            word = self.remote.fence_word(job.fence_slot)
        except MemoryRefused as exc:
            raise TransportError(Code.BAD_MESSAGE, exc.detail) from None
        if word != job.fence_word:
            raise TransportError(Code.FENCED, f"fence slot {job.fence_slot}: {word:#x}")
