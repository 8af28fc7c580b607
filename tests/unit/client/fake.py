"""A scripted daemon on a real SEQPACKET socket, in the test's own process and without threads."""

from __future__ import annotations

import array
import os
import select
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from connector_shim.client import Client
from connector_shim.events import Event
from connector_shim.memory import shared_blocks
from connector_shim.patience import BACKOFF_MAX_S
from kvd.protocol import local
from kvd.protocol.types import PeerAddr, Stages
from kvd.protocol.version import PROTO_MINOR

ADDRESS = PeerAddr("127.0.0.1", 5000)
REMOTE = PeerAddr("127.0.0.1", 6000)
NUM_BLOCKS = 32
DIGEST = b"d" * 16

T = TypeVar("T")

_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.Decoder(local.FromShim).decode


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def welcome(
    boot_id: int = 1, *, major: int = 1, minor: int = PROTO_MINOR, draining: bool = False
) -> bytes:
    return _encode(local.Welcome(major, minor, "daemon", boot_id, ADDRESS, "0.1.0", draining))


def fetch_done(
    fetch_id: str, code: str = "ok", bad: list[bytes] | None = None, nbytes: int = 0
) -> local.FetchDone:
    return local.FetchDone(
        fetch_id=fetch_id,
        code=code,
        detail="",
        generation=1,
        bad=[b"\0"] if bad is None else bad,
        tokens=0,
        nbytes=nbytes,
        transport="shm",
        stages=Stages(),
    )


class FakeDaemon:
    """Does nothing by itself: the test accepts, reads and answers."""

    def __init__(self, path: Path, *, backlog: int = 16, boot_id: int = 1) -> None:
        self.path = str(path)
        self.boot_id = boot_id
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(self.path)
        self.listener.listen(backlog)
        self.listener.setblocking(False)
        self.session: socket.socket | None = None
        self.fds: list[int] = []

    def accept(self) -> None:
        self.hang_up()
        self.session, _ = self.listener.accept()
        self.session.setblocking(False)

    def read(self) -> list[local.FromShim]:
        """Every message that is there; descriptors go to `fds`."""
        assert self.session is not None
        found: list[local.FromShim] = []
        while True:
            try:
                data, ancillary, flags, _ = self.session.recvmsg(65536, socket.CMSG_SPACE(16))
            except (BlockingIOError, ConnectionResetError):
                return found
            assert not flags & socket.MSG_TRUNC
            for level, kind, payload in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    self.fds.extend(array.array("i", payload))
            if not data:
                return found
            found.append(_decode(data))

    def saw_eof(self) -> bool:
        assert self.session is not None
        poller = select.poll()
        poller.register(self.session, select.POLLRDHUP)
        return bool(poller.poll(0))

    def say(self, *messages: local.ToShim) -> None:
        for message in messages:
            self.say_raw(_encode(message))

    def say_raw(self, data: bytes) -> None:
        assert self.session is not None
        self.session.send(data)

    def hang_up(self) -> None:
        """What the client sees as EOF."""
        if self.session is not None:
            self.session.close()
            self.session = None
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()

    def die(self) -> None:
        self.hang_up()
        self.listener.close()
        if os.path.exists(self.path):
            os.unlink(self.path)

    def take_in(self, client: Client) -> list[Event]:
        """Brings the client up; returns what its polls returned."""
        events = client.poll()
        self.accept()
        self.say_raw(welcome(self.boot_id))
        events += client.poll()
        assert any(isinstance(message, local.Register) for message in self.read())
        self.say(local.Registered(1))
        events += client.poll()
        assert state(client) == "up"
        return events


def describe(client: Client, *, groups: int = 1) -> None:
    memory, mapping = shared_blocks(2, NUM_BLOCKS, 64, groups=[i % groups for i in range(2)])
    client.describe(memory)
    memory.close()
    mapping.close()


def fetch(
    client: Client,
    transfer_id: str = "t",
    blocks: tuple[int, ...] = (1, 2),
    *,
    sole: bool = False,
) -> str:
    return client.fetch(
        transfer_id,
        remote=REMOTE,
        engine_id="producer",
        start=0,
        end=16 * len(blocks),
        blocks=[blocks],
        digest=DIGEST,
        deadline_s=5.0,
        park_s=1.0,
        sole=sole,
    )


def offer(client: Client, transfer_id: str = "t", *, lease_s: float = 30.0) -> None:
    client.offer(transfer_id, 1, blocks=[[1, 2]], digests={32: DIGEST}, tokens=32, lease_s=lease_s)


def of_type(events: Sequence[object], kind: type[T]) -> list[T]:
    return [event for event in events if isinstance(event, kind)]


def state(client: Client) -> str:
    """Asked anew each time, which a type checker would not believe of the attribute."""
    return client.state


def outstanding(client: Client) -> tuple[set[str], set[str]]:
    """(fetch ids, transfer ids of offers)"""
    return set(client.fetches), {transfer_id for transfer_id, _ in client.offers}


def later(clock: FakeClock, client: Client) -> None:
    """Past any backoff."""
    clock.now += 2 * BACKOFF_MAX_S
