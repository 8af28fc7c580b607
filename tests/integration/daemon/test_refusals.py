"""Engines that do not fit each other, and neighbours that are not ours: refused by name."""

from __future__ import annotations

import errno
import socket
from typing import Any

import msgspec
import psutil
import pytest
import zmq

from kvd.protocol import local, peer
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr, Rank
from kvd.protocol.version import PROTO_MAJOR
from tests.conftest import wait_for
from tests.integration.daemon.conftest import Pair, Site
from tests.integration.daemon.engine import Engine
from tests.integration.daemon.harness import Daemon

CHANGES: dict[str, Any] = {
    "model": "another",
    "revision": "r2",
    "kv_dtype": "float16",
    "scale_mode": "dynamic",
    "block_size": 32,
    "total_kv_heads": 8,
    "kv_heads_per_rank": 4,
    "head_size": 128,
    "layout": "HND",
    "isa": "amx",
    "draft_model": "eagle",
    "mode": "push",
}


def data_connections(daemon: Daemon) -> int:
    """Connections at its data port now."""
    port = daemon.found["data_port"]
    if port is None:
        return 0
    found = psutil.Process(daemon.pid).net_connections("tcp")
    return sum(c.laddr.port == port and c.status != psutil.CONN_LISTEN for c in found)


@pytest.mark.parametrize("field", CHANGES)
def test_a_geometry_mismatch_names_the_field_and_both_values(pair: Pair, field: str) -> None:
    producer, consumer = pair.engines(seed=1)
    ours = getattr(producer_geometry(producer), field)
    other = Engine(pair.d.socket, f"other-{field}", changes={field: CHANGES[field]})
    try:
        other.up()
        producer.offer("t", [1])
        held = other.words.copy()
        before = pair.d.metric("kvd_attaches_total", code="geometry_mismatch")
        done = pair.fetch(other, "t", [2])
        assert done.code == Code.GEOMETRY_MISMATCH, done
        assert field in done.detail
        assert repr(ours) in done.detail
        assert repr(CHANGES[field]) in done.detail
        assert (other.words == held).all()
        assert data_connections(pair.p) == 0
        assert pair.d.metric("kvd_attaches_total", code="geometry_mismatch") == before + 1
        # The producer serves one that fits.
        if pair.fetch(consumer, "t", [3]).code != Code.OK:
            raise AssertionError("a fitting consumer is not served")
    finally:
        other.close()
    wait_for(lambda: pair.p.mapped() > 0, what="the producer is still mapped")
    # tcp keeps its connections until the attachment goes.
    consumer.client.close()
    wait_for(lambda: data_connections(pair.p) == 0, what="the fitting one's connections close")


def producer_geometry(engine: Engine) -> Any:
    memory = engine.client._memory
    assert memory is not None
    return memory.geometry


def test_another_layer_is_named(pair: Pair) -> None:
    producer, _ = pair.engines(seed=1)
    other = Engine(pair.d.socket, "fewer", num_layers=3)
    try:
        other.up()
        producer.offer("t", [1])
        done = pair.fetch(other, "t", [2])
        assert done.code == Code.GEOMETRY_MISMATCH
        assert "4 layers" in done.detail
        assert "3 layers" in done.detail
    finally:
        other.close()


def test_another_rank_is_refused(pair: Pair) -> None:
    producer, _ = pair.engines(seed=1)
    producer.offer("t", [1])
    other = Engine(pair.d.socket, "tp", rank=Rank(tp_rank=1, tp_size=2))
    try:
        other.up()
        done = pair.fetch(other, "t", [2])
        assert done.code == Code.GEOMETRY_MISMATCH
        assert "rank" in done.detail
    finally:
        other.close()


def test_an_engine_that_is_not_there_is_unknown(pair: Pair) -> None:
    _, consumer = pair.engines(seed=1)
    done = pair.fetch(consumer, "t", [1], engine_id="nobody")
    assert done.code == Code.UNKNOWN_ENGINE
    assert "nobody" in done.detail


