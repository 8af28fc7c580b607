"""The link between daemons on one host: a Unix SEQPACKET connection that carries memory.

The consumer's daemon connects to the path that the producer's PeerWelcome named. Each proves to
the other that it is the one on the ZMQ connection: the consumer by a hash of the welcome's nonce,
the producer by the nonce itself inside a memfd (which only a process on this kernel can pass).
The connection then stays open, and its EOF says at once that the other daemon is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
from collections.abc import Callable
from hashlib import blake2b

import msgspec
import structlog

from kvd.errors import KvdError, MemoryRefused, ProtocolError
from kvd.local.seqpacket import End, FrameSocket, connect, uid_refusal
from kvd.peers.wire import code_of
from kvd.protocol.codes import Code
from kvd.protocol.types import U63, Id, Struct

log = structlog.get_logger("kvd.link")

FDS_PER_FRAME = 200
MAX_FDS = 4097
"""Segments of one engine and its fence table."""
MAX_WANTS = 64
"""Requests for memory in flight on one link."""
MAX_QUEUE = 256
NONCE_NBYTES = 16


class LinkMessage(Struct, frozen=True, tag_field="t", tag=lambda name: name):
    """Base of the messages on a link."""


class LinkHello(LinkMessage, frozen=True):
    """First frame, from the consumer: `proof` is `link_proof(nonce)` of its PeerWelcome."""

    daemon_id: Id
    boot_id: U63
    proof: bytes


class LinkProof(LinkMessage, frozen=True):
    """Answer; carries one fd, a memfd that holds the nonce."""


class LinkWant(LinkMessage, frozen=True):
    seq: U63
    memory_key: U63


class LinkMemory(LinkMessage, frozen=True):
    """Part of an answer to LinkWant, with fds; `more` says that another frame follows."""

    seq: U63
    more: bool
    code: str = "ok"
    detail: str = ""


LinkFrame = LinkHello | LinkProof | LinkWant | LinkMemory

decoder = msgspec.msgpack.Decoder(LinkFrame)
encode = msgspec.msgpack.Encoder().encode


def link_proof(nonce: bytes) -> bytes:
    """What the consumer shows: it knows the nonce, and does not give it away."""
    return blake2b(nonce, person=b"kvd-link", digest_size=16).digest()


def nonce_memfd(nonce: bytes) -> int:
    """A memfd with the nonce in it; the caller closes it."""
    fd = os.memfd_create("kvd-nonce", os.MFD_CLOEXEC)
    try:
        os.write(fd, nonce)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_nonce(fd: int) -> bytes:
    """The nonce in a passed memfd. Raises ProtocolError when it is none."""
    try:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:"):
            raise ProtocolError("the link's proof is no memfd")
        return os.pread(fd, NONCE_NBYTES + 1, 0)
    except OSError as e:
        raise ProtocolError(f"the link's proof cannot be read: {e}") from None


class LinkClient:
    """The consumer's end. `on_eof(detail)` comes once, if the link breaks after it opened."""

    def __init__(self, on_eof: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_eof = on_eof
        self._frames: FrameSocket | None = None
        self._proof: asyncio.Future[bytes] | None = None
        self._wants: dict[int, asyncio.Future[list[int]]] = {}
        self._parts: dict[int, list[int]] = {}
        self._seq = 0
        self._open = False

    async def open(
        self, path: str, *, daemon_id: str, boot_id: int, nonce: bytes, timeout_s: float
    ) -> None:
        """Connects and proves both ends. Raises KvdError(TRANSPORT_UNAVAILABLE)."""
        try:
            sock = connect(path)
        except OSError as e:
            raise KvdError(
                f"no link at {path}: {os.strerror(e.errno or 0)}", Code.TRANSPORT_UNAVAILABLE
            ) from None
        self._frames = FrameSocket(
            self._loop,
            sock,
            on_frame=self._on_frame,
            on_end=self._on_end,
            max_fds=FDS_PER_FRAME,
            max_queue=MAX_QUEUE,
        )
        try:
            refusal = uid_refusal(self._frames.peercred()[1], "the other daemon")
            if refusal is not None:
                raise KvdError(refusal, Code.TRANSPORT_UNAVAILABLE)
            self._proof = self._loop.create_future()
            self._frames.start()
            self._frames.send(encode(LinkHello(daemon_id, boot_id, link_proof(nonce))))
            async with asyncio.timeout(timeout_s):
                shown = await self._proof
            if not hmac.compare_digest(shown, nonce):
                raise KvdError(f"another daemon answers at {path}", Code.TRANSPORT_UNAVAILABLE)
        except TimeoutError:
            self.close()
            raise KvdError(
                f"the link at {path} did not answer within {timeout_s:g} s",
                Code.TRANSPORT_UNAVAILABLE,
            ) from None
        except BaseException:
            self.close()
            raise
        self._open = True

    async def memory(self, memory_key: int, timeout_s: float) -> list[int]:
        """Read-only fds of an engine's segments, the fence table last; the caller closes them.

        Raises KvdError with the producer's code, PEER_LOST or DEADLINE.
        """
        frames = self._frames
        if frames is None or frames.ended:
            raise KvdError("the link is down", Code.PEER_LOST)
        if len(self._wants) >= MAX_WANTS:
            raise KvdError(f"{MAX_WANTS} requests wait on the link", Code.OVERLOADED)
        self._seq += 1
        seq = self._seq
        future: asyncio.Future[list[int]] = self._loop.create_future()
        self._wants[seq], self._parts[seq] = future, []
        frames.send(encode(LinkWant(seq, memory_key)))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise KvdError(
                f"no memory over the link within {timeout_s:g} s", Code.DEADLINE
            ) from None
        finally:
            self._wants.pop(seq, None)
            _close_fds(self._parts.pop(seq, []))

    def close(self) -> None:
        """Closes the connection; what waits on it fails."""
        self._open = False
        if self._frames is not None:
            self._frames.close()
        self._fail("the link is closed")

    def _on_frame(self, data: bytes, fds: list[int]) -> None:
        try:
            message = decoder.decode(data)
        except msgspec.MsgspecError as e:
            self._break(f"a frame that is no message of ours: {str(e)[:200]}")
            return
        match message:
            case LinkProof() if self._proof is not None and not self._proof.done():
                try:
                    if len(fds) != 1:
                        raise ProtocolError(f"a proof with {len(fds)} descriptors")
                    self._proof.set_result(read_nonce(fds[0]))
                except ProtocolError as e:
                    self._proof.set_exception(e)
            case LinkMemory():
                self._take_memory(message, fds)
            case _:
                self._break(f"{type(message).__name__} does not belong on this end")

    def _take_memory(self, message: LinkMemory, fds: list[int]) -> None:
        future = self._wants.get(message.seq)
        if future is None or future.done():
            return
        parts = self._parts[message.seq]
        if message.code != Code.OK:
            future.set_exception(KvdError(message.detail[:500], code_of(message.code)))
        elif len(parts) + len(fds) > MAX_FDS:
            future.set_exception(MemoryRefused(f"more than {MAX_FDS} descriptors"))
        else:
            parts.extend(fds)
            fds.clear()
            if not message.more:
                self._parts[message.seq] = []
                future.set_result(parts)

    def _on_end(self, end: End, detail: str) -> None:
        self._break(f"{end}: {detail}")

    def _break(self, detail: str) -> None:
        was_open = self._open
        if self._frames is not None:
            self._frames.close()
        self._open = False
        self._fail(detail)
        if was_open:
            self._on_eof(detail)

    def _fail(self, detail: str) -> None:
        error = KvdError(f"the link broke: {detail}", Code.PEER_LOST)
        waiting: list[asyncio.Future[bytes] | asyncio.Future[list[int]]] = [*self._wants.values()]
        if self._proof is not None:
            waiting.append(self._proof)
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # who waited may be gone already


def _close_fds(fds: list[int]) -> None:
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.pop())
