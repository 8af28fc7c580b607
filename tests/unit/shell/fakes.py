"""A local server whose core is a list, and a shim that says whatever a test wants."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvd.core import events
from kvd.drops import Drops
from kvd.local.listener import bind
from kvd.local.server import LocalServer
from kvd.protocol import local
from kvd.protocol.types import Geometry, LayerLayout, PeerAddr, Rank, Region
from kvd.protocol.version import PROTO_MAJOR, PROTO_MINOR
from kvd.tasks import TaskSet
from tests.conftest import wait_for_async

E = TypeVar("E")

PICKLE = (
    b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00}\x94\x8c\x02op\x94"
    b"\x8c\x05posix\x94\x8c\x06getcwd\x94\x93\x94s."
)
"""What somebody who takes us for an unpickler would send."""

TIMEOUT_S = 30.0
"""For an answer that comes at once, unless the machine has no time for us."""

BLOCKS = 8
BLOCK_NBYTES = 4096


def hello(**changes: Any) -> local.Hello:
    fields: dict[str, Any] = {
        "proto_major": PROTO_MAJOR,
        "proto_minor": PROTO_MINOR,
        "engine_id": "engine",
        "epoch": 1,
        "rank": Rank(),
        "role": "both",
        "client": "test",
    }
    return local.Hello(**{**fields, **changes})


def geometry(**changes: Any) -> Geometry:
    fields: dict[str, Any] = {
        "model": "m",
        "kv_dtype": "bfloat16",
        "block_size": 16,
        "total_kv_heads": 1,
        "kv_heads_per_rank": 1,
        "head_size": 64,
        "layout": "NHD",
        "layers": [("layer.0", 0, [BLOCK_NBYTES])],
    }
    return Geometry(**{**fields, **changes})


def layers() -> list[LayerLayout]:
    region = Region(segment=0, offset=0, stride=BLOCK_NBYTES, nbytes=BLOCK_NBYTES)
    return [LayerLayout(name="layer.0", group=0, regions=[region])]


def memfd(nbytes: int, name: str = "kvd-test") -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    return fd


class Shim:
    """A connection to the daemon's socket."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(path)

    def send(self, message: local.FromShim, fds: Sequence[int] = ()) -> None:
        self.send_raw(msgspec.msgpack.encode(message), fds)

    def send_raw(self, data: bytes, fds: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([data], rights)

    async def recv(self) -> local.ToShim | None:
        """The next message, or None at the end of the connection."""
        data = await asyncio.to_thread(self.sock.recv, local.MAX_FRAME)
        return msgspec.msgpack.decode(data, type=local.ToShim) if data else None

    async def expect(self, kind: type[E]) -> E:
        message = await self.recv()
        assert isinstance(message, kind), message
        return message

    async def describe(self) -> None:
        """Says everything up to and including Register."""
        segment, fence = memfd(BLOCKS * BLOCK_NBYTES), memfd(4096)
        try:
            self.send(local.AddSegment(0, "memfd", BLOCKS * BLOCK_NBYTES), [segment])
            self.send(local.AddFence(16), [fence])
            self.send(local.AddLayers(layers()))
            self.send(local.Register(geometry(), BLOCKS))
        finally:
            os.close(segment)
            os.close(fence)

    def close(self) -> None:
        self.sock.close()


class Shell:
    """What the daemon does around a LocalServer, as little as there can be."""

    def __init__(
        self,
        path: Path,
        executor: Executor,
        *,
        max_sessions: int = 4,
        max_queue: int = 16,
        gid: int | None = None,
    ) -> None:
        self.path = str(path)
        self.heard: list[events.Event] = []
        self.drops = Drops()
        self.tasks = TaskSet()
        self.shims: list[Shim] = []
        self.server = LocalServer(
            bind(self.path, gid=gid),
            feed=self.heard.append,
            welcome=self._welcome,
            executor=executor,
            tasks=self.tasks,
            drops=self.drops,
            max_sessions=max_sessions,
            max_queue=max_queue,
            gid=gid,
        )
        self.server.start()

    def _welcome(self) -> local.Welcome:
        return local.Welcome(PROTO_MAJOR, PROTO_MINOR, "d", 7, PeerAddr("127.0.0.1", 1), "0")

    def connect(self) -> Shim:
        shim = Shim(self.path)
        self.shims.append(shim)
        return shim

    async def greeted(self) -> Shim:
        shim = self.connect()
        shim.send(hello())
        await shim.expect(local.Welcome)
        return shim

    async def registered(self) -> tuple[Shim, int]:
        """A shim whose memory is mapped, and its session's number."""
        shim = await self.greeted()
        await shim.describe()
        event = await self.hears(events.SessionRegistered)
        await shim.expect(local.Registered)
        return shim, event.session

    async def hears(self, kind: type[E], count: int = 1) -> E:
        """Waits until the core has heard `count` events of a kind; returns the last of them."""

        def found() -> list[E] | None:
            seen: list[E] = [event for event in self.heard if isinstance(event, kind)]
            return seen if len(seen) >= count else None

        return (await wait_for_async(found, what=kind.__name__))[-1]

    async def close(self) -> None:
        for shim in self.shims:
            shim.close()
        self.server.stop_accepting()
        for number in list(self.server._sessions):
            self.server.release(number)
        await wait_for_async(lambda: len(self.server) == 0, what="sessions are released")
        await self.tasks.cancel()
