"""What strangers are known to do, one by one: refused, counted by reason, and nobody else's harm.

That a good peer is served all the while, and that nothing is executed or kept, is looked at by the
`target` fixture around each test.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zmq

from kvd import keys
from kvd.protocol import peer
from kvd.protocol.codes import Code
from kvd.transport.tcp_wire import Kind, pack_request, preamble
from tests.conftest import wait_for
from tests.hostile.doors import (
    ANSWER_S,
    DataDoor,
    HttpDoor,
    Insider,
    UnixDoor,
    ZmqDoor,
    bait_request,
    hello,
    read_to_end,
    said,
)
from tests.hostile.messages import CLAIMS, pickle_that_touches
from tests.hostile.target import SETTLE_S, Target
from tests.integration.daemon.conftest import Site

ELSEWHERE = "127.0.0.9"
"""The strangers' address, where it matters that it is not the good peer's."""
ZMTP = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + b"\0" * 16 + b"\0" * 32
"""A greeting of ZMQ's wire protocol, 64 bytes."""
READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
DATA = preamble() + pack_request(bait_request(b"\0" * 16))
HTTP_HEAD = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: " + b"y" * 200


def all_closed(socks: list[socket.socket]) -> bool:
    """Whether the other end has closed all of them; what it says before is thrown away."""
    for sock in socks:
        sock.setblocking(False)
        try:
            while sock.recv(4096):
                pass
        except BlockingIOError:
            return False
        except OSError:
            continue
    return True


@contextlib.contextmanager
def many(count: int, make: Callable[[], socket.socket]) -> Iterator[list[socket.socket]]:
    socks: list[socket.socket] = []
    try:
        socks.extend(make() for _ in range(count))
        yield socks
    finally:
        for sock in socks:
            sock.close()


@pytest.mark.parametrize(
    ("door", "text", "where", "reasons"),
    [
        ("data", DATA, "data", ("first_frame", "bad_frame")),
        ("zmq", ZMTP, "curve", ("bad_handshake",)),
        ("http", HTTP_HEAD, "http", ("timeout",)),
    ],
)  # fmt: skip
def test_slow_loris(
    target: Target, door: str, text: bytes, where: str, reasons: tuple[str, ...]
) -> None:
    """Connections that say what belongs there, byte by byte, are closed in time."""
    ports = {"data": target.data_port, "zmq": target.at.port, "http": target.http[1]}
    before = sum(target.dropped(where, reason) for reason in reasons)
    count = 20
    with many(count, lambda: socket.create_connection(("127.0.0.1", ports[door]), 10)) as socks:
        sent = 0

        def dribble() -> bool:
            nonlocal sent
            for sock in socks:
                with contextlib.suppress(OSError):
                    sock.send(text[sent : sent + 1])
            sent = min(sent + 1, len(text) - 1)
            return all_closed(socks)

        wait_for(dribble, SETTLE_S, what="all are closed by the daemon")
    wait_for(
        lambda: sum(target.dropped(where, r) for r in reasons) >= before + count, SETTLE_S,
        what=f"{count} are counted",
    )  # fmt: skip


def test_a_shim_that_says_hello_too_slowly(target: Target, unix_door: UnixDoor) -> None:
    before = target.dropped("session", "no_hello")
    with many(20, unix_door.connect) as socks:
        wait_for(lambda: all_closed(socks), SETTLE_S, what="all are closed by the daemon")
    target.waits_for_drop("session", "no_hello", before + 20)


@pytest.mark.fd_margin(64)
def test_a_thousand_idle_data_connections(target: Target, data_door: DataDoor) -> None:
    before = target.dropped("data")
    with many(1000, lambda: data_door.connect(ELSEWHERE)) as socks:
        target.fetch_on_new_connections()
        wait_for(lambda: all_closed(socks), SETTLE_S, what="all are closed by the daemon")
    wait_for(lambda: target.dropped("data") >= before + 1000, SETTLE_S, what="all are counted")


