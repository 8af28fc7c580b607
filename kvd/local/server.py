"""The Unix socket's server: accepts shims, keeps their sessions, maps and unmaps their memory."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import socket
from collections.abc import Callable
from concurrent.futures import Executor

import structlog

from kvd.core import events
from kvd.drops import Drops
from kvd.errors import KvdError
from kvd.local.listener import Listener
from kvd.local.registration import Registration
from kvd.local.seqpacket import FrameSocket, engine_refusal, peercred
from kvd.local.session import Session, Stage
from kvd.memory.engine import EngineMemory
from kvd.protocol import local
from kvd.protocol.codes import Code
from kvd.protocol.types import Geometry
from kvd.tasks import TaskSet

log = structlog.get_logger("kvd.local")

MAX_FDS_PER_FRAME = 16
ACCEPT_BUDGET = 16
MAP_TIMEOUT_S = 120.0
"""For mapping and populating all of an engine's memory."""
UNMAP_NOTICE_S = 2.0
"""How often a session whose memory is still in use is spoken of."""


class LocalServer:
    """Sessions by number. `feed` hands events to the core; its answers come back as calls here."""

    def __init__(
        self,
        listener: Listener,
        *,
        feed: Callable[[events.Event], None],
        welcome: Callable[[], local.Welcome],
        executor: Executor,
        tasks: TaskSet,
        drops: Drops,
        max_sessions: int,
        max_queue: int,
        gid: int | None = None,
        open_memory: Callable[..., EngineMemory] | None = None,
    ) -> None:
        """`gid`: the group whose members may register too. `open_memory`: what opens memory,
        where it is not `EngineMemory.open`."""
        self._gid = gid
        self._open_memory = open_memory
        self._listener = listener
        self._feed = feed
        self._welcome = welcome
        self._executor = executor
        self._tasks = tasks
        self._drops = drops
        self._max_sessions = max_sessions
        self._max_queue = max_queue
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._sessions: dict[int, Session] = {}
        self._mapping: dict[int, asyncio.Task[None]] = {}
        self._releasing: set[int] = set()
        self._accepting = False
        self._empty = asyncio.Event()

    # --- life -----------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to accept."""
        if not self._accepting:
            self._accepting = True
            self._loop.add_reader(self._listener.sock.fileno(), self._accept)

    def stop_accepting(self) -> None:
        """Takes no new shim; removes the socket's file."""
        self._pause_accepting()
        self._listener.close()

    def end_all(self, code: Code, detail: str) -> None:
        """Ends every session from our side (each is released by the core as usual)."""
        for session in list(self._sessions.values()):
            session.throw_out(code, detail)

    async def wait_empty(self, timeout_s: float) -> bool:
        """Waits until every session is released; False when some is not within `timeout_s`."""
        self._empty.clear()
        if self._sessions:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._empty.wait()
        return not self._sessions

    def __len__(self) -> int:
        return len(self._sessions)

    # --- what the daemon asks ---------------------------------------------------------------

    def memory(self, number: int) -> EngineMemory | None:
        """The mapped memory of a live session."""
        session = self._sessions.get(number)
        if session is None or number in self._releasing:
            return None
        return session.memory

    def block_size(self, number: int) -> int:
        """Tokens per block of a session's engine; 0 when unknown."""
        session = self._sessions.get(number)
        return 0 if session is None else session.block_size

    def mapped_nbytes(self) -> int:
        """Bytes of engines' memory that are mapped now."""
        return sum(s.memory.nbytes for s in self._sessions.values() if s.memory is not None)

    def send(self, number: int, message: local.ToShim) -> None:
        """To one shim; to one that is gone, nothing is sent."""
        session = self._sessions.get(number)
        if session is None or session.stage is Stage.ENDED:
            return
        session.send(message)
        if isinstance(message, local.Refused):
            session.refused_by_core()

    def throw_out(self, number: int, code: Code, detail: str) -> None:
        """Ends a session from our side."""
        session = self._sessions.get(number)
        if session is not None:
            session.refuse(code, detail)

    def release(self, number: int) -> None:
        """Unmaps the session's memory, then closes its socket: in that order."""
        session = self._sessions.get(number)
        if session is None or number in self._releasing:
            return
        self._releasing.add(number)
        session.stop()
        self._tasks.start(self._release(session), f"release-{number}")

    # --- what a session asks ----------------------------------------------------------------

    def session_hello(self, session: Session, hello: local.Hello) -> None:
        log.info(
            "session_opened",
            session=session.number,
            engine_id=hello.engine_id,
            epoch=hello.epoch,
            tp_rank=hello.rank.tp_rank,
            pp_rank=hello.rank.pp_rank,
            role=hello.role,
            client=hello.client[:200],
        )
        self._feed(
            events.SessionOpened(
                session=session.number,
                engine_id=hello.engine_id,
                epoch=hello.epoch,
                rank=hello.rank,
                role=hello.role,
                probe=hello.client == local.DOCTOR,
            )
        )
        session.welcome(self._welcome())

    def session_described(self, session: Session, registration: Registration) -> None:
        if registration.geometry is None:
            self._drops.drop("session", str(Code.BAD_MESSAGE), session=session.number)
            session.refuse(Code.BAD_MESSAGE, "the description of the memory has no geometry")
            return
        session.block_size = registration.geometry.block_size
        self._mapping[session.number] = self._tasks.start(
            self._map(session, registration, registration.geometry), f"map-{session.number}"
        )

    def session_message(self, session: Session, message: local.FromShim) -> None:
        self._feed(events.ShimMessage(session.number, message))

    def session_ended(self, session: Session, reason: str, detail: str) -> None:
        if not session.known:
            self._forget(session)
            return
        log.info("session_ended", session=session.number, reason=reason, detail=detail)
        self._feed(events.SessionClosed(session.number))

    # --- inside ---------------------------------------------------------------------------

    async def _map(self, session: Session, registration: Registration, geometry: Geometry) -> None:
        segments, fence = registration.take_segments(), registration.take_fence()
        infos = tuple(info for info, _ in segments)
        layers = tuple(registration.layers)
        num_blocks = registration.num_blocks

        def open_memory() -> EngineMemory:
            return (self._open_memory or EngineMemory.open)(
                segments=segments,
                layers=layers,
                num_blocks=num_blocks,
                fence=fence,
                writable=True,
            )

        opening = self._loop.run_in_executor(self._executor, open_memory)
        try:
            done, _ = await asyncio.wait({opening}, timeout=MAP_TIMEOUT_S)
            if not done:
                # Nothing was told of this memory, so nobody uses it if it still comes.
                opening.add_done_callback(_close_late)
                raise KvdError(f"mapping took more than {MAP_TIMEOUT_S:g} s", Code.DEADLINE)
            memory = opening.result()
        except KvdError as e:
            log.warning("memory_refused", session=session.number, detail=e.detail)
            self._drops.drop("session", str(e.code), session=session.number)
            session.refuse(e.code, e.detail)
            return
        except Exception as e:
            log.error("memory_failed", session=session.number, exc_info=e)
            self._drops.drop("session", str(Code.INTERNAL), session=session.number)
            session.refuse(Code.INTERNAL, f"the memory could not be mapped: {e}")
            return
        finally:
            self._mapping.pop(session.number, None)
        ended = session.stage is Stage.ENDED
        session.mapped(memory)
        if ended:
            return
        log.info(
            "session_registered",
            session=session.number,
            nbytes=memory.nbytes,
            layers=len(layers),
            num_blocks=num_blocks,
        )
        self._feed(
            events.SessionRegistered(
                session=session.number,
                geometry=geometry,
                num_blocks=num_blocks,
                segments=infos,
                layers=layers,
                fence_slots=memory.fence_slots,
            )
        )
        session.registered()

    async def _release(self, session: Session) -> None:
        mapping = self._mapping.get(session.number)
        if mapping is not None:
            await asyncio.wait({mapping})
        memory = session.memory
        if memory is not None:
            memory.close_when_unpinned()
            while not await memory.wait_closed(UNMAP_NOTICE_S):
                log.warning("memory_still_in_use", session=session.number, nbytes=memory.nbytes)
            session.memory = None
            log.info("memory_unmapped", session=session.number, nbytes=memory.nbytes)
        self._forget(session)

    def _forget(self, session: Session) -> None:
        self._sessions.pop(session.number, None)
        self._releasing.discard(session.number)
        session.close()
        if not self._sessions:
            self._empty.set()

    def _pause_accepting(self) -> None:
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._listener.sock.fileno())

    def _accept(self) -> None:
        for _ in range(ACCEPT_BUDGET):
            try:
                sock, _ = self._listener.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as e:
                # Out of descriptors: the backlog stays readable, so look away for a while.
                self._drops.drop("accept", errno.errorcode.get(e.errno or 0, "error"))
                self._pause_accepting()
                self._loop.call_later(1.0, self._accept_again)
                return
            self._open(sock)

    def _accept_again(self) -> None:
        if self._listener.sock.fileno() >= 0:
            self.start()

    def _open(self, sock: socket.socket) -> None:
        number = next(self._numbers)
        session = Session(number, self, self._drops, self._loop)
        frames = FrameSocket(
            self._loop,
            sock,
            on_frame=session.on_frame,
            on_end=session.on_end,
            max_fds=MAX_FDS_PER_FRAME,
            max_queue=self._max_queue,
        )
        self._sessions[number] = session
        session.start(frames)
        pid, uid, _ = peercred(sock)
        refusal = engine_refusal(sock, self._gid, f"the shim (pid {pid})")
        if refusal is not None:
            self._drops.drop("session", "uid", uid=uid, own_uid=os.geteuid())
            session.refuse(Code.UNSUPPORTED, refusal)
        elif len(self._sessions) > self._max_sessions:
            self._drops.drop("session", "max_sessions", limit=self._max_sessions)
            session.refuse(
                Code.OVERLOADED, f"{self._max_sessions} sessions are open (max_sessions)"
            )


def _close_late(opening: asyncio.Future[EngineMemory]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close_when_unpinned()
