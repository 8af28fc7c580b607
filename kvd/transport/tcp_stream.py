"""One data connection of a consumer: asks ahead, receives into blocks, and drains what is late."""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from functools import partial

import numpy as np

from kvd.errors import KvdError
from kvd.memory.engine import Stager
from kvd.memory.plan import addresses
from kvd.protocol.codes import Code
from kvd.transport.base import TransportError
from kvd.transport.channel import Channel, PlainChannel, TlsProblem
from kvd.transport.checksum import Checksum, blocks_crc
from kvd.transport.iov import Stretches, Vector, stretch
from kvd.transport.options import TransportOptions
from kvd.transport.pulse import Pulse
from kvd.transport.tcp_jobs import Chunk, Queue, State
from kvd.transport.tcp_socket import (
    Ended,
    Stalled,
    connect,
    receive_exactly,
    wait_ready,
    would_block,
)
from kvd.transport.tcp_wire import (
    CRC_BYTES,
    HEAD_BYTES,
    PREAMBLE_BYTES,
    BadFrame,
    Head,
    Kind,
    check_preamble,
    code_of,
    pack_request,
    preamble,
    unpack_crc,
    unpack_head,
)

NOTHING: Stretches = np.empty((0, 2), np.uint64)

AHEAD = 2
"""Requests under way on one stream, so that the link does not idle between them."""

RETRY_S = 1.0


