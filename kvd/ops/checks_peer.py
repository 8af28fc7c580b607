"""`kvd doctor --peer`: the way to one other daemon, its hello, and a small verified transfer."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

import zmq
from zmq.utils.monitor import parse_monitor_message

from connector_shim.client import Client
from connector_shim.errors import ClientError
from connector_shim.events import Down
from connector_shim.memory import shared_blocks
from kvd import __version__, keys
from kvd.errors import KvdError, ProtocolError
from kvd.ops.findings import Finding, Surroundings, error, ok, warning
from kvd.peers import wire
from kvd.peers.identity import host_key, new_boot_id
from kvd.peers.resolve import in_networks, tcp_url
from kvd.protocol import local, peer
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr

HELLO_S = 5.0
TRANSFER_S = 20.0
LAYERS, BLOCKS, NBYTES, BLOCK_SIZE = 2, 32, 64 * 1024, 16
ENGINE_ID = "kvd-doctor"
TRANSFER_ID = "kvd-doctor-blocks"
DIGEST = b"kvd doctor's one"
NOBODY = (Code.UNKNOWN_ENGINE, Code.UNKNOWN_TRANSFER, Code.RELEASED, Code.EXPIRED, Code.ENGINE_GONE)
"""Nobody answers there, or it is about to offer its blocks anew."""
_SIOCGIFADDR = 0x8915
_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)


def check_route(at: Surroundings) -> list[Finding]:
    """Name, permission, and the interface that packets leave by."""
    assert at.peer is not None
    host, port = at.peer.host, at.peer.port
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError as e:
        return [
            error(
                "route",
                f"{host} cannot be resolved: {e}",
                why="it cannot be connected to",
                fix="use its address, or mend DNS",
            )
        ]
    ips = [str(info[4][0]) for info in infos]
    allowed = [ip for ip in ips if in_networks(ip, at.settings.peer_networks)]
    if not allowed:
        return [
            error(
                "route",
                f"{ips[0]} is in none of allow_peers ({', '.join(at.settings.allow_peers)})",
                why="our daemon does not contact it",
                fix=f"add its network to allow_peers, for example {ips[0]}",
            )
        ]
    family = socket.AF_INET6 if ":" in allowed[0] else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((allowed[0], port))
            source = str(sock.getsockname()[0])
    except OSError as e:
        return [
            error(
                "route",
                f"no route to {allowed[0]}: {e.strerror}",
                why="it cannot be connected to",
                fix="ip route get shows why",
            )
        ]
    name = _interface(source)
    speed = _speed(at, name)
    shown = f"{allowed[0]} by {name or 'an unknown interface'} ({source}{speed})"
    return [ok("route", shown)]


def _interface(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                raw = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            if socket.inet_ntoa(raw[20:24]) == address:
                return name
    return ""


def _speed(at: Surroundings, name: str) -> str:
    try:
        megabits = int((at.sys / "class/net" / name / "speed").read_text()) if name else -1
    except (OSError, ValueError):
        return ""
    return f", {megabits / 1000:g} Gbit/s" if megabits > 0 else ""


# --- its hello ------------------------------------------------------------------------------


def check_hello(at: Surroundings) -> list[Finding]:
    """Says hello as a daemon does, with our keys where we have any."""
    assert at.peer is not None
    try:
        ring = keys.load(at.settings.keys) if at.settings.keys else None
        ip = str(socket.getaddrinfo(at.peer.host, at.peer.port)[0][4][0])
    except (KvdError, OSError) as e:
        return [error("hello", f"not tried: {e}", why="see above", fix="see above")]
    tries = [None] if ring is None else ring.candidates(at.peer.host, ip, at.peer.port)
    problem: KvdError = KvdError("no key is trusted at its address", Code.PEER_NOT_ALLOWED)
    for key in tries:
        try:
            started = time.monotonic()
            welcome = _hello(at.peer, ip, ring, key)
            taken = time.monotonic() - started
        except KvdError as e:
            problem = e
            continue
        return _welcomed(at.peer, welcome, taken, "" if key is None else key.name)
    return [_not_welcome(at.peer, problem)]


def _welcomed(
    address: PeerAddr, welcome: peer.PeerWelcome, taken: float, key: str
) -> list[Finding]:
    found = [
        ok(
            "hello",
            f"{address} is kvd {welcome.version} ({welcome.daemon_id}), hello took "
            f"{taken * 1e3:.0f} ms" + (f", key {key}" if key else ", without keys"),
        )
    ]
    if welcome.version != __version__:
        found.append(
            warning(
                "version_skew",
                f"{address} is kvd {welcome.version}, this one {__version__}",
                why="they understand each other, but one of them misses what the other can do",
                fix="upgrade the older one",
            )
        )
    return found


def _not_welcome(address: PeerAddr, problem: KvdError) -> Finding:
    fixes = {
        Code.VERSION_MISMATCH: "upgrade the older of the two daemons",
        Code.PEER_NOT_ALLOWED: "kvd keys list on both sides: each must trust the other's key, "
        "and allow_peers there must cover this host",
        Code.OVERLOADED: "raise max_clients there",
    }
    fix = fixes.get(problem.code, "is it started, is its port open to this host (kvd status there)")
    check = "version_skew" if problem.code is Code.VERSION_MISMATCH else "hello"
    return error(check, f"{address}: {problem.detail}", why="nothing can be fetched", fix=fix)


def _hello(
    address: PeerAddr, ip: str, ring: keys.KeyRing | None, key: keys.PeerKey | None
) -> peer.PeerWelcome:
    """Raises KvdError: PEER_UNREACHABLE, PEER_NOT_ALLOWED, VERSION_MISMATCH or what it says."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.set(zmq.LINGER, 0)
        dealer.set(zmq.IPV6, int(":" in ip))
        dealer.set(zmq.RECONNECT_IVL, -1)
        dealer.set(zmq.MAXMSGSIZE, peer.MAX_FRAME)
        if ring is not None and key is not None:
            dealer.set(zmq.CURVE_SERVERKEY, key.public)
            dealer.set(zmq.CURVE_PUBLICKEY, ring.public)
            dealer.set(zmq.CURVE_SECRETKEY, ring.secret)
        events = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        events |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        with dealer.get_monitor_socket(events) as monitor:
            try:
                dealer.connect(tcp_url(ip, address.port))
                hello = peer.PeerHello(f"doctor-{os.getpid()}", __version__, host_key())
                dealer.send(wire.encode_to_producer(new_boot_id(), hello), zmq.NOBLOCK)
            except zmq.Again:
                pass  # it failed already; the monitor says how
            except zmq.ZMQError as e:
                raise KvdError(str(e), Code.PEER_UNREACHABLE) from None
            try:
                return _answer(dealer, monitor, ring is not None)
            finally:
                dealer.disable_monitor()