def test_a_host_that_is_not_allowed_is_never_connected_to(pair: Pair) -> None:
    _, consumer = pair.engines(seed=1)
    done = pair.fetch(consumer, "t", [1], remote=PeerAddr("192.0.2.1", 9))
    assert done.code == Code.PEER_NOT_ALLOWED, done
    assert "192.0.2.1" in done.detail
    assert consumer.wrong(1, {}) == 0


def test_a_transport_that_the_other_side_does_not_have_is_refused(site: Site) -> None:
    p, d = site.daemon("p", transport="shm"), site.daemon("d", transport="tcp")
    producer, consumer = site.engine(p, "p", seed=1), site.engine(d, "d")
    remote = producer.up()
    consumer.up()
    producer.offer("t", [1])
    done = consumer.fetch("t", [1], remote=remote, engine_id="p")
    assert done.code == Code.TRANSPORT_UNAVAILABLE, done
    assert "tcp" in done.detail
    assert "shm" in done.detail
    assert consumer.wrong(1, {}) == 0


def test_what_is_not_ours_is_counted_and_harms_nobody(pair: Pair) -> None:
    """A stranger on each of the daemon's doors, while a transfer goes on beside it."""
    producer, consumer = pair.engines(seed=1)
    noise = [b"", b"\x80\x04\x95N.", b"\xff" * 60_000, b"\x91\xa4Nope"]
    at = pair.p.address
    before = pair.p.metric("kvd_dropped_total")
    context = zmq.Context()
    try:
        dealers = []
        for data in noise:
            dealer = context.socket(zmq.DEALER)
            dealer.set(zmq.LINGER, 0)
            dealer.connect(f"tcp://{at}")
            dealer.send(data)
            dealers.append(dealer)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as shim:
                shim.connect(pair.p.socket)
                shim.send(data)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
                link.connect(pair.p.socket + ".link")
                link.send(data)
        # Not ZMQ at all, on the control port and on the data port.
        for port in (at.port, pair.p.found["data_port"]):
            if port is not None:
                raw = socket.create_connection(("127.0.0.1", port), 5)
                raw.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
                raw.close()
        body = msgspec.msgpack.encode(
            peer.ProducerEnvelope(PROTO_MAJOR + 1, 0, 1, peer.PeerHello("x", "1", "h"))
        )
        dealers[0].send(body)
        producer.offer("t", [1, 2, 3])
        done = pair.fetch(consumer, "t", [4, 5, 6])
        assert done.code == Code.OK, done
        assert consumer.wrong(1, {4: 1, 5: 2, 6: 3}) == 0
        wait_for(lambda: pair.p.metric("kvd_dropped_total") >= before + 10, what="they are counted")
    finally:
        context.destroy(0)
    assert pair.p.popen.poll() is None
    assert producer.state() == "up"
    lines = [(line["where"], line["reason"]) for line in pair.p.lines("dropped")]
    assert len(lines) == len(set(lines)), "logged more than once per kind"


def test_idle_strangers_do_not_keep_others_out(pair: Pair) -> None:
    producer, consumer = pair.engines(seed=1)
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2048)
    try:
        for _ in range(300):
            dealer = context.socket(zmq.DEALER)
            dealer.set(zmq.LINGER, 0)
            dealer.connect(f"tcp://{pair.p.address}")
        producer.offer("t", [1])
        assert pair.fetch(consumer, "t", [2]).code == Code.OK
    finally:
        context.destroy(0)


def test_a_shim_that_never_reads_does_not_hold_up_others(pair: Pair) -> None:
    producer, consumer = pair.engines(seed=1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as deaf:
        deaf.settimeout(10)
        deaf.connect(pair.p.socket)
        hello = local.Hello(PROTO_MAJOR, 0, "deaf", 1, Rank(), "both", "test")
        deaf.send(msgspec.msgpack.encode(hello))
        thrown_out = False
        for seq in range(100_000):
            try:
                deaf.send(msgspec.msgpack.encode(local.Ping(seq)))
            except OSError as e:
                thrown_out = e.errno in (errno.EPIPE, errno.ECONNRESET)
                break
        assert thrown_out
        producer.offer("t", [1])
        assert pair.fetch(consumer, "t", [2]).code == Code.OK
