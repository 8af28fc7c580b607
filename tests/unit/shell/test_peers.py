"""ROUTER, DEALER and link between two ends in one loop: handshake, epochs, hostile frames."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvd.addresses import parse_network
from kvd.core import events
from kvd.drops import Drops
from kvd.errors import KvdError
from kvd.local.listener import bind
from kvd.local.seqpacket import connect
from kvd.peers import link as link_module
from kvd.peers.client import PeerClient, PeerOptions
from kvd.peers.identity import Identity
from kvd.peers.link import LinkClient, LinkHello, link_proof
from kvd.peers.link_server import LinkServer
from kvd.peers.resolve import AddressRefused, candidates, in_networks
from kvd.peers.server import PeerServer
from kvd.peers.wire import decode_to_producer, encode_to_consumer, encode_to_producer
from kvd.protocol import peer
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr
from kvd.protocol.version import PROTO_MAJOR
from kvd.tasks import TaskSet
from tests.conftest import wait_for_async
from tests.unit.shell.fakes import PICKLE, memfd

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

    def dealer(self, address: PeerAddr) -> zmq.asyncio.Socket:
        """A bare socket, to say anything with."""
        made = self.context.socket(zmq.DEALER)
        made.set(zmq.LINGER, 0)
        made.connect(f"tcp://{address}")
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


@pytest.fixture
async def bench(tmp_run_dir: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_run_dir)
    yield made
    await made.close()


async def answer(sock: zmq.asyncio.Socket) -> peer.ToConsumer:
    async with asyncio.timeout(5):
        data = await sock.recv()
    return msgspec.msgpack.decode(data, type=peer.ConsumerEnvelope).body


def say_hello(name: str = "raw", epoch: int = 5) -> bytes:
    return encode_to_producer(epoch, peer.PeerHello(name, "0", "elsewhere"))


# --- handshake --------------------------------------------------------------------------------


async def test_both_sides_learn_of_each_other_and_of_their_host(bench: Bench) -> None:
    producer = bench.producer()
    consumer = bench.consumer(producer.address)
    up = await consumer.hears(events.PeerUp)
    assert up == events.PeerUp(producer.address, "producer", 1, same_host=True)
    joined = await producer.hears(events.ClientJoined)
    assert (joined.daemon_id, joined.boot_id, joined.same_host) == ("consumer", 9, True)


async def test_messages_go_both_ways_in_order(bench: Bench) -> None:
    producer = bench.producer()
    consumer = bench.consumer(producer.address)
    await consumer.hears(events.PeerUp)
    sent = [peer.Detach(f"a{i}") for i in range(300)]
    for message in sent:
        consumer.client.send(message)
    await producer.hears(events.ClientMessage, 300)
    assert [e.message for e in producer.of(events.ClientMessage)] == sent
    client = producer.of(events.ClientJoined)[0].client
    back = [peer.NotifyResult(f"t{i}", "release", "ok") for i in range(300)]
    for result in back:
        producer.server.send(client, result)
    await consumer.hears(events.PeerMessage, 300)
    assert [e.message for e in consumer.of(events.PeerMessage)] == back


async def test_another_host_gets_no_link(bench: Bench) -> None:
    producer = bench.producer()
    consumer = bench.consumer(producer.address, identity=identity("c", host="other"))
    up = await consumer.hears(events.PeerUp)
    assert not up.same_host
    assert not producer.of(events.ClientJoined)[0].same_host
    assert producer.links is not None
    assert len(producer.links) == 0


async def test_a_link_that_cannot_be_reached_is_not_the_same_host(
    bench: Bench,
) -> None:
    """Two pods on one machine that share no folder."""
    producer = bench.producer()
    assert producer.links is not None
    os.unlink(producer.links.path)
    consumer = bench.consumer(producer.address)
    up = await consumer.hears(events.PeerUp)
    assert not up.same_host


async def test_an_idle_connection_stays_up(bench: Bench) -> None:
    producer = bench.producer()
    consumer = bench.consumer(producer.address)
    await consumer.hears(events.PeerUp)
    heard = consumer.client._heard
    await wait_for_async(lambda: consumer.client._heard > heard + 1.5, what="heartbeats")
    assert not consumer.of(events.PeerDown)
    assert not producer.of(events.ClientLeft)


async def test_ipv6(bench: Bench) -> None:
    producer = bench.producer(ip="::1")
    assert str(producer.address).startswith("[::1]:")
    consumer = bench.consumer(producer.address)
    await consumer.hears(events.PeerUp)
    assert consumer.client.ip == "::1"


async def test_a_name_is_resolved(bench: Bench) -> None:
    producer = bench.producer()
    consumer = bench.consumer(PeerAddr("localhost", producer.address.port))
    await consumer.hears(events.PeerUp)
    assert consumer.client.ip == "127.0.0.1"


# --- down and up ------------------------------------------------------------------------------


async def test_a_refused_connection_is_told_at_once_and_tried_again(bench: Bench) -> None:
    sock, address = bench.router()
    sock.close(0)
    consumer = bench.consumer(address, connect_timeout_s=60.0)
    down = await consumer.hears(events.PeerDown)
    assert down.code == Code.PEER_UNREACHABLE
    producer = bench.producer(port=address.port)
    await consumer.hears(events.PeerUp)
    assert len(producer.of(events.ClientJoined)) == 1


async def test_a_silent_address_is_given_up(bench: Bench) -> None:
    _, address = bench.router()  # takes the connection, and never answers
    consumer = bench.consumer(address, connect_timeout_s=0.3)
    down = await consumer.hears(events.PeerDown)
    assert down.code == Code.PEER_UNREACHABLE
    assert "0.3" in down.detail


async def test_a_restarted_peer_goes_down_then_up_with_its_new_boot(bench: Bench) -> None:
    first = bench.producer(identity=identity("producer", boot_id=1))
    consumer = bench.consumer(first.address)
    await consumer.hears(events.PeerUp)
    port = first.address.port
    await first.close()
    down = await consumer.hears(events.PeerDown)
    assert down.code == Code.PEER_LOST
    await wait_for_async(lambda: _bindable(port), what="the port is free")
    bench.producer(identity=identity("producer", boot_id=2), port=port)
    up = await consumer.hears(events.PeerUp, 2)
    assert up.boot_id == 2
    kinds = [type(e) for e in consumer.heard]
    first_up, last_up = kinds.index(events.PeerUp), len(kinds) - 1
    assert events.PeerDown in kinds[first_up:last_up]


def _bindable(port: int) -> bool:
    import socket

    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


async def test_a_restarted_client_leaves_then_joins(bench: Bench) -> None:
    producer = bench.producer()
    bench.consumer(producer.address, identity=identity("same", boot_id=1))
    first = await producer.hears(events.ClientJoined)
    bench.consumer(producer.address, identity=identity("same", boot_id=2))
    second = await producer.hears(events.ClientJoined, 2)
    assert second.client != first.client
    order = [
        (type(e), e.client)
        for e in producer.heard
        if isinstance(e, events.ClientJoined | events.ClientLeft)
    ]
    assert order[:3] == [
        (events.ClientJoined, first.client),
        (events.ClientLeft, first.client),
        (events.ClientJoined, second.client),
    ]


async def test_a_silent_peer_is_lost(bench: Bench) -> None:
    router, address = bench.router()
    consumer = bench.consumer(address)
    route, _ = await router.recv_multipart()
    welcome = peer.PeerWelcome("p", "0", "x", "", b"n" * 16)
    await router.send_multipart([route, encode_to_consumer(3, welcome)])
    await consumer.hears(events.PeerUp)
    down = await consumer.hears(events.PeerDown)
    assert down.code == Code.PEER_LOST
    assert "silent" in down.detail


async def test_a_silent_client_leaves_and_is_told_to_say_hello_anew(bench: Bench) -> None:
    producer = bench.producer()
    dealer = bench.dealer(producer.address)
    await dealer.send(say_hello())
    assert isinstance(await answer(dealer), peer.PeerWelcome)
    left = await producer.hears(events.ClientLeft)
    assert left.code == Code.PEER_LOST
    await dealer.send(encode_to_producer(5, peer.Detach("a")))
    refused = await answer(dealer)
    assert isinstance(refused, peer.PeerRefused)
    assert refused.code == Code.STALE_EPOCH
    assert not producer.of(events.ClientMessage)


async def test_an_answer_of_another_boot_ends_the_connection(bench: Bench) -> None:
    router, address = bench.router()
    consumer = bench.consumer(address)
    route, _ = await router.recv_multipart()
    welcome = peer.PeerWelcome("p", "0", "x", "", b"n" * 16)
    await router.send_multipart([route, encode_to_consumer(3, welcome)])
    await consumer.hears(events.PeerUp)
    await router.send_multipart([route, encode_to_consumer(4, peer.NotifyResult("t", "r", "ok"))])
    down = await consumer.hears(events.PeerDown)
    assert "restarted" in down.detail
    assert not consumer.of(events.PeerMessage)


async def test_a_message_of_another_boot_ends_the_client(bench: Bench) -> None:
    producer = bench.producer()
    dealer = bench.dealer(producer.address)
    await dealer.send(say_hello(epoch=5))
    await answer(dealer)
    await dealer.send(encode_to_producer(4, peer.Detach("a")))
    refused = await answer(dealer)
    assert isinstance(refused, peer.PeerRefused)
    assert refused.code == Code.STALE_EPOCH
    await producer.hears(events.ClientLeft)
    assert not producer.of(events.ClientMessage)


async def test_a_link_that_breaks_is_the_end_of_both(bench: Bench) -> None:
    producer = bench.producer()
    consumer = bench.consumer(producer.address, peer_timeout_s=600.0)
    await consumer.hears(events.PeerUp)
    assert producer.links is not None
    (one,) = producer.links._links
    one.close()
    down = await consumer.hears(events.PeerDown)
    assert down.code == Code.PEER_LOST
    left = await producer.hears(events.ClientLeft)
    assert left.code == Code.PEER_LOST
    await consumer.hears(events.PeerUp, 2)


async def test_a_client_whose_link_closes_has_left_at_once(bench: Bench) -> None:
    producer = bench.producer(peer_timeout_s=600.0)
    assert producer.links is not None
    dealer = bench.dealer(producer.address)
    await dealer.send(say_hello("raw", epoch=5))
    welcome = await answer(dealer)
    assert isinstance(welcome, peer.PeerWelcome)
    link = LinkClient(lambda _detail: None)
    await link.open(welcome.link, daemon_id="raw", boot_id=5, nonce=welcome.nonce, timeout_s=5.0)
    assert not producer.of(events.ClientLeft)
    link.close()
    left = await producer.hears(events.ClientLeft)
    assert left.code == Code.PEER_LOST
    assert len(producer.links) == 0


# --- refusals ---------------------------------------------------------------------------------


async def test_another_major_version_is_refused_naming_both(bench: Bench) -> None:
    producer = bench.producer()
    dealer = bench.dealer(producer.address)
    body = msgspec.Raw(msgspec.msgpack.encode(["PeerHello", "new", "9", "h", {"more": 1}]))
    await dealer.send(msgspec.msgpack.encode([PROTO_MAJOR + 1, 4, 5, body]))
    refused = await answer(dealer)
    assert isinstance(refused, peer.PeerRefused)
    assert refused.code == Code.VERSION_MISMATCH
    assert f"{PROTO_MAJOR + 1}.4" in refused.detail
    assert not producer.of(events.ClientJoined)
    assert producer.drops.counts["peer_server", "version_mismatch"] == 1


async def test_a_peer_of_another_major_version_is_refused_with_its_code(bench: Bench) -> None:
    router, address = bench.router()
    consumer = bench.consumer(address)
    route, _ = await router.recv_multipart()
    await router.send_multipart(
        [route, msgspec.msgpack.encode([PROTO_MAJOR + 1, 0, 5, ["PeerWelcome", "x"]])]
    )
    down = await consumer.hears(events.PeerDown)
    assert down.code == Code.VERSION_MISMATCH


async def test_another_minor_version_is_welcome(bench: Bench) -> None:
    producer = bench.producer()
    dealer = bench.dealer(producer.address)
    hello = ["PeerHello", "newer", "9", "h", "a field that we do not know"]
    await dealer.send(msgspec.msgpack.encode([PROTO_MAJOR, 77, 5, hello]))
    assert isinstance(await answer(dealer), peer.PeerWelcome)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        PICKLE,
        b"\xdd\x7f\xff\xff\xff",  # an array that claims two Gi elements
        msgspec.msgpack.encode([PROTO_MAJOR, 0, 5, ["Nope"]]),
        msgspec.msgpack.encode([PROTO_MAJOR, 0, -1, ["PeerHello", "a", "b", "c"]]),
        msgspec.msgpack.encode([PROTO_MAJOR]),
        msgspec.msgpack.encode([PROTO_MAJOR, 0, 5, ["PeerHello", "", "b", "c"]]),
    ],
    ids=["empty", "pickle", "length-claim", "unknown", "epoch", "short", "bad-field"],
)
async def test_a_foreign_message_harms_nobody_else(bench: Bench, data: bytes) -> None:
    producer = bench.producer()
    consumer = bench.consumer(producer.address)
    await consumer.hears(events.PeerUp)
    dealer = bench.dealer(producer.address)
    await dealer.send(data)
    refused = await answer(dealer)
    assert isinstance(refused, peer.PeerRefused)
    assert refused.code == Code.BAD_MESSAGE
    assert producer.drops.counts["peer_server", "bad_message"] == 1
    consumer.client.send(peer.Detach("still"))
    await producer.hears(events.ClientMessage)
    assert not producer.of(events.ClientLeft)


async def test_a_message_of_several_parts_is_dropped(bench: Bench) -> None:
    producer = bench.producer()
    dealer = bench.dealer(producer.address)
    await dealer.send_multipart([b"", say_hello()])
    await dealer.send(say_hello())
    assert isinstance(await answer(dealer), peer.PeerWelcome)
    assert producer.drops.counts["peer_server", "multipart"] == 1


async def test_clients_are_bounded(bench: Bench) -> None:
    producer = bench.producer(max_clients=2)
    for number in range(2):
        dealer = bench.dealer(producer.address)
        await dealer.send(say_hello(f"d{number}"))
        assert isinstance(await answer(dealer), peer.PeerWelcome)
    one_more = bench.dealer(producer.address)
    await one_more.send(say_hello("d2"))
    refused = await answer(one_more)
    assert isinstance(refused, peer.PeerRefused)
    assert refused.code == Code.OVERLOADED
    assert len(producer.server) == 2


async def test_a_client_outside_allow_peers_is_refused(bench: Bench) -> None:
    producer = bench.producer(allow=(parse_network("10.0.0.0/8"),))
    consumer = bench.consumer(producer.address)
    down = await consumer.hears(events.PeerDown)
    assert down.code == Code.PEER_NOT_ALLOWED
    assert "127.0.0.1" in down.detail
    assert not producer.of(events.ClientJoined)


async def test_a_peer_outside_allow_peers_is_not_even_connected_to(bench: Bench) -> None:
    producer = bench.producer()
    consumer = bench.consumer(producer.address, allow=(parse_network("10.0.0.0/8"),))
    down = await consumer.hears(events.PeerDown)
    assert down.code == Code.PEER_NOT_ALLOWED
    assert not producer.heard


async def test_a_client_that_never_reads_is_dropped(bench: Bench) -> None:
    producer = bench.producer(peer_timeout_s=60.0)
    good = bench.consumer(producer.address)
    await good.hears(events.PeerUp)
    deaf = bench.dealer(producer.address)
    deaf.set(zmq.RCVHWM, 1)
    await deaf.send(say_hello("deaf"))
    joined = await producer.hears(events.ClientJoined, 2)
    big = peer.AttachRefused("a", "c", "x" * 100_000)
    sent = 0
    while not producer.of(events.ClientLeft):
        producer.server.send(joined.client, big)
        sent += 1
        assert sent < 5000
    assert producer.of(events.ClientLeft)[0] == events.ClientLeft(joined.client, Code.OVERLOADED)
    assert producer.drops.counts["peer_server", "queue_full"] == 1
    producer.server.send(producer.of(events.ClientJoined)[0].client, peer.EngineGone("e", 1))
    await good.hears(events.PeerMessage)


# --- link -------------------------------------------------------------------------------------


async def linked(bench: Bench) -> tuple[Producer, Consumer, LinkClient]:
    producer = bench.producer()
    consumer = bench.consumer(producer.address)
    await consumer.hears(events.PeerUp)
    assert consumer.client.link is not None
    return producer, consumer, consumer.client.link


def inode(fd: int) -> int:
    return os.fstat(fd).st_ino


@asynccontextmanager
async def passing(link: LinkClient, key: int) -> AsyncIterator[list[int]]:
    fds = await link.memory(key, 5.0)
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize("count", [1, 2, 200, 201, 450])
async def test_memory_comes_over_the_link_in_order(bench: Bench, count: int) -> None:
    producer, _, link = await linked(bench)
    files = [memfd(1) for _ in range(count)]
    producer.memory[7] = files
    before = len(os.listdir("/proc/self/fd"))
    async with passing(link, 7) as fds:
        assert [inode(fd) for fd in fds] == [inode(fd) for fd in files]
        assert not any(os.get_inheritable(fd) for fd in fds)
    assert len(os.listdir("/proc/self/fd")) == before
    for fd in files:
        os.close(fd)


async def test_unknown_memory_is_answered_with_a_code(bench: Bench) -> None:
    _, _, link = await linked(bench)
    with pytest.raises(KvdError) as error:
        await link.memory(99, 5.0)
    assert error.value.code == Code.ENGINE_GONE


async def test_what_waits_on_a_link_fails_when_it_breaks(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, _, link = await linked(bench)
    assert producer.links is not None
    (one,) = producer.links._links
    monkeypatch.setattr(type(one), "_send_memory", lambda _self, _want: one.close())
    with pytest.raises(KvdError) as error:
        await link.memory(1, 30.0)
    assert error.value.code == Code.PEER_LOST


async def test_an_unanswered_request_ends_at_its_deadline(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, _, link = await linked(bench)
    assert producer.links is not None
    (one,) = producer.links._links
    monkeypatch.setattr(type(one), "_send_memory", lambda _self, _want: None)
    with pytest.raises(KvdError) as error:
        await link.memory(1, 0.1)
    assert error.value.code == Code.DEADLINE


async def test_a_stranger_on_the_link_is_turned_away(bench: Bench) -> None:
    producer, _, _ = await linked(bench)
    assert producer.links is not None
    for nonce in (b"", b"n" * 16):
        sock = connect(producer.links.path)
        sock.send(link_module.encode(LinkHello("consumer", 9, link_proof(nonce))))
        sock.setblocking(True)
        sock.settimeout(5)
        assert await asyncio.to_thread(sock.recv, 100) == b""
        sock.close()
    assert producer.drops.counts["link", "unproven"] == 2
    assert len(producer.links) == 1


async def test_memory_is_not_given_before_the_hello(bench: Bench) -> None:
    producer, _, _ = await linked(bench)
    assert producer.links is not None
    producer.memory[1] = [0]
    sock = connect(producer.links.path)
    sock.send(link_module.encode(link_module.LinkWant(1, 1)))
    sock.setblocking(True)
    sock.settimeout(5)
    assert await asyncio.to_thread(sock.recv, 100) == b""
    sock.close()
    assert producer.drops.counts["link", "bad_message"] == 1


async def test_a_path_that_another_daemon_answers_at_is_no_proof(bench: Bench) -> None:
    """Stale or copied paths: whoever listens there does not know the nonce."""
    impostor = bench.producer(identity=identity("impostor"))
    await impostor.close()
    impostor = bench.producer(identity=identity("impostor"))
    assert impostor.links is not None

    class Yes(LinkServer):
        def admit(self, hello: LinkHello) -> tuple[int, bytes] | None:
            return 1, b"something else!!"

    yes = Yes(
        bind(str(bench.folder / "yes")),
        clients=impostor.server,
        share=lambda _key: [],
        drops=impostor.drops,
        max_links=4,
    )
    yes.start()
    link = LinkClient(lambda _detail: None)
    with pytest.raises(KvdError, match="another daemon"):
        await link.open(yes.path, daemon_id="c", boot_id=1, nonce=b"n" * 16, timeout_s=5.0)
    yes.close()


def test_the_proof_does_not_give_the_nonce_away() -> None:
    assert link_proof(b"n" * 16) != b"n" * 16
    assert link_proof(b"n" * 16) == link_proof(b"n" * 16)
    assert link_proof(b"n" * 16) != link_proof(b"m" * 16)


def test_a_proof_that_is_no_memfd_is_refused(tmp_run_dir: Path) -> None:
    path = tmp_run_dir / "file"
    path.write_bytes(b"n" * 16)
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(KvdError, match="no memfd"):
            link_module.read_nonce(fd)
    finally:
        os.close(fd)


# --- addresses --------------------------------------------------------------------------------


async def test_names_are_checked_by_what_they_resolve_to() -> None:
    assert "127.0.0.1" in await candidates("localhost", 1, LOOPBACK, 5.0)
    with pytest.raises(AddressRefused) as error:
        await candidates("localhost", 1, (parse_network("10.0.0.0/8"),), 5.0)
    assert error.value.code == Code.PEER_NOT_ALLOWED
    with pytest.raises(AddressRefused) as error:
        await candidates("no-such-host.invalid", 1, LOOPBACK, 5.0)
    assert error.value.code == Code.PEER_UNREACHABLE


async def test_resolving_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()

    async def forever(*_args: object, **_kwargs: object) -> None:
        await asyncio.Event().wait()

    class Slow:
        getaddrinfo = staticmethod(forever)

    monkeypatch.setattr("kvd.peers.resolve.asyncio.get_running_loop", lambda: Slow)
    with pytest.raises(AddressRefused, match=r"0\.05"):
        await candidates("somewhere", 1, LOOPBACK, 0.05)
    assert loop.is_running()


@pytest.mark.parametrize(
    ("host", "inside"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.5", True),
        ("10.1.2.3", False),
        ("::2", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_networks(host: str, inside: bool) -> None:
    assert in_networks(host, LOOPBACK) is inside


async def test_wire_keeps_what_it_is_given() -> None:
    hello = peer.PeerHello("d", "1", "h")
    assert decode_to_producer(encode_to_producer(77, hello)) == (77, hello)


async def test_connecting_again_and_again_leaves_no_socket(bench: Bench) -> None:
    producer = bench.producer()
    consumer = bench.consumer(producer.address)
    up, rounds = 0, 12
    before = 0
    for number in range(rounds):
        await consumer.hears(events.PeerUp, up := up + 1)
        if number == 1:
            before = len(os.listdir("/proc/self/fd"))
        consumer.client.fail(Code.INTERNAL, "once more")
        await consumer.hears(events.PeerDown, up)
        consumer.client.ask()
    await consumer.hears(events.PeerUp, rounds + 1)
    await wait_for_async(
        lambda: len(os.listdir("/proc/self/fd")) <= before, what="descriptors are as before"
    )