def _answer(dealer: zmq.Socket[bytes], monitor: zmq.Socket[bytes], keyed: bool) -> peer.PeerWelcome:
    poller = zmq.Poller()
    poller.register(dealer, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    deadline = time.monotonic() + HELLO_S
    while (left := deadline - time.monotonic()) > 0:
        ready = dict(poller.poll(int(left * 1000) + 1))
        if dealer in ready:
            try:
                _, body = wire.decode_to_consumer(dealer.recv())
            except ProtocolError as e:
                raise KvdError(e.detail, e.code) from None
            if isinstance(body, peer.PeerWelcome):
                return body
            if isinstance(body, peer.PeerRefused):
                raise KvdError(f"refused: {body.detail}", wire.code_of(body.code))
            raise KvdError("does not answer as kvd does", Code.BAD_MESSAGE)
        if monitor in ready:
            event = parse_monitor_message(monitor.recv_multipart())
            raise _ended(zmq.Event(event["event"]), int(event["value"]), keyed)
    raise KvdError(f"no answer within {HELLO_S:g} s", Code.PEER_UNREACHABLE)


def _ended(event: zmq.Event, value: int, keyed: bool) -> KvdError:
    if event is zmq.Event.HANDSHAKE_FAILED_AUTH:
        return KvdError("does not know our key", Code.PEER_NOT_ALLOWED)
    if event is zmq.Event.HANDSHAKE_FAILED_PROTOCOL and value == _MISMATCH:
        what = "has no keys, this one does" if keyed else "asks for keys, and we have none"
        return KvdError(what, Code.PEER_NOT_ALLOWED)
    if event is zmq.Event.HANDSHAKE_FAILED_NO_DETAIL and keyed:
        return KvdError("has another key than we think, or none", Code.PEER_NOT_ALLOWED)
    if event is zmq.Event.CLOSED:
        return KvdError("refuses connections", Code.PEER_UNREACHABLE)
    return KvdError(f"closed the connection ({event.name})", Code.PEER_UNREACHABLE)


# --- a transfer -----------------------------------------------------------------------------


def check_transfer(at: Surroundings) -> list[Finding]:
    """Fetches known blocks from `kvd doctor --answer` at the peer, and compares each byte."""
    assert at.peer is not None
    if at.status is None:
        return [
            warning(
                "transfer",
                "not tried: no daemon runs here",
                why="the transfer goes through it",
                fix="start it first",
            )
        ]
    try:
        done, wrong, taken = _fetch(at.settings.socket, at.peer)
    except (ClientError, TimeoutError) as e:
        return [error("transfer", str(e), why="engines cannot fetch either", fix="see the log")]
    if done.code in NOBODY:
        return [
            warning(
                "transfer",
                "the peer is reached, but nobody there offers blocks to try",
                why="so no byte was moved",
                fix="run there, meanwhile: kvd doctor --answer",
            )
        ]
    if done.code != Code.OK:
        return [
            error(
                "transfer",
                f"{done.code}: {done.detail}",
                why="engines' transfers fail likewise",
                fix="docs/runbook.md says what each code means",
            )
        ]
    if wrong:
        return [
            error(
                "transfer",
                f"{wrong} of {done.nbytes} bytes are not those that were sent",
                why="answers would be wrong",
                fix="stop using it, and report this",
            )
        ]
    speed = done.nbytes / max(taken, 1e-9) / 1e9
    shown = f"{done.nbytes} bytes by {done.transport}, each compared, {taken * 1e3:.1f} ms"
    return [ok("transfer", f"{shown} ({speed:.2f} GB/s; kvd bench measures properly)")]


def _byte(block: int, layer: int) -> int:
    return (37 * block + 101 * layer + 11) % 251


@contextmanager
def _engine(socket_path: str, engine_id: str) -> Iterator[tuple[Client, memoryview]]:
    description, mapping = shared_blocks(
        LAYERS, BLOCKS, NBYTES, block_size=BLOCK_SIZE, model="kvd-doctor"
    )
    try:
        with Client(socket_path, engine_id=engine_id, client=local.DOCTOR) as client:
            client.describe(description)
            client.wait_up(TRANSFER_S)
            with memoryview(mapping) as view:
                yield client, view
    finally:
        description.close()
        mapping.close()


def _fetch(socket_path: str, address: PeerAddr) -> tuple[local.FetchDone, int, float]:
    """(outcome, wrong bytes, seconds). Raises ClientError or TimeoutError."""
    blocks = list(range(BLOCKS // 2))
    with _engine(socket_path, f"{ENGINE_ID}-{os.getpid()}") as (client, view):
        started = time.monotonic()
        client.fetch(
            TRANSFER_ID, remote=address, engine_id=ENGINE_ID, start=0,
            end=len(blocks) * BLOCK_SIZE, blocks=[blocks], digest=DIGEST,
            deadline_s=TRANSFER_S / 2, park_s=0.0,
        )  # fmt: skip
        done = _wait_done(client, started + TRANSFER_S)
        taken = time.monotonic() - started
        wrong = sum(_wrong(view, layer, block) for layer in range(LAYERS) for block in blocks)
    return done, wrong, taken


def _wrong(view: memoryview, layer: int, block: int) -> int:
    begin = (layer * BLOCKS + block) * NBYTES
    got = bytes(view[begin : begin + NBYTES])
    return NBYTES - got.count(_byte(block, layer))


def _wait_done(client: Client, deadline: float) -> local.FetchDone:
    while time.monotonic() < deadline:
        for event in client.poll(0.2):
            if isinstance(event, local.FetchDone):
                return event
            if isinstance(event, Down):
                raise TimeoutError("the daemon went away")
    raise TimeoutError(f"no outcome within {TRANSFER_S:g} s")


def answer(socket_path: str, seconds: float) -> None:
    """Offers known blocks through the daemon at `socket_path` for `seconds`, then returns.

    Raises ClientError or TimeoutError where there is no daemon.
    """
    blocks = list(range(BLOCKS // 2))
    end = time.monotonic() + seconds
    with _engine(socket_path, ENGINE_ID) as (client, view):
        for layer in range(LAYERS):
            for block in blocks:
                begin = (layer * BLOCKS + block) * NBYTES
                view[begin : begin + NBYTES] = bytes([_byte(block, layer)]) * NBYTES
        generation = 0
        offered = False
        while (left := end - time.monotonic()) > 0:
            if not offered and client.state == "up":
                generation, offered = generation + 1, True
                client.offer(
                    TRANSFER_ID, generation, blocks=[blocks],
                    digests={len(blocks) * BLOCK_SIZE: DIGEST},
                    tokens=len(blocks) * BLOCK_SIZE, lease_s=30.0,
                )  # fmt: skip
            for event in client.poll(min(left, 0.2)):
                # Fetched, or its lease is over: offered anew, for the next who tries.
                offered = offered and not isinstance(event, local.OfferEnded | Down)
