"""The engine's end of kvd: register memory, offer it, fetch into it, and hear how that ended.

Synchronous and without threads: nothing happens but inside a call, and no call waits unless it
has a timeout. Call `poll` often (an engine: each step); it connects, reconnects, sends, reads and
watches the daemon. Not thread-safe.
"""

from __future__ import annotations

import fcntl
import secrets
import select
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Literal, Self

from connector_shim.consumer import ConsumerCalls
from connector_shim.errors import ClientError
from connector_shim.events import Event
from connector_shim.fence import FenceTable
from connector_shim.frames import registration_frames
from connector_shim.memory import MemoryDescription
from connector_shim.paths import resolve_socket
from connector_shim.producer import ProducerCalls
from connector_shim.session import Phase, Session
from connector_shim.tracking import OfferKey, Tracker
from connector_shim.wire import Frame, encode
from kvd.protocol import local
from kvd.protocol.codes import Code
from kvd.protocol.types import Rank, Role
from kvd.protocol.version import PROTO_MAJOR, PROTO_MINOR

ClientState = Literal["down", "connecting", "registering", "up", "draining"]


class Client(ProducerCalls, ConsumerCalls):
    """One engine rank's connection to its daemon.

    `path`: the daemon's socket (`{local_rank}` is replaced); None looks at KVD_SOCKET, /run/kvd,
    $XDG_RUNTIME_DIR/kvd and /tmp/kvd-$UID, at each attempt to connect anew. `epoch` is new at
    each start of the engine. `daemon_hang_s`: a daemon that is silent for so long is given up,
    and killed if fetches are out that it might still be writing. `fence_slots` bounds the offers,
    `max_fetches` the fetches, `max_queue_frames` and `max_queue_bytes` what waits for the socket.
    Raises ClientError: BAD_MESSAGE for an id or a rank that cannot be, UNSUPPORTED for a path that
    no socket can have.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        engine_id: str,
        epoch: int | None = None,
        rank: Rank = Rank(),  # noqa: B008 - frozen
        role: Role = "both",
        client: str = "connector_shim",
        local_rank: int = 0,
        connect_timeout_s: float = 5.0,
        daemon_hang_s: float = 10.0,
        fence_slots: int = 16_384,
        max_fetches: int = 4_096,
        max_queue_frames: int = 4_096,
        max_queue_bytes: int = 16 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine_id = engine_id
        self.epoch = time.time_ns() if epoch is None else epoch
        self.rank = rank
        self.role = role
        self._name = client
        self._path = path
        self._local_rank = local_rank
        self._fence_slots = fence_slots
        self._clock = clock
        self._memory: MemoryDescription | None = None
        self._registration: list[Frame] | None = None
        self._closed = False
        self._fetch_prefix = secrets.token_hex(6)
        self._fetch_count = 0
        # Mistakes of the caller are told here; whatever may change later is left to `poll`.
        encode(self._hello())
        if path:
            resolve_socket(path, local_rank=local_rank)
        self._tracker = Tracker(max_fetches=max_fetches)
        self._session = Session(
            tracker=self._tracker,
            find_path=lambda: resolve_socket(self._path, local_rank=self._local_rank),
            hello=self._hello,
            registration=lambda: self._registration,
            on_gpu=lambda: self._memory is not None and self._memory.on_gpu,
            connect_timeout_s=connect_timeout_s,
            daemon_hang_s=daemon_hang_s,
            max_frames=max_queue_frames,
            max_bytes=max_queue_bytes,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    # --- state ---------------------------------------------------------------------------------

    @property
    def state(self) -> ClientState:
        """`up` takes offers and fetches; `draining` finishes those that it has.

        A daemon that listens, but did not take this engine when it was last asked, is `down`
        until it does.
        """
        match self._session.phase:
            case Phase.GREETING:
                return "down" if self._session.ignored else "connecting"
            case Phase.REGISTERING:
                return "registering"
            case Phase.UP:
                return "draining" if self._session.draining else "up"
            case _:
                return "down"

    @property
    def welcome(self) -> local.Welcome | None:
        """What the daemon said of itself last (its address for peers, its boot id)."""
        return self._session.welcome

    @property
    def daemon_pid(self) -> int:
        """The daemon's process; 0 without a connection, or where it cannot be seen from here."""
        return self._session.daemon_pid

    @property
    def last_error(self) -> ClientError | None:
        """Why there is no connection, or None while there is one."""
        return self._session.last_error

    @property
    def fence(self) -> FenceTable | None:
        """The fence table, once memory is described."""
        return self._tracker.fence

    @property
    def offers(self) -> tuple[OfferKey, ...]:
        """(transfer_id, generation) of every offer whose end was not told yet."""
        return self._tracker.offers

    @property
    def fetches(self) -> tuple[str, ...]:
        """Ids of every fetch whose end was not told yet."""
        return self._tracker.fetches

    def statistics(self) -> dict[str, int]:
        """Counters since the start (late and unknown messages, kills, ...) and present sizes."""
        return {
            **self._tracker.counts,
            "offers": self._tracker.num_offers,
            "fetches": self._tracker.num_fetches,
            "notifies": self._tracker.num_notifies,
            "queued": self._session.queued(),
        }

    def fileno(self) -> int | None:
        """The socket, to wait on with others, while there is one; it changes at each reconnect."""
        return self._session.fileno()

    # --- memory --------------------------------------------------------------------------------

    def describe(self, memory: MemoryDescription) -> None:
        """Sets the engine's KV memory, once; it is registered at each connection from then on.

        The descriptors are duplicated: `memory` may be closed. Raises ClientError: DUPLICATE at
        a second call, UNSUPPORTED where no fence table is possible, BAD_MESSAGE if the geometry
        does not fit into a frame.
        """
        self._check_open()
        if self._memory is not None:
            raise ClientError(Code.DUPLICATE, "the memory was described already")
        fence = FenceTable(self._fence_slots)
        own = [replace(s, fd=_dup(s.fd)) if s.fd >= 0 else s for s in memory.segments]
        memory = replace(memory, segments=tuple(own))
        try:
            self._registration = registration_frames(memory, fence)
        except ClientError:
            memory.close()
            fence.close()
            raise
        self._memory = memory
        self._tracker.fence = fence
        self._session.register()

    # --- progress ------------------------------------------------------------------------------

    def poll(self, timeout: float = 0.0) -> list[Event]:
        """Does what can be done, and returns what happened; waits at most `timeout` seconds for
        something to happen. Each end of an offer or fetch is returned once, and never before no
        reader (of an offer) or writer (of a fetch) is left. Never raises for what a daemon does.
        """
        if self._closed:
            return []
        give_up_at = self._clock() + timeout
        while True:
            now = self._clock()
            self._session.advance(now)
            events = self._tracker.take_events()
            if events or now >= give_up_at:
                return events
            self._wait(min(give_up_at - now, self._session.wake_after(now)))

    def wait_up(self, timeout: float) -> local.Welcome:
        """Returns once the daemon takes offers and fetches: what it said of itself.

        Events are kept for `poll`. For scripts; an engine polls. Raises ClientError after
        `timeout` seconds, saying why not.
        """
        self._check_open()
        give_up_at = self._clock() + timeout
        while True:
            now = self._clock()
            self._session.advance(now)
            if self.state == "up" and self._session.welcome is not None:
                return self._session.welcome
            if now >= give_up_at:
                raise self._unusable()
            self._wait(min(give_up_at - now, self._session.wake_after(now)))

    def _wait(self, seconds: float) -> None:
        poller = select.poll()
        for fd, writing in self._session.filenos():
            poller.register(fd, select.POLLIN | (select.POLLOUT if writing else 0))
        poller.poll(max(1, int(seconds * 1000)))

    # --- the end -------------------------------------------------------------------------------

    def close(self, timeout: float = 2.0) -> bool:
        """Drops every fence word, says goodbye, and waits (only if fetches are out) for the daemon
        to stop writing. True if it has: False means that the blocks of fetches must not be used
        by anyone else. Nothing is told after it; calling it again does nothing.
        """
        if self._closed:
            return True
        self._tracker.end_all_offers(Code.CANCELLED)
        now = self._clock()
        self._session.leave(now, Code.CANCELLED, "the engine closes")
        give_up_at = now + timeout
        while self._tracker.num_fetches and now < give_up_at:
            self._wait(min(give_up_at - now, self._session.wake_after(now)))
            now = self._clock()
            self._session.advance(now)
        quiet = not self._tracker.num_fetches
        self._closed = True
        self._session.drop()
        self._tracker.take_events()
        if self._tracker.fence is not None:
            self._tracker.fence.close()
        if self._memory is not None:
            self._memory.close()
        return quiet

    # --- helpers -------------------------------------------------------------------------------

    def _hello(self) -> local.Hello:
        return local.Hello(
            proto_major=PROTO_MAJOR,
            proto_minor=PROTO_MINOR,
            engine_id=self.engine_id,
            epoch=self.epoch,
            rank=self.rank,
            role=self.role,
            client=self._name,
        )


def _dup(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
