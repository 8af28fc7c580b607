"""The connection to the daemon: getting one, keeping it, and letting go of it safely.

    DOWN -- connected --> GREETING -- Welcome --> REGISTERING -- Registered --> UP
    any  -- EOF --> DOWN, or LEAVING if a copy on a GPU may outlive the socket
    any  -- hang, garbled frame, overdue fetch, refusal --> LEAVING, or DOWN if no fetch is out
    LEAVING -- EOF (the same), exit of the daemon, last fetch told --> DOWN

Offers end the moment that the connection is given up: their fence words are dropped, so nobody
can use their blocks. Fetches end only when the daemon can write no more: it says so (FetchDone),
or closes the socket, or exits. LEAVING is the time between; a daemon that does not close by
itself is killed then, if that is allowed, and waited for if not.

A daemon that lives closes a session's socket only when its copies have stopped. For one that
dies, the kernel closes it, once all of its threads are ending: that proves the same for copies by
the CPU, but not for what is still on a GPU. So where the blocks are on a GPU, only its exit counts
then (`peerproc`). Where it cannot be seen which of the two it was, the fetches end at the exit if
that can be seen, else after LEAVE_HANGS silences: nobody is left who could start a copy, and
those that were started are batches of bounded size which wait for nothing. That is a bet on time,
and logged.

Time spent waiting is added up from poll to poll, with a limit on what one gap counts: an engine
that was stopped for a minute must not take its daemon for dead on waking up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from enum import Enum
from typing import assert_never

import msgspec

from connector_shim.errors import ClientError
from connector_shim.events import Down, Up
from connector_shim.paths import why_not
from connector_shim.patience import KNOCK_S, Knocks, Silence
from connector_shim.tracking import Tracker
from connector_shim.wire import Frame, Garbled, PeerClosed, Wire, encode
from kvd.protocol import local
from kvd.protocol.codes import Code
from kvd.protocol.version import PROTO_MAJOR

log = logging.getLogger(__name__)

MAX_READS = 1_024
"""Frames read in one go, so that a daemon which floods us cannot keep the engine's step."""
REGISTER_TIMEOUT_S = 120.0
LEAVE_HANGS = 3
"""How many times `daemon_hang_s` a daemon that was not silent has to stop its copies and close."""

_decoder: msgspec.msgpack.Decoder[local.ToShim] = msgspec.msgpack.Decoder(local.ToShim)


class Phase(Enum):
    DOWN = "down"
    GREETING = "greeting"
    REGISTERING = "registering"
    UP = "up"
    LEAVING = "leaving"


