"""ROUTER and DEALER: handshake, liveness, and who they are in this life."""

from __future__ import annotations

import os

from kvd.core import events
from kvd.peers.link import LinkClient
from kvd.peers.wire import encode_to_consumer, encode_to_producer
from kvd.protocol import peer
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr
from tests.conftest import wait_for_async
from tests.unit.shell.ends import Bench, answer, identity, say_hello


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