@pytest.mark.fd_margin(64)
def test_a_thousand_idle_daemons(target: Target, zmq_door: ZmqDoor) -> None:
    """They say hello and no more, as a peer that hangs does."""
    before = target.dropped("peer_server", "max_clients_per_peer")
    most = 0.0

    def answered() -> bool:
        nonlocal most
        most = max(most, target.p.metric("kvd_clients"))
        joined = sum(line["source"] == ELSEWHERE for line in target.p.lines("client_joined"))
        refused = target.dropped("peer_server", "max_clients_per_peer") - before
        return bool(refused + joined >= 1000)

    with contextlib.ExitStack() as stack:
        for number in range(1000):
            stack.enter_context(zmq_door.dealer(ELSEWHERE)).send(hello(f"idle-{number}"))
        wait_for(answered, SETTLE_S, what="each is let in or refused")
        wait_for(lambda: target.p.metric("kvd_clients") == 1, SETTLE_S, what="they are forgotten")
    assert most <= 129


@pytest.mark.fd_margin(64)
def test_a_thousand_idle_engines(target: Target, unix_door: UnixDoor) -> None:
    before = target.dropped("session")
    with many(1000, unix_door.connect) as socks:
        wait_for(lambda: all_closed(socks), SETTLE_S, what="all are closed by the daemon")
    wait_for(lambda: target.dropped("session") >= before + 1000, SETTLE_S, what="all are counted")


@pytest.mark.fd_margin(64)
def test_a_thousand_idle_http_connections(target: Target) -> None:
    before = target.dropped("http")
    with many(1000, lambda: socket.create_connection(target.http, ANSWER_S)) as socks:
        wait_for(lambda: all_closed(socks), SETTLE_S, what="all are closed by the daemon")
        wait_for(lambda: target.dropped("http") >= before + 1000, SETTLE_S, what="all are counted")


def test_data_that_is_never_read(target: Target, zmq_door: ZmqDoor, data_door: DataDoor) -> None:
    """A peer with a ticket asks for the same blocks again and again."""
    insider = Insider(target, zmq_door, "deaf")
    before = target.dropped("data", "stalled")
    ask = pack_request(bait_request(insider.ticket))
    try:
        with many(8, data_door.greeted) as socks:

            def over() -> bool:
                insider.beat()
                for sock in socks:
                    sock.setblocking(False)
                    with contextlib.suppress(OSError):
                        sock.send(ask * 100)
                return target.dropped("data", "stalled") >= before + 8

            wait_for(over, SETTLE_S, what="all are given up")
    finally:
        insider.close()


def test_answers_that_are_never_read(target: Target, zmq_door: ZmqDoor) -> None:
    """Several times: a client that hangs up with much under way ended the daemon once."""
    beat = said(peer.Heartbeat(1))
    for number in range(4):
        before = target.dropped("peer_server")
        with zmq_door.dealer() as deaf:
            deaf.set(zmq.RCVHWM, 1)
            deaf.send(hello(f"deaf-{number}"))

            def over(deaf: zmq.Socket[bytes] = deaf, before: float = before) -> bool:
                with contextlib.suppress(zmq.Again):
                    for _ in range(20_000):
                        deaf.send(beat, zmq.NOBLOCK)
                return target.dropped("peer_server") > before

            wait_for(over, SETTLE_S, what="it is given up")


def test_replayed_tickets(target: Target, zmq_door: ZmqDoor, data_door: DataDoor) -> None:
    insider = Insider(target, zmq_door, "replays")
    try:
        with data_door.greeted() as sock:
            asked = bait_request(insider.ticket)
            assert data_door.ask(sock, asked).kind is Kind.COMMIT
            # Blocks that the ticket does not name.
            outside = bait_request(
                insider.ticket, indices=np.array([3], np.uint32), nbytes=4 * 4096
            )
            before = target.dropped("data", "range_not_held")
            answer = data_door.ask(sock, outside)
            assert (answer.kind, answer.code) == (Kind.REFUSED, Code.RANGE_NOT_HELD)
            target.waits_for_drop("data", "range_not_held", before + 1)
            insider.sock.send(said(peer.FetchClose("f", "ok", 0)))
            insider.beat()
            before = target.dropped("data", "unknown_transfer")
            for again in (sock, data_door.greeted()):
                with again:
                    answer = data_door.ask(again, asked)
                    assert (answer.kind, answer.code) == (Kind.REFUSED, Code.UNKNOWN_TRANSFER)
            target.waits_for_drop("data", "unknown_transfer", before + 2)
        assert insider.grant("g").ticket != insider.ticket
    finally:
        insider.close()