class Session:
    """`find_path` and `hello` are asked at each attempt, `registration` at each Welcome;
    `on_gpu` is whether blocks of the engine are on a GPU."""

    def __init__(
        self,
        *,
        tracker: Tracker,
        find_path: Callable[[], str],
        hello: Callable[[], local.Hello],
        registration: Callable[[], Sequence[Frame] | None],
        on_gpu: Callable[[], bool],
        connect_timeout_s: float,
        daemon_hang_s: float,
        max_frames: int,
        max_bytes: int,
    ) -> None:
        self.phase = Phase.DOWN
        self.welcome: local.Welcome | None = None
        self.draining = False
        self.last_error: ClientError | None = None
        self._tracker = tracker
        self._find_path = find_path
        self._hello = hello
        self._registration = registration
        self._on_gpu = on_gpu
        self._connect_timeout_s = connect_timeout_s
        self._hang_s = daemon_hang_s
        self._silence = Silence(min(1.0, daemon_hang_s / 4))
        self._knocks = Knocks()
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._wire: Wire | None = None
        self._path = ""
        self._boot_id: int | None = None
        self._told: Code | None = None
        self._connected_at = float("-inf")
        self._last = float("-inf")
        self._registered = False
        self._ignored_by: int | None = None
        """The process that did not take this engine when it was last asked."""
        self._waited_s = 0.0
        self._leave_limit_s = 0.0
        self._trusted = True
        self._eof = False
        """The socket is at its end, but that does not prove enough."""

    # --- what the client asks ------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        return self.phase is Phase.UP

    def filenos(self) -> list[tuple[int, bool]]:
        """(descriptor, wants to write) of everything that can wake a poll."""
        if self._wire is None:
            return []
        found = []
        if not self._eof:
            found.append((self._wire.fileno(), len(self._wire.outbox) > 0))
        if self.phase is Phase.LEAVING:
            process = self._wire.process.fileno()
            if process is not None:
                found.append((process, False))
        return found

    @property
    def ignored(self) -> bool:
        """Whether the daemon that is connected did not take this engine when it was last asked."""
        return self._wire is not None and self._wire.process.pid == self._ignored_by

    @property
    def daemon_pid(self) -> int:
        return self._wire.process.pid if self._wire is not None else 0

    def fileno(self) -> int | None:
        return self._wire.fileno() if self._wire is not None and not self._eof else None

    def wake_after(self, now: float) -> float:
        """Seconds until `advance` has something to do even if nothing arrives."""
        if self.phase is Phase.DOWN:
            return max(0.001, self._knocks.wait_s(now))
        return self._silence.ask_after_s / 2

    def queued(self) -> int:
        return len(self._wire.outbox) if self._wire is not None else 0

    def push(self, frames: Sequence[Frame], *, urgent: bool = False) -> None:
        """Queues and tries to send. Raises ClientError OVERLOADED; needs a connection."""
        assert self._wire is not None
        self._wire.outbox.push(frames, urgent=urgent)
        self._wire.flush()

    # --- the clockwork -------------------------------------------------------------------------

    def advance(self, now: float) -> None:
        """Does all that can be done without waiting."""
        gap = min(max(0.0, now - self._last), self._hang_s / 4)
        self._last = now
        if self.phase is Phase.DOWN and self._knocks.due(now):
            self._connect(now)
            gap = 0.0  # what passed before is no time that this connection was waited for
        if self._wire is not None:
            try:
                self._wire.flush()
                drained = self._read(now)
            except PeerClosed:
                self._at_eof(now, gap)
            except Garbled as exc:
                self._count("garbled")
                self._leave(
                    now, Code.BAD_MESSAGE, f"the daemon at {self._path}: {exc}", trust=False
                )
            else:
                # While something is left to be read, nothing is known to be missing. But one that
                # talks without end must not put off its own end.
                if drained or self.phase is Phase.LEAVING:
                    self._watch(now, gap)
            if self.phase is Phase.DOWN and self._knocks.due(now):
                self._connect(now)
        if self._wire is not None:
            self._wire.flush()
        self._tracker.expire_notifies(now)

    # --- DOWN ----------------------------------------------------------------------------------

    def _connect(self, now: float) -> None:
        try:
            self._path = self._find_path()
            wire = Wire(self._path, max_frames=self._max_frames, max_bytes=self._max_bytes)
        except ClientError as exc:
            self._failed(now, exc.code, exc.detail)
        except BlockingIOError:
            self._failed(now, Code.OVERLOADED, f"the daemon at {self._path} accepts no one now")
        except OSError as exc:
            self._failed(now, *why_not(self._path, exc))
        else:
            self._wire = wire
            self._connected_at = now
            self._tracker.new_session()
            self._trusted, self._registered, self._eof = True, False, False
            self._waited_s = 0.0
            self._silence.heard(now)
            self.phase = Phase.GREETING
            wire.outbox.push([encode(self._hello())], urgent=True)

    def _failed(self, now: float, code: Code, detail: str) -> None:
        self._knocks.later(now, KNOCK_S if code is Code.DAEMON_GONE else float("inf"))
        self._tell_down(code, detail)

    def _tell_down(self, code: Code, detail: str) -> None:
        self.last_error = ClientError(code, detail)
        if self._told is not code:
            self._told = code
            self._tracker.tell(Down(code, detail))

    # --- reading -------------------------------------------------------------------------------

    def _read(self, now: float) -> bool:
        """True if everything that had come was read."""
        for _ in range(MAX_READS):
            if self._wire is None:
                return True
            data = self._wire.receive()
            if data is None:
                return True
            self._silence.heard(now)
            if not self._trusted:
                self._count("ignored")
                continue
            try:
                message = _decoder.decode(data)
            except msgspec.MsgspecError as exc:
                raise Garbled(f"a frame that is no message: {exc}") from exc
            self._handle(message, now)
        return False

    def _handle(self, message: local.ToShim, now: float) -> None:
        match message:
            case local.FetchDone():
                self._tracker.fetch_done(message)
            case local.OfferEnded():
                self._tracker.end_offer((message.transfer_id, message.generation), message.reason)
            case local.NotifyDone():
                self._tracker.notify_done(message)
            case local.OfferRead():
                if self._tracker.holds((message.transfer_id, message.generation)):
                    self._tracker.tell(message)
            case local.Pong():
                pass  # anything that arrives ends a silence
            case local.State():
                self.draining = message.draining
                if self.phase is Phase.UP:
                    self._tracker.tell(message)
            case local.Welcome():
                self._on_welcome(message, now)
            case local.Registered():
                if self.phase is not Phase.REGISTERING or not self._registered:
                    raise Garbled("Registered, which nobody asked for")
                self._on_registered()
            case local.Refused():
                code = Code(message.code) if message.code in set(Code) else Code.INTERNAL
                self._knocks.rarely()
                self._leave(now, code, f"the daemon at {self._path} refused: {message.detail}")
            case _:
                assert_never(message)

    def _on_welcome(self, message: local.Welcome, now: float) -> None:
        if self.phase is not Phase.GREETING:
            raise Garbled("Welcome, a second time")
        if message.proto_major != PROTO_MAJOR:
            self._knocks.rarely()
            detail = (
                f"the daemon at {self._path} (version {message.version}) speaks protocol "
                f"{message.proto_major}, this engine {PROTO_MAJOR}"
            )
            self._leave(now, Code.VERSION_MISMATCH, detail)
            return
        self.welcome = message
        self.draining = message.draining
        self.phase = Phase.REGISTERING
        self._waited_s = 0.0
        self.register()

    def register(self) -> None:
        """Sends the memory's description, if there is one yet and it was not sent."""
        if self.phase is not Phase.REGISTERING or self._registered or self._wire is None:
            return
        frames = self._registration()
        if frames is not None:
            self._registered = True
            # As many as the engine has segments and layers, not as many as it likes: no bound.
            self._wire.outbox.push(frames, urgent=True)

    def _on_registered(self) -> None:
        assert self.welcome is not None
        restarted = self._boot_id is not None and self._boot_id != self.welcome.boot_id
        self._boot_id = self.welcome.boot_id
        self._knocks.succeeded()
        self._told = self.last_error = None
        self._ignored_by = None
        self.phase = Phase.UP
        self._count("registrations")
        self._tracker.tell(Up(self.welcome, restarted))
        if self.draining != self.welcome.draining:
            self._tracker.tell(local.State(draining=self.draining))

    # --- watching ------------------------------------------------------------------------------

    def _watch(self, now: float, gap: float) -> None:
        """Everything that had come was read: what is missing now is really missing."""
        match self.phase:
            case Phase.GREETING:
                self._waited_s += gap
                if self._waited_s >= self._connect_timeout_s:
                    why = f"it does not answer for {self._connect_timeout_s:g} s"
                    self._leave(now, Code.DAEMON_GONE, f"the daemon at {self._path}: {why}")
                    # So long a wait needs no pause after it.
                    self._knocks.at_once(now)
            case Phase.REGISTERING:
                # It reads nothing while it maps the memory, so a Ping would prove nothing.
                self._waited_s += gap if self._registered else 0.0
                if self._waited_s >= REGISTER_TIMEOUT_S:
                    why = "it does not finish mapping the engine's memory"
                    self._leave(now, Code.DEADLINE, f"the daemon at {self._path}: {why}")
            case Phase.UP:
                if self._silence.passes(now, gap) and self._wire is not None:
                    ping = local.Ping(seq=self._count("pings"))
                    self._wire.outbox.push([encode(ping)], urgent=True)
                if self._silence.seconds >= self._hang_s:
                    why = f"it is silent for {self._hang_s:g} s"
                    self._leave(
                        now, Code.DAEMON_GONE, f"the daemon at {self._path}: {why}", kill=True
                    )
                else:
                    self._watch_work(now)
            case Phase.LEAVING:
                self._watch_leaving(now, gap)
            case Phase.DOWN:
                pass

    def _watch_work(self, now: float) -> None:
        if self._silence.seconds >= self._silence.ask_after_s and self._wire is not None:
            # The daemon keeps the leases, but it does not keep this one now.
            for transfer_id, generation in self._tracker.expire_offers(now):
                self._wire.outbox.push([encode(local.Revoke(transfer_id, generation))], urgent=True)
        fetch_id = self._tracker.overdue(now)
        if fetch_id is not None:
            why = f"it never told the end of fetch {fetch_id}"
            self._leave(now, Code.DEADLINE, f"the daemon at {self._path}: {why}")

    def _watch_leaving(self, now: float, gap: float) -> None:
        assert self._wire is not None
        self._waited_s += gap
        if not self._tracker.num_fetches:
            self._gone(now)
        elif self._wire.process.exited():
            self._closed(now, Code.DAEMON_GONE, f"the daemon at {self._path} died")
        elif self._eof:
            self._watch_dying(now)
        elif self._waited_s >= self._leave_limit_s and self._wire.process.end(
            f"the daemon at {self._path} does not end its copies", self._tracker.num_fetches
        ):
            self._count("kills")

    def _watch_dying(self, now: float) -> None:
        """EOF was read, and the exit of the process was not seen."""
        assert self._wire is not None
        lives = self._wire.process.lives()
        late = self._waited_s >= self._leave_limit_s
        if late and lives is None:
            log.error(
                "kvd: the daemon at %s closed; whether its work on the GPU has ended cannot be "
                "seen from here: the blocks of %d fetches are given back after %.0f s",
                self._path, self._tracker.num_fetches, self._waited_s,
            )  # fmt: skip
        elif late and not lives:
            self._leave_limit_s = float("inf")  # said once
            log.error(
                "kvd: the process of the daemon at %s does not finish exiting; the blocks of %d "
                "fetches stay held until it has", self._path, self._tracker.num_fetches,
            )  # fmt: skip
        if lives or (late and lives is None):
            self._closed(now, Code.DAEMON_GONE, f"the daemon at {self._path} closed")

    # --- the end -------------------------------------------------------------------------------

    def leave(self, now: float, code: Code, detail: str) -> None:
        """For the client's close: ask for the end of everything."""
        if self._wire is None:
            return
        self._wire.outbox.push([encode(local.Bye())], urgent=True)
        self._wire.flush()
        self._leave(now, code, detail)

    def _leave(
        self, now: float, code: Code, detail: str, *, trust: bool = True, kill: bool = False
    ) -> None:
        """Gives the connection up, but not the fetches: those need the daemon's stillness."""
        self._trusted = self._trusted and trust
        if self.phase is not Phase.LEAVING:
            self._tell_down(code, detail)
            self._tracker.end_all_offers(Code.DAEMON_GONE)
            self._tracker.fail_notifies(Code.DAEMON_GONE)
            if self.phase in (Phase.GREETING, Phase.REGISTERING) and self._wire is not None:
                self._ignored_by = self._wire.process.pid
            self.phase = Phase.LEAVING
            self._waited_s = 0.0
            self._leave_limit_s = 0.0 if kill else LEAVE_HANGS * self._hang_s
        if not self._tracker.num_fetches:
            self._gone(now)
        elif self._wire is not None:
            self._wire.hang_up()
            self._watch_leaving(now, 0.0)

    def _at_eof(self, now: float, gap: float) -> None:
        """The daemon's end is closed, by itself or by its death."""
        if self._eof:
            self._watch(now, gap)
        elif self._tracker.num_fetches and self._on_gpu():
            self._eof = True
            self._waited_s, self._leave_limit_s = 0.0, LEAVE_HANGS * self._hang_s
            self._leave(now, Code.DAEMON_GONE, f"the daemon at {self._path} closed")
        else:
            self._closed(now, Code.DAEMON_GONE, f"the daemon at {self._path} closed")

    def _closed(self, now: float, code: Code, detail: str) -> None:
        """The daemon copies nothing for us any more."""
        if self.phase is not Phase.LEAVING:
            self._tell_down(code, detail)
        self._tracker.end_all_offers(Code.DAEMON_GONE)
        self._tracker.fail_notifies(Code.DAEMON_GONE)
        self._tracker.fail_fetches(Code.DAEMON_GONE, detail)
        self._gone(now)
        if now - self._connected_at >= KNOCK_S:
            # It died, rather than sent us away. An engine that idled sees this late: the next
            # daemon may be there already.
            self._knocks.at_once(now)

    def _gone(self, now: float) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        self.phase = Phase.DOWN
        self.draining = False
        self._knocks.later(now)

    def drop(self) -> None:
        """Closes the socket whatever is outstanding; the engine is going away."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        self.phase = Phase.DOWN

    def _count(self, what: str) -> int:
        self._tracker.counts[what] += 1
        return self._tracker.counts[what]