class Group:
    """What the streams of one puller share: where to connect, and who is connected."""

    def __init__(self, host: str, port: int, options: TransportOptions, pulse: Pulse) -> None:
        self.pulse = pulse
        self.host = host
        self.port = port
        self.options = options
        self._lock = threading.Lock()
        self._hopeful = 0

    @property
    def where(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"data port {host}:{self.port}"

    def count(self, change: int) -> int:
        """Counts streams that are connected or about to be; returns how many those are now."""
        with self._lock:
            self._hopeful += change
            return self._hopeful


class Stream:
    """A thread with at most one connection, made when there is something to ask for."""

    def __init__(self, queue: Queue, group: Group, name: str) -> None:
        self._queue = queue
        self._group = group
        self._options = group.options
        self._lock = threading.Lock()
        self._sock: Channel | None = None
        self._used = False  # an answer came on this connection
        self._asked: deque[Chunk] = deque()
        self._out = bytearray()
        self._unsent: deque[int] = deque()  # bytes of each request that is not fully sent
        self._stager: Stager | None = None
        self._scratch = np.empty(2**20, np.uint8)
        self.connects = 0
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def shut(self) -> None:
        """Wakes the thread if it waits for its connection; for when the queue is closed."""
        with self._lock:
            if self._sock is not None:
                self._sock.shut()

    # --- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._ask():
                try:
                    self._connect()
                except Exception as exc:
                    self._unreachable(exc)
                    continue
                try:
                    self._flush()
                    self._answer(self._asked[0])
                    self._asked.popleft()
                except Exception as exc:
                    self._broken(exc)
        finally:
            self._disconnect()
            self._group.pulse.idle()
            if self._stager is not None:
                self._stager.close()

    def _ask(self) -> bool:
        """Fills up the requests under way; False when the queue was closed."""
        if not self._asked:
            self._group.pulse.idle()
            chunk = self._queue.take(wait=True)
            self._group.pulse.busy()
            if chunk is None:
                return False
            self._append(chunk)
        while len(self._asked) < AHEAD:
            chunk = self._queue.take(wait=False)
            if chunk is None:
                break
            self._append(chunk)
        return not self._queue.closed

    def _append(self, chunk: Chunk) -> None:
        frame = pack_request(chunk.request)
        self._asked.append(chunk)
        self._out += frame
        self._unsent.append(len(frame))

    def _go_on(self) -> bool:
        self._group.pulse.busy()
        if self._queue.local.closing:
            self._queue.fail_all(TransportError(Code.ENGINE_GONE, "our engine is gone"))
        return not self._queue.closed

    def _connect(self) -> None:
        if self._sock is not None:
            if len(self._unsent) < len(self._asked) or not self._stale():
                return
            # The producer let go of an idle connection; nothing is under way on it.
            self._disconnect()
        options = self._options
        deadline = time.monotonic() + options.connect_timeout_s
        group = self._group
        group.count(1)
        sock = connect(
            group.host, group.port, options.connect_timeout_s, options.tcp_congestion, self._go_on
        )
        channel: Channel = PlainChannel(sock)
        if options.tls is not None:
            channel = options.tls.connect(sock, deadline, self._go_on)
        try:
            # A new connection has room for these few bytes.
            channel.send(preamble())
            hello = receive_exactly(channel, PREAMBLE_BYTES, deadline, self._go_on)
            check_preamble(hello, checked=options.checked)
        except BaseException:
            channel.close()
            raise
        with self._lock:
            self._sock = channel
        frames = [pack_request(chunk.request) for chunk in self._asked]
        self._out = bytearray(b"".join(frames))
        self._unsent = deque(len(frame) for frame in frames)
        self._used = False
        self.connects += 1

    def _stale(self) -> bool:
        try:
            return self._socket().stale()
        except Ended:
            return True

    def _disconnect(self) -> None:
        with self._lock:
            sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()
            self._group.count(-1)

    def _flush(self) -> None:
        """Sends requests; waits only for the one that is to be answered next."""
        sock = self._socket()
        deadline = time.monotonic() + self._options.data_timeout_s
        while self._out:
            try:
                n = sock.send(bytes(self._out))
            except OSError as exc:
                if not would_block(exc):
                    raise
                n = 0
            del self._out[:n]
            while n and self._unsent:
                part = min(n, self._unsent[0])
                n -= part
                self._unsent[0] -= part
                if self._unsent[0]:
                    break
                self._unsent.popleft()
            if len(self._unsent) < len(self._asked):
                return
            wait_ready(sock, select.POLLOUT, deadline, self._go_on)

    def _answer(self, chunk: Chunk) -> None:
        head = self._head(chunk)
        if head.kind is Kind.REFUSED:
            self._queue.end(chunk, TransportError(code_of(head.code), head.detail))
            return
        if head.kind is not Kind.DATA or head.nbytes != chunk.request.nbytes:
            raise BadFrame(f"{head.kind.name} of {head.nbytes} bytes")
        arrived = self._receive(chunk)
        tail = self._head(chunk)
        if tail.kind is Kind.COMMIT:
            self._queue.end(chunk, self._compare(chunk, arrived))
        elif tail.kind is Kind.ABORT:
            self._queue.end(chunk, TransportError(code_of(tail.code), tail.detail))
        else:
            raise BadFrame(f"{tail.kind.name} where COMMIT or ABORT belongs")

    def _compare(self, chunk: Chunk, arrived: Checksum | None) -> TransportError | None:
        """What is wrong with the bytes of a chunk, by the checksum that follows its COMMIT."""
        if not chunk.request.checked:
            return None
        deadline = time.monotonic() + self._options.data_timeout_s
        sent = unpack_crc(receive_exactly(self._socket(), CRC_BYTES, deadline, self._go_on))
        if arrived is None:
            return TransportError(Code.CANCELLED, "its checksum was not wanted any more")
        if arrived == sent:
            return None
        where = f"{chunk.dst.size} blocks of job {chunk.job.job.job}"
        return TransportError(
            Code.INTEGRITY,
            f"{where}: checksum {arrived:#010x} of what arrived, {sent:#010x} of its source",
        )

    def _head(self, chunk: Chunk) -> Head:
        sock = self._socket()
        deadline = time.monotonic() + self._options.data_timeout_s
        head, code, detail = unpack_head(receive_exactly(sock, HEAD_BYTES, deadline, self._go_on))
        if head.request != chunk.request.request:
            raise BadFrame(f"answer to request {head.request}, not {chunk.request.request}")
        self._used = True
        self._queue.moved()
        if not code and not detail:
            return head
        text = receive_exactly(sock, code + detail, deadline, self._go_on)
        return Head(
            head.kind,
            head.request,
            head.nbytes,
            text[:code].decode(errors="replace"),
            text[code:].decode(errors="replace"),
        )

    def _receive(self, chunk: Chunk) -> Checksum | None:
        """Into the chunk's blocks; their checksum, if that is wanted and the chunk still is."""
        request = chunk.request
        landing = self._queue.begin_landing(chunk)
        local = self._queue.local
        stager: Stager | None = None
        stretches = NOTHING
        if landing:
            stretches = addresses(
                local, request.group, request.first_layer, request.num_layers, chunk.dst
            )
            if self._stager is None:
                self._stager = self._queue.local.stager()
            stager = self._stager
            if stager is None:
                vector = Vector(stretches)
            else:
                vector = Vector(stretch(stager.room(request.nbytes)))
        else:
            vector = Vector.repeated(self._scratch, request.nbytes)
        self._group.pulse.busy()
        timeout = self._options.data_timeout_s
        last = drained_since = time.monotonic()
        while vector.left:
            n = self._fill(vector)
            now = time.monotonic()
            if n:
                last = now
                self._queue.moved()
                if not landing:
                    self._queue.count_late(n)
            elif now - last > timeout:
                raise Stalled
            go_on = self._go_on()
            if landing and (chunk.job.over or not go_on):
                # From here on nothing is written into blocks, so the job may be told to be over.
                vector.redirect(self._scratch)
                landing, drained_since = False, now
                self._queue.give_up(chunk)
            if not go_on or (not landing and now - drained_since > timeout):
                raise Ended
        crc: Checksum | None = None
        if landing:
            if stager is not None:
                stager.put(stretches)
            if request.checked:
                # While it is LANDING the job keeps the memory pinned.
                wanted = partial(self._wanted, chunk)
                where = request.group, request.first_layer, request.num_layers
                crc = blocks_crc(local, *where, chunk.dst, wanted)
            self._queue.landed(chunk)
        return crc

    def _wanted(self, chunk: Chunk) -> bool:
        return self._go_on() and not chunk.job.over

    def _fill(self, vector: Vector) -> int:
        """One call; 0 if nothing came within a tick. Raises Ended at the end of the stream."""
        try:
            n = self._socket().fill(vector)
        except OSError as exc:
            if not would_block(exc):
                raise
            return 0
        if n == 0:
            raise Ended
        return n

    # --- when it goes wrong -----------------------------------------------------------------

    def _unreachable(self, exc: Exception) -> None:
        asked = self._forget()
        timeout = self._options.data_timeout_s
        if self._group.count(-1) and self._queue.still_for() < timeout:
            # Refused while others have theirs (a limit, most likely): leave the work to them.
            self._queue.put_back(asked)
            self._queue.wait_or_closed(RETRY_S)
            return
        match exc:
            case Stalled():
                why = f"no connection within {self._options.connect_timeout_s:g} s"
            case Ended() | ConnectionResetError():
                why = (
                    "closed at once (too many data connections, this host is not allowed, or the "
                    "other end asks for TLS)"
                )
            case _:
                why = str(exc) or repr(exc)
        code = Code.PEER_UNREACHABLE
        if isinstance(exc, BadFrame):
            code = Code.VERSION_MISMATCH
        elif isinstance(exc, TlsProblem):
            code, why = Code.PEER_NOT_ALLOWED, exc.strerror or why
        self._queue.fail_all(TransportError(code, f"{self._group.where}: {why}"))

    def _broken(self, exc: Exception) -> None:
        used = self._used
        self._disconnect()
        asked = self._forget()
        timeout = self._options.data_timeout_s
        if isinstance(exc, Stalled):
            why = f"nothing came for {timeout:g} s"
        elif isinstance(exc, Ended):
            why = "the connection ended"
        else:
            why = str(exc) or repr(exc)
        known = isinstance(exc, Stalled | Ended | OSError | BadFrame)
        code = Code.TRANSPORT_ERROR if known else Code.INTERNAL
        if isinstance(exc, KvdError):  # of a GPU, whose copies have ended all the same
            code, why = exc.code, exc.detail
        error = TransportError(code, f"{self._group.where}: {why}")
        first, *others = asked
        if isinstance(exc, Stalled) and self._queue.still_for() >= timeout:
            self._queue.end(first, error)
            self._queue.fail_all(error)
            return
        silent = first.state is State.ASKED and used and isinstance(exc, Ended | OSError)
        if not silent:
            # An idle connection may end just when it is used again; any other end is a failure.
            self._queue.end(first, error)
        for chunk in others if not silent else asked:
            if chunk.again:
                self._queue.end(chunk, error)
            chunk.again = True
        self._queue.put_back(asked)

    def _forget(self) -> list[Chunk]:
        asked = list(self._asked)
        self._asked.clear()
        self._out.clear()
        self._unsent.clear()
        return asked

    def _socket(self) -> Channel:
        if self._sock is None:
            raise Ended
        return self._sock
