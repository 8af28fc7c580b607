"""The four doors of a daemon, and what strangers do at each.

Every attack ends with something that the daemon must answer or close, in bounded time, whatever
came before; what it refuses is counted here, to be compared with what the daemon says it refused.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import zmq

from kvd.protocol import local, peer
from kvd.protocol.types import Rank
from kvd.protocol.version import PROTO_MAJOR, PROTO_MINOR
from kvd.transport.tcp_wire import (
    HEAD_BYTES,
    Head,
    Kind,
    Request,
    pack_request,
    preamble,
    unpack_head,
)
from tests.hostile.messages import open_anything
from tests.hostile.target import BAIT, BAIT_DIGEST, BAIT_TOKENS, PRODUCER, Target
from tests.unit.shell import fakes

ANSWER_S = 30.0
"""For answers that come at once, unless the machine has no time for us."""
EPOCH = 5
LAST = 777_777


class Silent(AssertionError):
    """Neither answered nor closed."""


class UnixDoor:
    """The socket for engines."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.heard: Counter[str] = Counter()

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Blocking: with a timeout of its own, Python's connect fails where the backlog is full.
        tick = struct.pack("@ll", int(ANSWER_S), 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
        sock.connect(self.path)
        sock.settimeout(ANSWER_S)
        return sock

    def attack(self, stage: int, frames: Sequence[tuple[bytes, int]], number: int) -> None:
        """`stage`: 0 says nothing first, 1 greets, 2 describes memory. Each frame comes with so
        many descriptors."""
        with self.connect() as sock:
            with contextlib.suppress(OSError):
                if stage:
                    self._send(sock, fakes.hello(engine_id=f"stranger-{number}"))
                if stage > 1:
                    self._describe(sock)
                for data, count in frames:
                    fds = [open_anything(number + i) for i in range(count)]
                    try:
                        _send_fds(sock, data[: local.MAX_FRAME + 1], fds)
                    finally:
                        for fd in fds:
                            os.close(fd)
                self._send(sock, local.Ping(LAST))
            self._hear_out(sock)

    def _send(self, sock: socket.socket, message: local.FromShim) -> None:
        sock.send(msgspec.msgpack.encode(message))

    def _describe(self, sock: socket.socket) -> None:
        nbytes = fakes.BLOCKS * fakes.BLOCK_NBYTES
        for message, size in ((local.AddSegment(0, "memfd", nbytes), nbytes),
                              (local.AddFence(16), 4096)):  # fmt: skip
            fd = fakes.memfd(size)
            try:
                _send_fds(sock, msgspec.msgpack.encode(message), [fd])
            finally:
                os.close(fd)
        self._send(sock, local.AddLayers(fakes.layers()))
        self._send(sock, local.Register(fakes.geometry(), fakes.BLOCKS))

    def _hear_out(self, sock: socket.socket) -> None:
        while True:
            try:
                data = sock.recv(local.MAX_FRAME)
            except ConnectionResetError:
                return
            except TimeoutError:
                raise Silent("the Unix socket") from None
            if not data:
                return
            message = msgspec.msgpack.decode(data, type=local.ToShim)
            self.heard[type(message).__name__] += 1
            if isinstance(message, local.Pong) and message.seq == LAST:
                return


class ZmqDoor:
    """The port for other daemons."""

    def __init__(self, context: zmq.Context[Any], address: str) -> None:
        self.context = context
        self.address = address
        self.heard: Counter[str] = Counter()

    @contextlib.contextmanager
    def dealer(self, source: str = "") -> Iterator[zmq.Socket[Any]]:
        """A connection, from an address of our choice."""
        made = self.context.socket(zmq.DEALER)
        made.set(zmq.LINGER, 0)
        made.set(zmq.IMMEDIATE, 1)
        made.set(zmq.SNDTIMEO, int(ANSWER_S * 1000))
        made.set(zmq.RCVTIMEO, int(ANSWER_S * 1000))
        made.connect(f"tcp://{source}:0;{self.address}" if source else f"tcp://{self.address}")
        try:
            yield made
        finally:
            made.close(0)

    def attack(self, greets: bool, frames: Sequence[Sequence[bytes]], number: int) -> None:
        """Messages of one or more parts; with `greets` a proper hello comes first."""
        with self.dealer() as sock:
            if greets:
                sock.send(hello(f"stranger-{number}"))
            for parts in frames:
                sock.send_multipart(parts)
            sock.send(said(peer.Heartbeat(LAST)))
            while True:
                try:
                    message = self.receive(sock)
                except zmq.Again:
                    raise Silent("the ZMQ port") from None
                if isinstance(message, peer.PeerRefused | peer.HeartbeatAck):
                    # A refusal may be of an earlier message; the last one is always answered.
                    if isinstance(message, peer.HeartbeatAck) and message.seq == LAST:
                        return
                    if not sock.poll(50):
                        return

    def receive(self, sock: zmq.Socket[Any]) -> peer.ToConsumer:
        """The next answer; raises zmq.Again when none comes."""
        answer = msgspec.msgpack.decode(sock.recv(), type=peer.ConsumerEnvelope)
        self.heard[type(answer.body).__name__] += 1
        return answer.body

    def receive_until(self, sock: zmq.Socket[Any], kind: type) -> Any:
        """The next answer of a kind."""
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            message = self.receive(sock)
            if isinstance(message, kind):
                return message
        raise Silent(f"no {kind.__name__}")


def hello(name: str) -> bytes:
    return said(peer.PeerHello(name, "0", "elsewhere"))


def said(body: peer.ToProducer, epoch: int = EPOCH) -> bytes:
    """One message in its envelope."""
    return msgspec.msgpack.encode(peer.ProducerEnvelope(PROTO_MAJOR, PROTO_MINOR, epoch, body))


class Insider:
    """A stranger that the daemon takes for a peer: it has a grant for the bait, and its ticket."""

    def __init__(self, target: Target, door: ZmqDoor, name: str, source: str = "") -> None:
        self._stack = contextlib.ExitStack()
        self.door = door
        self.sock = self._stack.enter_context(door.dealer(source))
        self.sock.send(hello(name))
        self.sock.send(
            said(peer.Attach("x", PRODUCER, "stranger", 1, Rank(), target.geometry, ["tcp"]))
        )
        door.receive_until(self.sock, peer.AttachOk)
        self.ticket = self.grant("f").ticket

    def grant(self, fetch_id: str) -> peer.Grant:
        """Asks for the whole bait; it is granted."""
        self.sock.send(
            said(peer.FetchReq(fetch_id, "x", BAIT, None, 0, BAIT_TOKENS, BAIT_DIGEST, 0.0))
        )
        granted = self.door.receive_until(self.sock, peer.Grant)
        assert isinstance(granted, peer.Grant)
        return granted

    def beat(self) -> None:
        """Stays a peer."""
        self.sock.send(said(peer.Heartbeat(1)))
        self.door.receive_until(self.sock, peer.HeartbeatAck)

    def close(self) -> None:
        self._stack.close()


class DataDoor:
    """The port for data connections."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.heard: Counter[str] = Counter()

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), ANSWER_S, (source, 0))

    def greeted(self, source: str = "127.0.0.1") -> socket.socket:
        """A connection after both preambles."""
        sock = self.connect(source)
        sock.sendall(preamble())
        assert _read(sock, len(preamble())) == preamble()
        return sock

    def attack(self, greets: bool, frames: Sequence[bytes]) -> None:
        """Sends everything, then says that no more comes, and reads to the end."""
        with self.connect() as sock:
            with contextlib.suppress(OSError):
                sock.sendall((preamble() if greets else b"") + b"".join(frames))
                sock.shutdown(socket.SHUT_WR)
            answer = read_to_end(sock, "the data port")
        self.heard["connections"] += 1
        answer = answer[len(preamble()) :]
        while len(answer) >= HEAD_BYTES:
            head, code, detail = unpack_head(answer[:HEAD_BYTES])
            self.heard[head.kind.name] += 1
            length = head.nbytes if head.kind is Kind.DATA else 0
            answer = answer[HEAD_BYTES + code + detail + length :]

    def ask(self, sock: socket.socket, request: Request) -> Head:
        """One request, and the end of its answer; the bytes are thrown away."""
        sock.sendall(pack_request(request))
        while True:
            head, code, detail = unpack_head(_read(sock, HEAD_BYTES))
            text = _read(sock, code + detail).decode()
            self.heard[head.kind.name] += 1
            if head.kind is not Kind.DATA:
                return Head(head.kind, head.request, head.nbytes, text[:code], text[code:])
            _read(sock, head.nbytes)


def bait_request(ticket: bytes, **changes: Any) -> Request:
    """Asks for the bait's blocks, in all four layers."""
    fields: dict[str, Any] = {
        "request": 1, "ticket": ticket, "group": 0, "first_layer": 0, "num_layers": 4,
        "nbytes": 3 * 4 * 4096, "indices": np.arange(3, dtype=np.uint32),
    }  # fmt: skip
    return Request(**{**fields, **changes})


class HttpDoor:
    """The port for metrics and control."""

    def __init__(self, at: tuple[str, int]) -> None:
        self.at = at
        self.heard: Counter[str] = Counter()

    def attack(self, data: bytes, *, whole: bool) -> None:
        """Sends bytes; those of a `whole` request are answered, others end the connection."""
        with socket.create_connection(self.at, ANSWER_S) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(data)
                if not whole:
                    sock.shutdown(socket.SHUT_WR)
            answer = read_to_end(sock, "the HTTP port")
        status = answer[9:12].decode("latin-1")
        self.heard["connections"] += 1
        if answer:
            self.heard[f"{status[:1]}xx"] += 1
        elif whole:
            raise Silent(f"no answer to {data[:100]!r}")


def read_to_end(sock: socket.socket, what: str) -> bytes:
    """All that comes until the other end closes. Raises Silent when it does not."""
    data = bytearray()
    deadline = time.monotonic() + ANSWER_S
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([sock], [], [], left)[0]:
            raise Silent(what)
        try:
            part = sock.recv(2**16)
        except OSError:
            return bytes(data)
        if not part:
            return bytes(data)
        data += part


def _read(sock: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        part = sock.recv(nbytes - len(data))
        if not part:
            raise EOFError(f"{len(data)} of {nbytes} bytes came")
        data += part
    return bytes(data)


def _send_fds(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights)
