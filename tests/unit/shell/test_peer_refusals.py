"""What is refused between daemons, and harms nobody else."""

from __future__ import annotations

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvd.addresses import parse_network
from kvd.core import events
from kvd.protocol import peer
from kvd.protocol.codes import Code
from kvd.protocol.version import PROTO_MAJOR
from tests.unit.shell.ends import Bench, answer, say_hello
from tests.unit.shell.fakes import PICKLE


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


async def test_clients_of_one_address_are_bounded(bench: Bench) -> None:
    producer = bench.producer(max_clients=9, max_clients_per_peer=2)
    dealers = [bench.dealer(producer.address) for _ in range(3)]
    for number, dealer in enumerate(dealers[:2]):
        await dealer.send(say_hello(f"d{number}"))
        assert isinstance(await answer(dealer), peer.PeerWelcome)
    await dealers[2].send(say_hello("d2"))
    refused = await answer(dealers[2])
    assert isinstance(refused, peer.PeerRefused)
    assert refused.code == Code.OVERLOADED
    assert "127.0.0.1" in refused.detail
    assert producer.drops.counts["peer_server", "max_clients_per_peer"] == 1
    # One that comes back is no further one.
    await dealers[0].send(say_hello("d0", epoch=6))
    assert isinstance(await answer(dealers[0]), peer.PeerWelcome)
    other = bench.dealer(producer.address, source="127.0.0.9")
    await other.send(say_hello("d3"))
    assert isinstance(await answer(other), peer.PeerWelcome)
    assert {j.peer for j in producer.of(events.ClientJoined)} == {"127.0.0.1", "127.0.0.9"}


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
