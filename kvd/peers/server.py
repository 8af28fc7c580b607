"""The ROUTER: daemons that ask us for KV. One client per connection that said hello."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
import zmq
import zmq.asyncio

from kvd import keys
from kvd.addresses import Network
from kvd.core import events
from kvd.drops import Drops
from kvd.errors import ProtocolError
from kvd.local.listener import BindError
from kvd.peers import wire
from kvd.peers.curve import FAILURES, Curve, count_failures
from kvd.peers.identity import Identity
from kvd.peers.link import NONCE_NBYTES
from kvd.peers.resolve import in_networks, tcp_url
from kvd.peers.sockets import RECV_BUDGET, error_text, open_socket, send_nowait
from kvd.protocol import peer
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr

log = structlog.get_logger("kvd.peers")


@dataclass(slots=True)
class _Client:
    number: int
    route: bytes
    daemon_id: str
    boot_id: int
    nonce: bytes
    seen: float
    key: str = ""
    """Name of the key that it proved to hold; empty where there are no keys."""
    source: str = ""

    @property
    def peer(self) -> str:
        """Whose quotas it uses."""
        return self.key or self.source


class PeerServer:
    """Serves one bound address. Feeds ClientJoined, ClientMessage and ClientLeft."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        feed: Callable[[events.Event], None],
        on_left: Callable[[int], None],
        allow: Sequence[Network],
        drops: Drops,
        heartbeat_s: float,
        peer_timeout_s: float,
        max_clients: int,
        max_clients_per_peer: int = 128,
        curve: Curve | None = None,
    ) -> None:
        self._context = context
        self._curve = curve
        self._monitor: zmq.asyncio.Socket | None = None
        self._feed = feed
        self._on_left = on_left
        self._allow = allow
        self._drops = drops
        self._heartbeat_s = heartbeat_s
        self._timeout_s = peer_timeout_s
        self._max_clients = max_clients
        self._max_clients_per_peer = max_clients_per_peer
        self._numbers = itertools.count(1)
        self._by_route: dict[bytes, _Client] = {}
        self._by_number: dict[int, _Client] = {}
        self._by_daemon: dict[str, _Client] = {}
        self._socket: zmq.asyncio.Socket | None = None
        self._identity: Identity | None = None
        self._link = ""

    # --- life -----------------------------------------------------------------------------

    def bind(self, ip: str, port: int) -> PeerAddr:
        """Binds (port 0: any free one); raises BindError naming the address and the way out."""
        router = open_socket(self._context, zmq.ROUTER, ipv6=":" in ip)
        router.set(zmq.BACKLOG, 256)
        router.set(zmq.HANDSHAKE_IVL, 5000)
        # Without this a message to one who left would vanish without a word. (Handing a routing id
        # over to a newer connection is not wanted: ours are made up by ZMQ, one per connection,
        # and a client that comes back says hello anew.)
        router.set(zmq.ROUTER_MANDATORY, 1)
        # Half-open connections are closed below us as well: by TCP, since ZMQ's own heartbeats end
        # the process (libzmq 4.3.5, "Assertion failed: !_io_error") when a client that never read
        # hangs up while it has more messages on their way than we take.
        seconds = max(1, int(self._timeout_s))
        for option, value in (
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, seconds),
            (zmq.TCP_KEEPALIVE_INTVL, max(1, seconds // 3)),
            (zmq.TCP_KEEPALIVE_CNT, 3),
            (zmq.TCP_MAXRT, 1000 * seconds),
        ):
            router.set(option, value)
        if self._curve is not None:
            self._curve.secure_server(router)
        self._monitor = router.get_monitor_socket(FAILURES)
        try:
            router.bind(tcp_url(ip, port))
        except zmq.ZMQError as e:
            self._socket = router
            self.close()
            raise BindError(
                f"cannot listen at {PeerAddr(ip, port) if port else ip}: {error_text(e)} "
                "(give another address with --listen; port 0 takes any free one)"
            ) from None
        self._socket = router
        bound = router.getsockopt_string(zmq.LAST_ENDPOINT)
        return PeerAddr(ip, int(bound.rstrip("\0").rpartition(":")[2]))

    async def serve(self, identity: Identity, link: str) -> None:
        """Receives, and lets silent clients go, until cancelled."""
        self._identity, self._link = identity, link
        async with asyncio.TaskGroup() as both:
            both.create_task(self._receive())
            both.create_task(self._sweep())
            if self._monitor is not None:
                both.create_task(count_failures(self._monitor, self._drops))

    def close(self) -> None:
        """Closes the socket. No ClientLeft is fed: the daemon is going."""
        if self._socket is not None:
            self._socket.disable_monitor()
            if self._monitor is not None:
                self._monitor.close(0)
                self._monitor = None
            self._socket.close(0)
            self._socket = None

    def __len__(self) -> int:
        return len(self._by_number)

    # --- for the daemon and the link --------------------------------------------------------

    def send(self, client: int, message: peer.ToConsumer) -> None:
        """To one client; one that does not take it is dropped."""
        known = self._by_number.get(client)
        if known is None:
            return
        code = self._send(known.route, message)
        if code is not None:
            self.leave(client, code, f"{type(message).__name__} could not be sent")

    def leave(self, client: int, code: Code, detail: str) -> None:
        """Forgets a client, once: its link closed, it is silent, or it is in the way."""
        known = self._by_number.pop(client, None)
        if known is None:
            return
        self._by_route.pop(known.route, None)
        if self._by_daemon.get(known.daemon_id) is known:
            del self._by_daemon[known.daemon_id]
        log.info("client_left", client=client, daemon_id=known.daemon_id, code=code, detail=detail)
        self._feed(events.ClientLeft(client, code))
        self._on_left(client)

    def throw_out(self, client: int, code: Code, detail: str) -> None:
        """Tells a client that it is not served any more, and forgets it."""
        known = self._by_number.get(client)
        if known is not None:
            self._send(known.route, peer.PeerRefused(code, detail[:500]))
            self.leave(client, code, detail)

    def recheck_keys(self) -> None:
        """Throws out those whose key is not authorised any more."""
        if self._curve is None:
            return
        names = {keys.OWN, *(key.name for key in self._curve.ring.peers)}
        for client in [c for c in self._by_number.values() if c.key not in names]:
            self._drops.drop("curve", "key_removed", key=client.key)
            self.throw_out(client.number, Code.PEER_NOT_ALLOWED, "its key was removed")

    def clients(self) -> list[dict[str, object]]:
        """Who is connected, for `kvd status`: daemon_id, source, key, and seconds of silence."""
        now = time.monotonic()
        return [
            {
                "client": c.number,
                "daemon_id": c.daemon_id,
                "source": c.source,
                "key": c.key,
                "silent_s": now - c.seen,
            }
            for c in self._by_number.values()
        ]

    def nonce_of(self, daemon_id: str, boot_id: int) -> tuple[int, bytes] | None:
        """Number and nonce of the client that said hello with these."""
        known = self._by_daemon.get(daemon_id)
        if known is None or known.boot_id != boot_id:
            return None
        return known.number, known.nonce

    # --- inside ---------------------------------------------------------------------------

    async def _receive(self) -> None:
        while self._socket is not None:
            for _ in range(RECV_BUDGET):
                self._take(await self._socket.recv_multipart(copy=False))
            await asyncio.sleep(0)

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        if len(frames) != 2:
            self._drops.drop("peer_server", "multipart", parts=len(frames))
            return
        route, data = frames[0].bytes, frames[1].bytes
        known = self._by_route.get(route)
        try:
            epoch, body = wire.decode_to_producer(data)
        except ProtocolError as e:
            self._drops.drop("peer_server", str(e.code), detail=e.detail, source=_source(frames))
            self._refuse(route, known, e.code, e.detail)
            return
        if isinstance(body, peer.PeerHello):
            self._hello(route, epoch, body, _source(frames), _property(frames, "User-Id"))
            return
        if known is None:
            # We forgot it (it was silent too long), or it never introduced itself.
            self._drops.drop("peer_server", "no_hello", source=_source(frames))
            self._refuse(route, None, Code.STALE_EPOCH, "say hello first")
            return
        if epoch != known.boot_id:
            self._drops.drop("peer_server", "stale_epoch", daemon_id=known.daemon_id)
            self._refuse(route, known, Code.STALE_EPOCH, "a message of another boot")
            return
        known.seen = time.monotonic()
        if isinstance(body, peer.Heartbeat):
            self.send(known.number, peer.HeartbeatAck(body.seq))
        else:
            self._feed(events.ClientMessage(known.number, body))

    def _hello(
        self, route: bytes, epoch: int, hello: peer.PeerHello, source: str, key: str
    ) -> None:
        identity = self._identity
        if identity is None:
            return
        if not in_networks(source, self._allow):
            self._drops.drop("peer_server", "peer_not_allowed", source=source)
            detail = f"{source or 'your address'} is in none of allow_peers of {identity.daemon_id}"
            self._refuse(route, None, Code.PEER_NOT_ALLOWED, detail)
            return
        taken = self._by_daemon.get(hello.daemon_id)
        if taken is not None and taken.key != key:
            # One peer must not be able to push another off by using its name.
            self._drops.drop("peer_server", "daemon_id_taken", source=source, key=key)
            self._refuse(route, None, Code.PEER_NOT_ALLOWED, "another key has that daemon_id")
            return
        for old in (self._by_route.get(route), self._by_daemon.get(hello.daemon_id)):
            if old is not None:
                self.leave(old.number, Code.PEER_LOST, "it introduced itself anew")
        if len(self._by_number) >= self._max_clients:
            self._drops.drop("peer_server", "max_clients", limit=self._max_clients)
            detail = f"{self._max_clients} daemons are connected (max_clients)"
            self._refuse(route, None, Code.OVERLOADED, detail)
            return
        name = key or source
        if sum(c.peer == name for c in self._by_number.values()) >= self._max_clients_per_peer:
            self._drops.drop("peer_server", "max_clients_per_peer", source=source, key=key)
            detail = f"{self._max_clients_per_peer} daemons of {name} are connected"
            self._refuse(route, None, Code.OVERLOADED, f"{detail} (max_clients_per_peer)")
            return
        client = _Client(
            number=next(self._numbers),
            route=route,
            daemon_id=hello.daemon_id,
            boot_id=epoch,
            nonce=secrets.token_bytes(NONCE_NBYTES),
            seen=time.monotonic(),
            key=key,
            source=source,
        )
        self._by_number[client.number] = client
        self._by_route[route] = client
        self._by_daemon[hello.daemon_id] = client
        same_host = bool(self._link) and hello.host != "" and hello.host == identity.host
        log.info(
            "client_joined",
            client=client.number,
            daemon_id=hello.daemon_id,
            version=hello.version,
            source=source,
            key=key,
            same_host=same_host,
        )
        self._feed(
            events.ClientJoined(
                client=client.number,
                daemon_id=hello.daemon_id,
                boot_id=epoch,
                same_host=same_host,
                peer=client.peer,
            )
        )
        welcome = peer.PeerWelcome(
            daemon_id=identity.daemon_id,
            version=identity.version,
            host=identity.host,
            link=self._link,
            nonce=client.nonce,
        )
        self.send(client.number, welcome)

    def _refuse(self, route: bytes, known: _Client | None, code: Code, detail: str) -> None:
        self._send(route, peer.PeerRefused(code, detail[:500]))
        if known is not None:
            self.leave(known.number, code, detail)

    def _send(self, route: bytes, message: peer.ToConsumer) -> Code | None:
        """None when it is on its way, else why it is not."""
        identity, router = self._identity, self._socket
        if identity is None or router is None:
            return Code.PEER_LOST
        try:
            data = wire.encode_to_consumer(identity.boot_id, message)
        except ProtocolError as e:
            log.error("message_too_long", message=type(message).__name__, detail=e.detail)
            return e.code
        error = send_nowait(router, [route, data])
        if error is None:
            return None
        if isinstance(error, zmq.Again):
            self._drops.drop("peer_server", "queue_full")
            return Code.OVERLOADED
        return Code.PEER_LOST

    async def _sweep(self) -> None:
        """Lets clients go that were silent for too long."""
        period = min(self._heartbeat_s, self._timeout_s / 4)
        last = time.monotonic()
        while True:
            await asyncio.sleep(period)
            now = time.monotonic()
            late, last = now - last > 2 * period + 0.1, now
            if late:
                # We were the ones who slept: what they sent meanwhile is still to be read.
                continue
            for client in list(self._by_number.values()):
                if now - client.seen > self._timeout_s:
                    silent = f"silent for {now - client.seen:.1f} s"
                    self.leave(client.number, Code.PEER_LOST, silent)


def _source(frames: Sequence[zmq.Frame]) -> str:
    """The IP address that a message came from, as ZMQ knows it."""
    return _property(frames, "Peer-Address")


def _property(frames: Sequence[zmq.Frame], name: str) -> str:
    try:
        return str(frames[-1].get(name))
    except (zmq.ZMQError, ValueError):
        return ""
