"""One SEQPACKET connection to a daemon: frames out through a bounded queue, frames in."""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence

import msgspec

from connector_shim.errors import ClientError
from connector_shim.peerproc import PeerProcess
from kvd.protocol import local
from kvd.protocol.codes import Code

Frame = tuple[bytes, tuple[int, ...]]
"""What one message is on the socket: its bytes, and the descriptors that go with it."""

_encoder = msgspec.msgpack.Encoder()
_checker: msgspec.msgpack.Decoder[local.FromShim] = msgspec.msgpack.Decoder(local.FromShim)
_UCRED = struct.Struct("iII")
_FD = struct.calcsize("i")
_ANCILLARY = socket.CMSG_SPACE(_UCRED.size) + socket.CMSG_SPACE(_FD)
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN)
_FULL = (errno.EAGAIN, errno.ENOBUFS)


class PeerClosed(Exception):
    """The daemon closed the socket, or died: no thread of it copies for us any more. What a dying
    one has put on a GPU may still run."""


class Garbled(Exception):
    """Something came that no daemon sends. Nothing on this connection can be believed now."""


def encode(message: local.FromShim, *fds: int) -> Frame:
    """Raises ClientError BAD_MESSAGE for a message that the daemon would not take.

    It is read back as the daemon will read it: a value that came in with one request (an id of
    600 characters) must fail that request, and not the session, which all requests share.
    """
    try:
        data = _encoder.encode(message)
        _checker.decode(data)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as exc:
        raise ClientError(Code.BAD_MESSAGE, f"{type(message).__name__}: {exc}") from exc
    if len(data) > local.MAX_FRAME:
        raise ClientError(
            Code.BAD_MESSAGE,
            f"{type(message).__name__} has {len(data)} bytes; a frame holds {local.MAX_FRAME}",
        )
    return data, fds


class Outbox:
    """Frames that wait for the socket. Bounded, so that a daemon which does not read costs no
    memory here; what must never be refused (a Cancel, a Revoke) may go beyond the bound."""

    def __init__(self, max_frames: int, max_bytes: int) -> None:
        self._frames: deque[Frame] = deque()
        self._nbytes = 0
        self._max_frames = max_frames
        self._max_bytes = max_bytes

    def __len__(self) -> int:
        return len(self._frames)

    def push(self, frames: Sequence[Frame], *, urgent: bool = False) -> None:
        """All or none. Raises ClientError OVERLOADED beyond the bound.

        `urgent` frames are always taken: of each kind there is at most one for each offer and
        fetch that was let in, so their number is bounded too.
        """
        size = sum(len(data) for data, _ in frames)
        if not urgent and (
            len(self._frames) + len(frames) > self._max_frames
            or self._nbytes + size > self._max_bytes
        ):
            raise ClientError(
                Code.OVERLOADED,
                f"{len(self._frames)} messages ({self._nbytes} bytes) wait for the daemon already",
            )
        self._frames.extend(frames)
        self._nbytes += size

    def clear(self) -> None:
        self._frames.clear()
        self._nbytes = 0

    def flush(self, sock: socket.socket) -> None:
        """Sends what the socket takes. Raises OSError other than those that mean "later"."""
        while self._frames:
            data, fds = self._frames[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            try:
                sock.sendmsg([data], ancillary if fds else [])
            except OSError as exc:
                if exc.errno in _FULL:
                    return
                raise
            self._frames.popleft()
            self._nbytes -= len(data)


class Wire:
    """A connected socket. Raises OSError from the constructor if there is no connection to be had;
    BlockingIOError among them means that the daemon's backlog is full: try again later."""

    def __init__(self, path: str, *, max_frames: int, max_bytes: int) -> None:
        self._sock = socket.socket(
            socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        try:
            # Before connecting, so that each frame carries the process that sent it.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._sock.connect(path)
            self.process = PeerProcess(self._sock)
        except BaseException:
            self._sock.close()
            raise
        self.outbox = Outbox(max_frames, max_bytes)
        self._sender_known = False
        self._hung_up = False
        self._broken = ""

    def fileno(self) -> int:
        return self._sock.fileno()

    def flush(self) -> None:
        """Sends what the socket takes. Never raises: what is wrong is told by `receive`, once."""
        if self._hung_up:
            self.outbox.clear()
            return
        try:
            self.outbox.flush(self._sock)
        except OSError as exc:
            self.outbox.clear()
            if exc.errno not in _GONE:
                self._broken = f"cannot send: {exc}"

    def hang_up(self) -> None:
        """Nothing more is sent; the daemon reads EOF, stops its copies for us and closes."""
        if not self._hung_up:
            self._hung_up = True
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError as exc:
                if exc.errno not in _GONE:
                    raise

    def receive(self) -> bytes | None:
        """The next frame, or None if there is none now. Raises PeerClosed, Garbled."""
        if self._broken:
            broken, self._broken = self._broken, ""
            raise Garbled(broken)
        while True:
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(local.MAX_FRAME, _ANCILLARY)
            except BlockingIOError:
                return None
            except InterruptedError:
                continue
            except ConnectionResetError:
                # The daemon went without reading all that we sent. What it said before is still
                # there to be read, and then comes the end of it.
                continue
            self._look_at(ancillary)
            if flags & socket.MSG_TRUNC:
                raise Garbled("a frame larger than frames are")
            if data:
                return data
            if self._peer_closed():
                raise PeerClosed
            raise Garbled("an empty frame")

    def _look_at(self, ancillary: Sequence[tuple[int, int, bytes]]) -> None:
        passed = False
        for level, kind, payload in ancillary:
            if level != socket.SOL_SOCKET:
                continue
            if kind == socket.SCM_RIGHTS:
                passed = True
                for fd in array.array("i", payload[: len(payload) // _FD * _FD]):
                    os.close(fd)
            elif kind == socket.SCM_CREDENTIALS and not self._sender_known:
                pid, _, _ = _UCRED.unpack(payload[: _UCRED.size])
                if pid > 0:
                    self._sender_known = True
                    self.process.sender_is(pid)
        if passed:
            raise Garbled("a descriptor that was not asked for")

    def _peer_closed(self) -> bool:
        """An empty frame reads like the end; only a closed peer hangs the socket up, though."""
        poller = select.poll()
        poller.register(self._sock, 0)
        return any(event & select.POLLHUP for _, event in poller.poll(0))

    def close(self) -> None:
        self._sock.close()
        self.process.close()
