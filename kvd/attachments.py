"""The consumer's side of moving bytes: opens a transport per attachment, and runs pulls on it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

import structlog

from kvd.core import events
from kvd.core.instructions import OpenTransport, StartPull
from kvd.errors import KvdError
from kvd.memory.engine import EngineMemory
from kvd.peers.client import PeerClient
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr
from kvd.tasks import TaskSet
from kvd.transport.base import Puller, PullJob, TransportError
from kvd.transport.nccl_puller import NcclPuller
from kvd.transport.tcp_puller import TcpPuller

log = structlog.get_logger("kvd.attachments")

UNMAP_NOTICE_S = 2.0
OPEN_TIMEOUT_S = 5.0
"""For the memory's descriptors to come over the link."""

TICKET_CLOSED = frozenset({Code.RELEASED, Code.UNKNOWN_TRANSFER})
"""What a data server answers to a ticket that its daemon has closed."""


class PullerFactory(Protocol):
    """Makes the pullers; `kvd.transport.registry.Transports` is one."""

    def shm(self, local: EngineMemory, remote: EngineMemory) -> Puller: ...

    def tcp(self, local: EngineMemory, host: str, port: int, remote_blocks: int) -> Puller: ...


class GpuPullers(Protocol):
    """Those between GPUs; `kvd.transport.gpu.GpuTransports` is one."""

    async def cuda_ipc(self, local: EngineMemory, remote: EngineMemory) -> Puller: ...

    async def nccl_puller(
        self, local: EngineMemory, addr: PeerAddr, remote_blocks: int
    ) -> Puller: ...


@dataclass(slots=True, eq=False)
class _Attachment:
    attach_id: str
    session: int
    puller: Puller | None = None
    remote: EngineMemory | None = None
    closing: bool = False
    late_bytes: int = 0
    """Counted so far."""


