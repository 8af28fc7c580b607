"""Frames and file descriptors over a connected AF_UNIX SOCK_SEQPACKET socket, on the event loop.

uvloop has no transport for SEQPACKET, so this reads and writes the socket itself when the loop
says that it is ready. It never blocks, and never holds more than a bounded outbound queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path

from kvd.protocol.local import MAX_FRAME

MAX_PATH = 107
"""Bytes that fit in sockaddr_un beside the final NUL."""

SO_PEERGROUPS = 59
"""Not in Python's socket module; Linux 4.13."""
MAX_GROUPS = 256

READ_BUDGET = 32
"""Frames read per wake-up, so that one busy neighbour does not keep the loop to itself."""


class End(StrEnum):
    """Why a connection ended."""

    EOF = "eof"
    TRUNCATED = "frame_too_long"
    TOO_MANY_FDS = "too_many_fds"
    QUEUE_FULL = "queue_full"
    OS_ERROR = "os_error"


class FrameSocket:
    """One connection. `on_frame(data, fds)` may take fds out of its list; what stays is closed.

    `on_end(end, detail)` comes once, when nothing more will be read; the descriptor stays open
    until `close`, because its EOF may be a promise to the other side.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        *,
        on_frame: Callable[[bytes, list[int]], None],
        on_end: Callable[[End, str], None],
        max_fds: int,
        max_queue: int,
    ) -> None:
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self._on_frame = on_frame
        self._on_end = on_end
        self._max_queue = max_queue
        self._cmsg_space = socket.CMSG_SPACE(4 * max_fds)
        self._buffer = bytearray(MAX_FRAME)
        self._queue: deque[tuple[bytes, list[int]]] = deque()
        self._reading = False
        self._writing = False
        self._ended = False
        self.closed = False

    @property
    def ended(self) -> bool:
        """Whether `on_end` was called."""
        return self._ended

    def fileno(self) -> int:
        return self._sock.fileno()

    def peercred(self) -> tuple[int, int, int]:
        """pid, uid and gid of the process at the other end, as the kernel knows them."""
        return peercred(self._sock)

    def start(self) -> None:
        """Starts, or starts again, to read."""
        if not (self._reading or self._ended or self.closed):
            self._reading = True
            self._loop.add_reader(self._sock.fileno(), self._read)

    def pause(self) -> None:
        """Leaves what arrives in the kernel's queue."""
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._sock.fileno())

    def send(self, data: bytes, fds: Sequence[int] = ()) -> bool:
        """Sends one frame, now or when there is room; `fds` are closed once sent or given up.

        False when the connection is over, or was ended by this call (queue full, peer gone).
        """
        own = list(fds)
        if self._ended or self.closed or not data:
            _close_fds(own)
            return False
        if len(data) > MAX_FRAME:
            _close_fds(own)
            self._end(End.OS_ERROR, f"a frame of {len(data)} bytes cannot be sent")
            return False
        if self._queue:
            if len(self._queue) >= self._max_queue:
                _close_fds(own)
                self._end(End.QUEUE_FULL, f"{len(self._queue)} frames wait to be read")
                return False
            self._queue.append((data, own))
            return True
        if self._send_now(data, own):
            return not self._ended
        self._queue.append((data, own))
        self._writing = True
        self._loop.add_writer(self._sock.fileno(), self._flush)
        return True

    @property
    def queued(self) -> int:
        """Frames that wait for the other side to read."""
        return len(self._queue)

    def close(self) -> None:
        """Closes the descriptor. Frames that the other side has not read yet stay readable."""
        if self.closed:
            return
        self._stop()
        self.closed = True
        with contextlib.suppress(OSError):
            # Unread input at close would turn what the other side reads next into ECONNRESET.
            self._sock.shutdown(socket.SHUT_RDWR)
        for _ in range(4096):
            try:
                if not self._sock.recv(1, socket.MSG_DONTWAIT):
                    break
            except OSError:
                break
        self._sock.close()

    # --- inside ---------------------------------------------------------------------------

    def _stop(self) -> None:
        self.pause()
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock.fileno())
        while self._queue:
            _close_fds(self._queue.popleft()[1])

    def _end(self, end: End, detail: str) -> None:
        if self._ended or self.closed:
            return
        self._ended = True
        self._stop()
        self._on_end(end, detail)

    def _send_now(self, data: bytes, fds: list[int]) -> bool:
        """Whether the frame is out of our hands (sent, or the connection ended)."""
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]
        try:
            self._sock.sendmsg([data], ancillary if fds else [], socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as e:
            _close_fds(fds)
            if e.errno in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
                # What the other side sent before it closed is still to be read: EOF comes there.
                if not self._reading:
                    self._end(End.EOF, "closed by the other side")
            else:
                self._end(End.OS_ERROR, os.strerror(e.errno or 0))
            return True
        _close_fds(fds)
        return True

    def _flush(self) -> None:
        while self._queue:
            data, fds = self._queue[0]
            if not self._send_now(data, fds):
                return
            if self._ended:
                return
            self._queue.popleft()
        self._writing = False
        self._loop.remove_writer(self._sock.fileno())

    def _read(self) -> None:
        for _ in range(READ_BUDGET):
            if not self._reading or not self._read_one():
                return

    def _read_one(self) -> bool:
        try:
            n, ancillary, flags, _ = self._sock.recvmsg_into(
                [self._buffer], self._cmsg_space, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as e:
            if e.errno == errno.ECONNRESET:
                self._end(End.EOF, "reset by the other side")
            else:
                self._end(End.OS_ERROR, os.strerror(e.errno or 0))
            return False
        fds = received_fds(ancillary)
        try:
            if flags & socket.MSG_CTRUNC:
                self._end(End.TOO_MANY_FDS, "more file descriptors than a frame may carry")
            elif flags & socket.MSG_TRUNC:
                self._end(End.TRUNCATED, f"a frame of more than {MAX_FRAME} bytes")
            elif n == 0:
                self._end(End.EOF, "closed by the other side")
            else:
                self._on_frame(bytes(memoryview(self._buffer)[:n]), fds)
                return True
        finally:
            _close_fds(fds)
        return False


def peercred(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of a connected Unix socket's other end; a listener's for a client."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return pid, uid, gid


def uid_refusal(uid: int, what: str) -> str | None:
    """Why a process of `uid` may not talk to us, naming both uids; None when it may."""
    own = os.geteuid()
    if uid in (own, 0):
        return None
    return (
        f"{what} runs as uid {uid}, this daemon as uid {own}: "
        "run both as the same user (memory is shared by file descriptors)"
    )


def engine_refusal(sock: socket.socket, gid: int | None, what: str) -> str | None:
    """Why the process at the other end may not register as an engine; None when it may.

    It may as our user, as root, or as a member of group `gid`.
    """
    _, uid, own_gid = peercred(sock)
    refusal = uid_refusal(uid, what)
    if refusal is None or gid is None:
        return refusal
    if gid == own_gid or gid in _groups(sock):
        return None
    return f"{refusal}, or make its user a member of group {gid} (socket_group)"


def _groups(sock: socket.socket) -> tuple[int, ...]:
    """Supplementary groups of the process at the other end, as far as they can be known."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, MAX_GROUPS * 4)
    except OSError:
        return ()
    return struct.unpack(f"{len(raw) // 4}I", raw)


def received_fds(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors among what recvmsg returned, in order."""
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            whole = len(data) - len(data) % 4
            fds.extend(struct.unpack(f"{whole // 4}i", data[:whole]))
    return fds


def _close_fds(fds: list[int]) -> None:
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.pop())


@contextlib.contextmanager
def short_address(path: str) -> Iterator[str]:
    """An address for `path` that fits in sockaddr_un however long the path is.

    A long one is reached through a descriptor of its folder. Raises OSError as open does.
    """
    if len(os.fsencode(path)) <= MAX_PATH:
        yield path
        return
    folder = os.open(Path(path).parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{Path(path).name}"
    finally:
        os.close(folder)


def connect(path: str, kind: int = socket.SOCK_SEQPACKET) -> socket.socket:
    """A non-blocking connection. Raises OSError; EAGAIN when the backlog is full."""
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        with short_address(path) as address:
            sock.connect(address)
    except BaseException:
        sock.close()
        raise
    return sock
