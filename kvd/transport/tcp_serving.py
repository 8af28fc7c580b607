"""One accepted data connection: reads requests, and answers each from mapped blocks."""

from __future__ import annotations

import socket
import threading
import time
from functools import partial
from typing import Protocol

import numpy as np

from kvd.errors import KvdError, MemoryRefused
from kvd.memory.engine import Stager
from kvd.memory.plan import addresses
from kvd.protocol.codes import Code
from kvd.protocol.types import NULL_BLOCK
from kvd.transport.base import TicketView
from kvd.transport.channel import Channel, PlainChannel, TlsProblem, wait_for_bytes
from kvd.transport.checksum import Checksum, stretches_crc
from kvd.transport.iov import Stretches, Vector, stretch
from kvd.transport.options import TransportOptions
from kvd.transport.pulse import Pulse
from kvd.transport.tcp_socket import Ended, Stalled, receive_exactly, would_block
from kvd.transport.tcp_wire import (
    LENGTH_BYTES,
    PREAMBLE_BYTES,
    BadFrame,
    Head,
    Kind,
    Request,
    check_preamble,
    pack_crc,
    pack_head,
    preamble,
    request_length,
    unpack_request,
)

_ZEROS = np.zeros(2**20, np.uint8)
_IDLE_TICK_S = 3600.0