class Attachments:
    """All open transports. Every OpenTransport and StartPull is answered by exactly one event."""

    def __init__(
        self,
        *,
        feed: Callable[[events.Event], None],
        tasks: TaskSet,
        executor: Executor,
        memory_of: Callable[[int], EngineMemory | None],
        peer_of: Callable[[PeerAddr], PeerClient | None],
        pullers: PullerFactory,
        gpu: GpuPullers | None = None,
        open_memory: Callable[..., EngineMemory] | None = None,
    ) -> None:
        self._gpu = gpu
        self._open_memory = open_memory
        self._feed = feed
        self._tasks = tasks
        self._executor = executor
        self._memory_of = memory_of
        self._peer_of = peer_of
        self._pullers = pullers
        self._open: dict[str, _Attachment] = {}
        self._leaving: set[_Attachment] = set()
        self._late_bytes = 0
        self._jobs: dict[int, tuple[_Attachment, str]] = {}

    # --- instructions -----------------------------------------------------------------------

    def open(self, ask: OpenTransport) -> None:
        """Answers with TransportOpened or TransportFailed, unless closed before it is open."""
        entry = _Attachment(ask.attach_id, ask.session)
        self._open[ask.attach_id] = entry
        self._tasks.start(self._opened(entry, ask), f"open-{ask.attach_id}")

    def close(self, attach_id: str) -> None:
        """Ends the transport, and unmaps the peer's memory."""
        entry = self._open.pop(attach_id, None)
        if entry is None:
            return
        entry.closing = True
        # One that is still being opened is closed by its own task.
        if entry.puller is not None:
            self._tasks.start(self._close(entry), f"close-{attach_id}")

    def start_pull(self, ask: StartPull) -> None:
        """Answers with PullDone or PullFailed, when no byte of the job can land any more."""
        entry = self._open.get(ask.attach_id)
        if entry is None or entry.puller is None:
            self._feed(
                events.PullFailed(ask.job, Code.TRANSPORT_ERROR, "the transport is not open")
            )
            return
        self._jobs[ask.job] = (entry, ask.fetch_id)
        self._tasks.start(self._pull(entry.puller, ask), f"pull-{ask.job}")

    def stop_pulls(self, fetch_id: str) -> None:
        """Asks the fetch's jobs to end soon."""
        for entry in {entry for entry, fetch in self._jobs.values() if fetch == fetch_id}:
            if entry.puller is not None:
                entry.puller.stop(fetch_id)

    # --- for the daemon ---------------------------------------------------------------------

    def session_of(self, attach_id: str) -> int | None:
        """The session that an attachment belongs to."""
        entry = self._open.get(attach_id)
        return None if entry is None else entry.session

    def session_of_job(self, job: int) -> int | None:
        """The session that a running job writes into."""
        running = self._jobs.get(job)
        return None if running is None else running[0].session

    def stop_session(self, session: int) -> None:
        """Asks every job of a session to end soon."""
        for entry, fetch_id in list(self._jobs.values()):
            if entry.session == session and entry.puller is not None:
                entry.puller.stop(fetch_id)

    def mapped_nbytes(self) -> int:
        """Bytes of peers' memory that are mapped now."""
        entries = [*self._open.values(), *self._leaving]
        return sum(e.remote.nbytes for e in entries if e.remote is not None)

    def take_late_bytes(self) -> int:
        """Bytes that came after their fetch had ended, and were not counted yet."""
        entries = [*self._open.values(), *self._leaving]
        late, self._late_bytes = self._late_bytes, 0
        return late + sum(_new_late_bytes(entry) for entry in entries)

    @property
    def num_jobs(self) -> int:
        """Pulls that run now."""
        return len(self._jobs)

    def close_all(self) -> None:
        for attach_id in list(self._open):
            self.close(attach_id)

    # --- inside -----------------------------------------------------------------------------

    async def _opened(self, entry: _Attachment, ask: OpenTransport) -> None:
        try:
            await self._make(entry, ask)
        except (KvdError, TransportError) as e:
            failure = events.TransportFailed(ask.attach_id, e.code, e.detail)
        except Exception as e:
            log.error("open_failed", attach_id=ask.attach_id, exc_info=e)
            failure = events.TransportFailed(ask.attach_id, Code.INTERNAL, repr(e))
        else:
            if entry.closing:
                await self._close(entry)
            else:
                self._feed(events.TransportOpened(ask.attach_id))
            return
        self._open.pop(ask.attach_id, None)
        told = entry.closing
        entry.closing = True
        if not told:
            log.warning(
                "transport_failed",
                attach_id=ask.attach_id,
                peer=str(ask.peer),
                transport=ask.answer.transport,
                code=failure.code,
                detail=failure.detail,
            )
            self._feed(failure)
        await self._close(entry)

    async def _make(self, entry: _Attachment, ask: OpenTransport) -> None:
        local, peer = self._memory_of(ask.session), self._peer_of(ask.peer)
        if local is None:
            raise KvdError("our own engine's memory is gone", Code.ENGINE_GONE)
        if peer is None or not peer.up:
            raise KvdError(f"{ask.peer} is not connected", Code.PEER_LOST)
        match ask.answer.transport:
            case "shm":
                entry.remote = await self._map(peer, ask)
                entry.puller = self._pullers.shm(local, entry.remote)
            case "tcp":
                port = ask.answer.data_port
                if port is None:
                    raise KvdError(f"{ask.peer} names no data port", Code.BAD_MESSAGE)
                entry.puller = self._pullers.tcp(local, peer.ip, port, ask.answer.num_blocks)
            case "cuda_ipc" if self._gpu is not None:
                entry.remote = await self._map(peer, ask)
                entry.puller = await self._gpu.cuda_ipc(local, entry.remote)
            case "nccl" if self._gpu is not None:
                blocks = ask.answer.num_blocks
                entry.puller = await self._gpu.nccl_puller(local, ask.peer, blocks)
            case other:
                raise KvdError(
                    f"{ask.peer} chose {other!r}, which was not offered", Code.TRANSPORT_UNAVAILABLE
                )

    async def _map(self, peer: PeerClient, ask: OpenTransport) -> EngineMemory:
        answer = ask.answer
        if peer.link is None:
            raise KvdError(f"{ask.peer} has no link on this host", Code.TRANSPORT_UNAVAILABLE)
        fds = await peer.link.memory(answer.memory_key, OPEN_TIMEOUT_S)
        wanted = sum(info.has_fd for info in answer.segments) + 1
        if len(fds) != wanted:
            count = len(fds)
            _close_fds(fds)
            raise KvdError(
                f"{ask.peer} passed {count} descriptors instead of {wanted}: for "
                f"{len(answer.segments)} segments and a fence table",
                Code.BAD_MEMORY,
            )
        given = list(fds)
        own = iter(fds)
        segments = [(info, next(own) if info.has_fd else -1) for info in answer.segments]

        def open_memory() -> EngineMemory:
            given.clear()  # `open` owns them from here on
            return (self._open_memory or EngineMemory.open)(
                segments=segments,
                layers=answer.layers,
                num_blocks=answer.num_blocks,
                fence=(fds[-1], answer.fence_slots),
                writable=False,
            )

        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, open_memory)
        finally:
            _close_fds(given)

    async def _pull(self, puller: Puller, ask: StartPull) -> None:
        job = PullJob(
            job=ask.job,
            fetch_id=ask.fetch_id,
            ticket=ask.ticket,
            fence_slot=ask.fence_slot,
            fence_word=ask.fence_word,
            pieces=ask.pieces,
            nbytes=ask.nbytes,
        )
        event: events.Event
        try:
            event = events.PullDone(ask.job, await puller.pull(job))
        except (TransportError, KvdError) as e:
            # A ticket that was closed is the fence's doing; the reason comes on the other
            # connection, perhaps later, and perhaps it is that the next generation comes.
            code = Code.FENCED if e.code in TICKET_CLOSED else e.code
            event = events.PullFailed(ask.job, code, e.detail)
        except Exception as e:
            log.error("pull_failed", job=ask.job, fetch_id=ask.fetch_id, exc_info=e)
            event = events.PullFailed(ask.job, Code.INTERNAL, repr(e))
        self._feed(event)
        self._jobs.pop(ask.job, None)

    async def _close(self, entry: _Attachment) -> None:
        self._leaving.add(entry)
        try:
            if entry.puller is not None:
                await entry.puller.aclose()
                self._late_bytes += _new_late_bytes(entry)
            remote = entry.remote
            if remote is not None:
                remote.close_when_unpinned()
                while not await remote.wait_closed(UNMAP_NOTICE_S):
                    log.warning("peer_memory_still_in_use", attach_id=entry.attach_id)
                entry.remote = None
                log.info("peer_memory_unmapped", attach_id=entry.attach_id, nbytes=remote.nbytes)
        finally:
            self._leaving.discard(entry)


def _new_late_bytes(entry: _Attachment) -> int:
    if not isinstance(entry.puller, TcpPuller | NcclPuller):
        return 0
    before, entry.late_bytes = entry.late_bytes, entry.puller.statistics()["late_bytes"]
    return entry.late_bytes - before


def _close_fds(fds: list[int]) -> None:
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.pop())
