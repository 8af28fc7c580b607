"""One shim's connection: order of messages, limits, and the end of it.

The socket stays open, unread, from the moment the session ends until the daemon says that no
copy touches the engine's memory any more: the shim takes its EOF for exactly that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import Protocol

import msgspec
import structlog

from kvd.drops import Drops
from kvd.errors import KvdError, ProtocolError
from kvd.local.registration import Registration
from kvd.local.seqpacket import End, FrameSocket
from kvd.memory.engine import EngineMemory
from kvd.protocol import local
from kvd.protocol.codes import Code
from kvd.protocol.version import PROTO_MAJOR, PROTO_MINOR

log = structlog.get_logger("kvd.session")

HELLO_TIMEOUT_S = 5.0
REFUSED_GRACE_S = 2.0
"""How long a refused shim may take to go by itself."""

_decoder = msgspec.msgpack.Decoder(local.FromShim)
_encoder = msgspec.msgpack.Encoder()


class Stage(Enum):
    HELLO = "hello"
    OPEN = "open"
    MAPPING = "mapping"
    REGISTERED = "registered"
    ENDED = "ended"


class SessionHost(Protocol):
    """What a session needs of the daemon around it."""

    def session_hello(self, session: Session, hello: local.Hello) -> None:
        """Lets it in (SessionOpened, Welcome) or calls `session.refuse`."""

    def session_described(self, session: Session, registration: Registration) -> None:
        """Maps the memory off the loop, then calls `mapped` or `refuse`."""

    def session_message(self, session: Session, message: local.FromShim) -> None: ...

    def session_ended(self, session: Session, reason: str, detail: str) -> None:
        """EOF, Bye or thrown out. Called once, also for one that never said Hello."""


class Session:
    """See the module's text. `memory` is the engine's, once it is mapped."""

    def __init__(
        self,
        number: int,
        host: SessionHost,
        drops: Drops,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.number = number
        self.hello: local.Hello | None = None
        self.memory: EngineMemory | None = None
        self.block_size = 0
        """Tokens per block of the engine, once its memory is described."""
        self.stage = Stage.HELLO
        self.refused = False
        self._host = host
        self._drops = drops
        self._loop = loop
        self._registration = Registration()
        self._held: list[local.ToShim] = []
        self._frames: FrameSocket | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, frames: FrameSocket) -> None:
        """Begins to read; Hello must come soon."""
        self._frames = frames
        self._timer = self._loop.call_later(HELLO_TIMEOUT_S, self._no_hello)
        frames.start()

    @property
    def known(self) -> bool:
        """Whether the core was told of this session."""
        return self.hello is not None

    # --- from the daemon ------------------------------------------------------------------

    def welcome(self, message: local.Welcome) -> None:
        """Answers Hello, unless it was refused meanwhile: memory may be described now."""
        if self.stage is Stage.HELLO and not self.refused:
            self.stage = Stage.OPEN
            for held in [message, *self._held]:
                self.send(held)
            self._held.clear()

    def mapped(self, memory: EngineMemory) -> None:
        """The memory that `Register` closed is mapped; the session is read again.

        A session that ended meanwhile keeps it too, until `close`.
        """
        self.memory = memory
        if self.stage is Stage.MAPPING:
            self.stage = Stage.REGISTERED
            self._read_on()

    def registered(self) -> None:
        """The core knows the memory: offers and fetches may come, unless it refused."""
        if self.stage is Stage.REGISTERED and not self.refused and self.memory is not None:
            self.send(local.Registered(self.memory.nbytes))

    def send(self, message: local.ToShim) -> None:
        """Sends or queues; a shim that does not read is thrown out at the queue's bound."""
        if self._frames is None:
            return
        if self.stage is Stage.HELLO and not isinstance(message, local.Refused):
            self._held.append(message)  # Welcome is what a shim hears first
            return
        data = _encoder.encode(message)
        if len(data) > local.MAX_FRAME:
            self.throw_out(
                Code.INTERNAL, f"{type(message).__name__} of {len(data)} bytes fits in no frame"
            )
            return
        self._frames.send(data)

    def refuse(self, code: Code, detail: str) -> None:
        """Tells the shim why, and ends the session."""
        if self.stage is Stage.ENDED:
            return
        self.send(local.Refused(code=code, detail=detail[:2000]))
        self.throw_out(code, detail)

    def refused_by_core(self) -> None:
        """A Refused is on its way: if the shim does not go, it is thrown out."""
        self.refused = True
        self._set_timer(REFUSED_GRACE_S, lambda: self._end("refused", "refused, and did not go"))
        self._read_on()

    def throw_out(self, code: Code, detail: str) -> None:
        """Ends the session from our side."""
        self._end(str(code), detail)

    def stop(self) -> None:
        """Reads nothing more; the socket stays open."""
        if self.stage is not Stage.MAPPING:
            self._registration.close()
        self.stage = Stage.ENDED
        self._cancel_timer()
        if self._frames is not None:
            self._frames.pause()

    def close(self) -> None:
        """Closes the socket; the memory must be unmapped by then."""
        self.stop()
        if self._frames is not None:
            self._frames.close()

    # --- from the socket ------------------------------------------------------------------

    def on_frame(self, data: bytes, fds: list[int]) -> None:
        """One frame, with the descriptors that came in it."""
        if self.stage is Stage.ENDED:
            return
        try:
            message = _decoder.decode(data)
        except msgspec.MsgspecError as e:
            self._drops.drop("session", "undecodable", session=self.number, detail=str(e)[:200])
            self.refuse(Code.BAD_MESSAGE, f"a frame that is no message of ours: {str(e)[:200]}")
            return
        try:
            self._take(message, fds)
            if fds:
                raise ProtocolError(f"{type(message).__name__} carries no file descriptor")
        except KvdError as e:
            self._drops.drop("session", str(e.code), session=self.number, detail=e.detail)
            self.refuse(e.code, e.detail)

    def on_end(self, end: End, detail: str) -> None:
        """The connection is over."""
        if end is not End.EOF and self.stage is not Stage.ENDED:
            self._drops.drop("session", str(end), session=self.number, detail=detail)
        self._end(str(end), detail)

    # --- inside ---------------------------------------------------------------------------

    def _take(self, message: local.FromShim, fds: list[int]) -> None:
        match message:
            case local.Hello():
                if self.stage is not Stage.HELLO or self.hello is not None:
                    raise ProtocolError("a second Hello")
                self._hello(message)
            case local.Bye():
                self._end("bye", "")
            case _ if self.stage is Stage.HELLO:
                raise ProtocolError(f"{type(message).__name__} before Hello")
            case local.AddSegment() | local.AddFence() | local.AddLayers() | local.Register():
                if self.stage is not Stage.OPEN:
                    raise ProtocolError(f"{type(message).__name__} after Register")
                if self._registration.add(message, fds):
                    self.stage = Stage.MAPPING
                    # Nothing that follows could be used before the memory is there.
                    if self._frames is not None:
                        self._frames.pause()
                    self._host.session_described(self, self._registration)
            case _ if self.stage is not Stage.REGISTERED and not isinstance(message, local.Ping):
                raise ProtocolError(
                    f"{type(message).__name__} before Register", Code.NOT_REGISTERED
                )
            case _:
                self._host.session_message(self, message)

    def _hello(self, message: local.Hello) -> None:
        self._cancel_timer()
        if message.proto_major != PROTO_MAJOR:
            raise ProtocolError(
                f"proto_major: the shim speaks {message.proto_major}.{message.proto_minor}, "
                f"this daemon {PROTO_MAJOR}.{PROTO_MINOR}: install the same major version",
                Code.VERSION_MISMATCH,
            )
        self.hello = message
        self._host.session_hello(self, message)

    def _no_hello(self) -> None:
        self._timer = None
        self._drops.drop("session", "no_hello", session=self.number)
        self._end("no_hello", f"no Hello within {HELLO_TIMEOUT_S} s")

    def _read_on(self) -> None:
        if self._frames is not None and self.stage is not Stage.ENDED:
            self._frames.start()

    def _end(self, reason: str, detail: str) -> None:
        if self.stage is Stage.ENDED:
            return
        self.stop()
        self._host.session_ended(self, reason, detail)

    def _set_timer(self, seconds: float, then: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_later(seconds, then)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