def test_oversized_claims(
    target: Target, zmq_door: ZmqDoor, data_door: DataDoor, unix_door: UnixDoor,
    http_door: HttpDoor,
) -> None:  # fmt: skip
    """Lengths that are claimed are not believed, so nothing is set aside for them."""
    before = target.dropped("session", "undecodable")
    for number, claim in enumerate(CLAIMS):
        unix_door.attack(1, [(claim, 0)], number)
    target.waits_for_drop("session", "undecodable", before + len(CLAIMS))
    before = target.dropped("peer_server", "bad_message")
    for number, claim in enumerate(CLAIMS):
        zmq_door.attack(True, [[claim]], number)
    target.waits_for_drop("peer_server", "bad_message", before + len(CLAIMS))
    # A frame of 2**60 bytes at ZMQ's own level: the connection ends, nothing reaches us.
    with socket.create_connection((target.at.host, target.at.port), ANSWER_S) as sock:
        sock.sendall(ZMTP + READY + b"\x02" + (2**60).to_bytes(8, "big") + b"x" * 1000)
        read_to_end(sock, "the ZMQ port")
    before = target.dropped("data", "bad_frame")
    data_door.attack(True, [b"\xff\xff\xff\xff" + b"x" * 1000])
    target.waits_for_drop("data", "bad_frame", before + 1)
    before = target.dropped("http", "refused")
    http_door.attack(
        b"POST /v1/drain HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\nx",
        whole=True,
    )
    target.waits_for_drop("http", "refused", before + 1)


def test_pickle_bytes(
    target: Target, zmq_door: ZmqDoor, data_door: DataDoor, unix_door: UnixDoor,
    http_door: HttpDoor,
) -> None:  # fmt: skip
    """That the file which they would make is not there is looked at by the fixture."""
    pickled = pickle_that_touches(target.canary)
    before = {w: target.dropped(w) for w in ("session", "peer_server", "data", "http", "link")}
    for stage in range(3):
        unix_door.attack(stage, [(pickled, 0)], stage)
    UnixDoor(target.p.socket + ".link").connect().close()
    with UnixDoor(target.p.socket + ".link").connect() as sock:
        sock.send(pickled)
        assert sock.recv(100) == b""
    zmq_door.attack(False, [[pickled]], 1)
    zmq_door.attack(True, [[pickled], [pickled, pickled]], 2)
    data_door.attack(False, [pickled])
    data_door.attack(True, [pickled])
    http_door.attack(pickled, whole=False)
    expected = {"session": 3, "peer_server": 3, "data": 2, "http": 1, "link": 1}

    def counted() -> bool:
        return all(target.dropped(w) >= before[w] + count for w, count in expected.items())

    wait_for(counted, SETTLE_S, what="all are counted")


def test_the_canary_of_the_pickle_works(target: Target) -> None:
    """Whoever does unpickle it makes the file: else its absence would say nothing."""
    import subprocess
    import sys

    other = target.canary.with_name("made")
    code = "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"
    subprocess.run(
        [sys.executable, "-c", code], input=pickle_that_touches(other), check=True, timeout=60
    )
    assert other.exists()


def test_wrong_keys(site: Site, tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Without a key, with one that nobody trusts, and with the wrong idea of the daemon's."""
    folder = tmp_path / "keys"
    own = keys.init(folder).public
    target = Target(site, site.folder, keys=str(folder))
    public, secret = zmq.curve_keypair()
    other, _ = zmq.curve_keypair()
    with target.unharmed(), target.served_meanwhile():
        for reasons, server_key in (
            (("mechanism_mismatch", "bad_handshake"), b""),
            (("unknown_key",), own),
            (("wrong_server_key",), other),
        ):

            def counted(reasons: tuple[str, ...] = reasons) -> float:
                return sum(target.dropped("curve", reason) for reason in reasons)

            before = counted()
            with context.socket(zmq.DEALER) as stranger:
                stranger.set(zmq.LINGER, 0)
                if server_key:
                    stranger.set(zmq.CURVE_SERVERKEY, server_key)
                    stranger.set(zmq.CURVE_PUBLICKEY, public)
                    stranger.set(zmq.CURVE_SECRETKEY, secret)
                stranger.connect(f"tcp://{target.at}")
                stranger.send(hello("stranger"))
                wait_for(partial(_more, counted, before), SETTLE_S, what=f"{reasons} are counted")
                assert not stranger.poll(200), "it was answered"
        assert target.p.metric("kvd_clients") == 1


def _more(count: Callable[[], float], before: float) -> bool:
    return count() > before