class Refusal(Exception):
    """Why a request is not, or no longer, served."""

    def __init__(self, code: Code, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


class Server(Protocol):
    """What a connection needs of its server."""

    options: TransportOptions
    pulse: Pulse

    @property
    def closing(self) -> bool: ...

    def ticket(self, ticket: bytes) -> TicketView | None: ...

    def count_served(self, ticket: bytes, nbytes: int) -> None: ...

    def count_dropped(self, reason: str) -> None: ...


class Connection:
    """Runs on a thread of its own, and alone closes its socket."""

    def __init__(self, server: Server, sock: socket.socket, peer: str = "") -> None:
        self.peer = peer
        """The address that it came from."""
        self._server = server
        self._sock = sock
        self._channel: Channel = PlainChannel(sock)
        self._lock = threading.Lock()
        self._closed = False
        self._stager: Stager | None = None
        self._known = False  # it has shown a ticket of ours
        self._progress = time.monotonic()

    def shut(self) -> None:
        """Makes `run` end soon; from any thread."""
        with self._lock:
            if not self._closed:
                self._channel.shut()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._channel.close()

    def run(self) -> str:
        """Serves until the end; returns why the connection was dropped, "" if it ended well."""
        try:
            return self._run()
        finally:
            if self._stager is not None:
                self._stager.close()

    def _run(self) -> str:
        options = self._server.options
        accepted = time.monotonic()
        state = "first_frame"
        try:
            first = accepted + options.first_frame_s
            if options.tls is not None:
                state = "tls"
                options.tls.accept(self._sock, first, self._go_on, self._replace)
                state = "first_frame"
            check_preamble(receive_exactly(self._channel, PREAMBLE_BYTES, first, self._go_on))
            self._send(preamble())
            while True:
                state = "idle" if self._known else "first_frame"
                deadline = time.monotonic() + options.idle_s if self._known else first
                self._server.pulse.idle()
                # A long tick: when the server closes, it shuts the socket, which ends the poll.
                wait_for_bytes(self._channel, deadline, self._go_on, _IDLE_TICK_S)
                if self._known:
                    deadline = time.monotonic() + options.first_frame_s
                request = self._read_request(deadline)
                state = "stalled"
                self._server.pulse.busy()
                self._answer(request)
        except BadFrame:
            return "bad_frame"
        except Stalled:
            return state
        except Ended:
            return "" if self._known or self._server.closing else "first_frame"
        except TlsProblem:
            return "" if self._server.closing else "tls"
        except OSError:
            return "" if self._server.closing else "broken"

    def _replace(self, channel: Channel) -> None:
        """The socket is inside TLS from here on; `shut` has to know."""
        with self._lock:
            self._channel = channel
        if self._server.closing:
            channel.shut()

    def _go_on(self) -> bool:
        return not self._server.closing

    def _read_request(self, deadline: float) -> Request:
        try:
            head = receive_exactly(self._channel, LENGTH_BYTES, deadline, self._go_on)
            body = receive_exactly(self._channel, request_length(head), deadline, self._go_on)
        except Stalled:
            raise BadFrame("a request that did not end") from None
        return unpack_request(body)

    def _answer(self, request: Request) -> None:
        view = self._server.ticket(request.ticket)
        self._progress = time.monotonic()
        try:
            if view is None:
                raise Refusal(Code.UNKNOWN_TRANSFER, "no such ticket, or it is closed")
            self._known = True
            try:
                view.memory.pin()
            except MemoryRefused:
                raise Refusal(Code.ENGINE_GONE, "the producer engine is gone") from None
            try:
                vector, fault, crc = self._serve(view, request)
            finally:
                view.memory.unpin()
        except Refusal as exc:
            self._server.count_dropped(str(exc.code))
            self._send(_pack(Kind.REFUSED, request, exc))
            return
        if vector.left:
            # The stream stays in step without the memory being read any more.
            vector.redirect(_ZEROS)
            while vector.left:
                self._push(vector, socket.MSG_MORE)
        if fault is None:
            self._server.count_served(request.ticket, request.nbytes)
            commit = pack_head(Head(Kind.COMMIT, request.request, request.nbytes))
            self._send(commit + (pack_crc(crc) if request.checked else b""))
        else:
            self._send(_pack(Kind.ABORT, request, fault))

    def _serve(self, view: TicketView, request: Request) -> tuple[Vector, Refusal | None, Checksum]:
        stretches = resolve(view, request)
        fault = self._fault(view, request)
        if fault is not None:
            raise fault
        stretches = self._in_host_memory(view, stretches, checked=request.checked)
        head = np.frombuffer(pack_head(Head(Kind.DATA, request.request, request.nbytes)), np.uint8)
        vector = Vector(np.concatenate((stretch(head), stretches)))
        while vector.left:
            # MSG_MORE: the end of the bytes travels with the COMMIT that follows.
            self._push(vector, socket.MSG_MORE)
            fault = self._fault(view, request)
            if fault is not None and vector.done >= head.nbytes:
                break
        crc = 0
        if fault is None and request.checked:
            # None: a fault, which is found again below.
            go_on = partial(self._unfaulted, view, request)
            crc = stretches_crc(view.memory, stretches, go_on) or 0
        if fault is None:
            # All bytes are copied into the socket by now: this check is what makes them valid.
            fault = self._fault(view, request)
        return vector, fault, crc

    def _unfaulted(self, view: TicketView, request: Request) -> bool:
        return self._fault(view, request) is None

    def _in_host_memory(
        self, view: TicketView, stretches: Stretches, *, checked: bool
    ) -> Stretches:
        try:
            if self._stager is None:
                self._stager = view.memory.stager()
            if self._stager is not None and checked:
                raise Refusal(Code.UNSUPPORTED, "verify: the producer's memory is on a GPU")
            # All of it at once: from here on nothing but the fence looks at the engine's memory.
            return stretches if self._stager is None else self._stager.take(stretches)
        except KvdError as exc:
            raise Refusal(exc.code, exc.detail) from None

    def _fault(self, view: TicketView, request: Request) -> Refusal | None:
        return fault(view, open_=self._server.ticket(request.ticket) is not None)

    def _send(self, data: bytes) -> None:
        buffer = np.frombuffer(data, np.uint8)
        vector = Vector(stretch(buffer))
        while vector.left:
            self._push(vector, 0)

    def _push(self, vector: Vector, flags: int) -> None:
        """Sends some of the vector; returns every tick, too, while nothing can be sent."""
        self._server.pulse.busy()
        try:
            self._channel.push(vector, flags)
            self._progress = time.monotonic()
        except OSError as exc:
            if not would_block(exc):
                raise
            if self._server.closing:
                raise Ended from None
            if time.monotonic() - self._progress > self._server.options.data_timeout_s:
                raise Stalled from None


def _pack(kind: Kind, request: Request, why: Refusal) -> bytes:
    return pack_head(Head(kind, request.request, 0, why.code, why.detail))


def fault(view: TicketView, *, open_: bool) -> Refusal | None:
    """Why the view's blocks must not be, or have not been, read now. `open_`: the ticket is."""
    if view.memory.closing:
        return Refusal(Code.ENGINE_GONE, "the producer engine is gone")
    if not open_:
        return Refusal(Code.RELEASED, "the ticket was closed")
    try:
        word = view.memory.fence_word(view.fence_slot)
    except MemoryRefused as exc:
        return Refusal(Code.FENCED, exc.detail)
    if word != view.fence_word:
        return Refusal(
            Code.FENCED, f"fence slot {view.fence_slot}: {word:#x}, not {view.fence_word:#x}"
        )
    return None


def resolve(view: TicketView, request: Request) -> Stretches:
    """Where the asked-for bytes lie. The view's memory is pinned. Raises Refusal."""
    memory = view.memory
    group, first, num = request.group, request.first_layer, request.num_layers
    try:
        block = memory.block_nbytes(group, first, num)
    except MemoryRefused as exc:
        raise Refusal(Code.BAD_MESSAGE, exc.detail) from None
    count = int(request.indices.size)
    if block * count != request.nbytes or request.nbytes == 0:
        raise Refusal(
            Code.BAD_MESSAGE,
            f"{count} blocks of {block} bytes here, {request.nbytes} bytes were asked for",
        )
    held = np.frombuffer(view.blocks[group] if group < len(view.blocks) else b"", "<u4")
    highest = int(request.indices.max())
    if highest >= held.size:
        raise Refusal(Code.RANGE_NOT_HELD, f"block index {highest}: the ticket has {held.size}")
    ids = held[request.indices]
    if int(ids.max()) >= memory.num_blocks:
        null = int(ids.max()) == NULL_BLOCK
        raise Refusal(
            Code.RANGE_NOT_HELD if null else Code.INTERNAL,
            "a null block" if null else f"block id {int(ids.max())} of {memory.num_blocks}",
        )
    _check_valid(view, request, highest)
    return addresses(memory, group, first, num, ids)


def _check_valid(view: TicketView, request: Request, highest: int) -> None:
    memory = view.memory
    tokens = np.zeros(memory.num_layers, np.int64)
    for mark in view.valid:
        layers = slice(mark.first_layer, mark.first_layer + mark.num_layers)
        np.maximum(tokens[layers], mark.tokens, out=tokens[layers])
    table = memory.tables[request.group]
    rows = table.rows(request.first_layer, request.num_layers)
    held = int(tokens[list(table.layer[rows])].min())
    needed = (view.first_index + highest) * view.block_size + 1
    if held < needed:
        raise Refusal(
            Code.RANGE_NOT_HELD,
            f"block index {highest} begins at token {needed - 1}, {held} tokens are valid",
        )
