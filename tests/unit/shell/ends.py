"""Both ends of a peer connection, to be put into one loop by a test."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from kvd.addresses import parse_network
from kvd.core import events
from kvd.drops import Drops
from kvd.errors import KvdError
from kvd.local.listener import bind
from kvd.peers.client import PeerClient, PeerOptions
from kvd.peers.identity import Identity
from kvd.peers.link_server import LinkServer
from kvd.peers.server import PeerServer
from kvd.peers.wire import encode_to_producer
from kvd.protocol import peer
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr
from kvd.tasks import TaskSet
from tests.conftest import wait_for_async

E = TypeVar("E")

LOOPBACK = (parse_network("127.0.0.0/8"), parse_network("::1/128"))


def identity(name: str, *, boot_id: int = 1, host: str = "machine") -> Identity:
    return Identity(daemon_id=name, boot_id=boot_id, host=host, version="0")


class End:
    """What both ends of a test write down."""

    def __init__(self) -> None:
        self.heard: list[events.Event] = []
        self.drops = Drops()

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.heard if isinstance(event, kind)]

    async def hears(self, kind: type[E], count: int = 1) -> E:
        def found() -> list[E] | None:
            seen = self.of(kind)
            return seen if len(seen) >= count else None

        return (await wait_for_async(found, what=f"{kind.__name__} {count}"))[-1]


class Producer(End):
    """A PeerServer with a link."""

    def __init__(self, context: zmq.asyncio.Context, folder: Path, **how: Any) -> None:
        super().__init__()
        self.tasks = TaskSet()
        self.memory: dict[int, list[int]] = {}
        self.server = PeerServer(
            context,
            feed=self.heard.append,
            on_left=self._left,
            allow=how.pop("allow", LOOPBACK),
            drops=self.drops,
            heartbeat_s=0.1,
            peer_timeout_s=how.pop("peer_timeout_s", 0.6),
            max_clients=how.pop("max_clients", 3),
            max_clients_per_peer=how.pop("max_clients_per_peer", 128),
        )
        self.address = self.server.bind(how.pop("ip", "127.0.0.1"), how.pop("port", 0))
        self.identity = how.pop("identity", identity("producer"))
        self.links: LinkServer | None = None
        path = ""
        if how.pop("link", True):
            self.links = LinkServer(
                bind(str(folder / f"link-{self.address.port}")),
                clients=self.server,
                share=self._share,
                drops=self.drops,
                max_links=4,
            )
            self.links.start()
            path = self.links.path
        self.tasks.start(self.server.serve(self.identity, path), "serve")

    def _left(self, client: int) -> None:
        if self.links is not None:
            self.links.close_client(client)

    def _share(self, key: int) -> list[int]:
        if key not in self.memory:
            raise KvdError("the engine has left", Code.ENGINE_GONE)
        return [os.dup(fd) for fd in self.memory[key]]

    async def close(self) -> None:
        await self.tasks.cancel()
        self.server.close()
        if self.links is not None:
            self.links.close()


class Consumer(End):
    """A PeerClient."""

    def __init__(self, context: zmq.asyncio.Context, address: PeerAddr, **how: Any) -> None:
        super().__init__()
        self.tasks = TaskSet()
        self.client = PeerClient(
            context,
            address,
            PeerOptions(
                identity=how.pop("identity", identity("consumer", boot_id=9)),
                allow=how.pop("allow", LOOPBACK),
                heartbeat_s=0.1,
                peer_timeout_s=how.pop("peer_timeout_s", 0.6),
                connect_timeout_s=how.pop("connect_timeout_s", 2.0),
            ),
            feed=self.heard.append,
            drops=self.drops,
        )
        self.tasks.start(self.client.run(), "client")

    async def close(self) -> None:
        await self.tasks.cancel()


class Bench:
    """Makes ends and closes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.context = zmq.asyncio.Context()
        self._made: list[Producer | Consumer] = []
        self._sockets: list[zmq.asyncio.Socket] = []

    def producer(self, **how: Any) -> Producer:
        made = Producer(self.context, self.folder, **how)
        self._made.append(made)
        return made

    def consumer(self, address: PeerAddr, **how: Any) -> Consumer:
        made = Consumer(self.context, address, **how)
        self._made.append(made)
        return made

    def dealer(self, address: PeerAddr, source: str = "") -> zmq.asyncio.Socket:
        """A bare socket, to say anything with."""
        made = self.context.socket(zmq.DEALER)
        made.set(zmq.LINGER, 0)
        made.connect(f"tcp://{source}:0;{address}" if source else f"tcp://{address}")
        self._sockets.append(made)
        return made

    def router(self) -> tuple[zmq.asyncio.Socket, PeerAddr]:
        """A bare socket, to answer anything with."""
        made = self.context.socket(zmq.ROUTER)
        made.set(zmq.LINGER, 0)
        port = made.bind_to_random_port("tcp://127.0.0.1")
        self._sockets.append(made)
        return made, PeerAddr("127.0.0.1", port)

    async def close(self) -> None:
        for made in reversed(self._made):
            await made.close()
        for sock in self._sockets:
            sock.close(0)
        self.context.destroy(0)


async def answer(sock: zmq.asyncio.Socket) -> peer.ToConsumer:
    async with asyncio.timeout(5):
        data = await sock.recv()
    return msgspec.msgpack.decode(data, type=peer.ConsumerEnvelope).body


def say_hello(name: str = "raw", epoch: int = 5) -> bytes:
    return encode_to_producer(epoch, peer.PeerHello(name, "0", "elsewhere"))
