"""CURVE: the control plane between daemons encrypted, and both sides known by their keys.

The server asks our ZAP handler about each client's key before a single message of it gets
through. What is turned away below us (no keys at all, a wrong key of ours) is heard from the
socket's monitor. All of it is counted by reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path

import structlog
import zmq
import zmq.asyncio
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from kvd import keys
from kvd.drops import Drops
from kvd.errors import KvdError
from kvd.keys import KeyRing, PeerKey

log = structlog.get_logger("kvd.curve")

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = "kvd"
ZAP_PARTS = 7
RELOAD_S = 2.0
"""How soon a key that was added or removed counts."""
MAX_TRIES = 16
"""Keys that are tried at one address, when none of them names it."""

FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_CRYPTOGRAPHIC = int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)
_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
UNKNOWN_KEY = "unknown_key"
WRONG_KEY = "wrong_server_key"
NO_CURVE = "mechanism_mismatch"
BAD_HANDSHAKE = "bad_handshake"


class Curve:
    """Our keys as the sockets use them. The peers' part is read again when the folder changes."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.ring: KeyRing = keys.load(folder)
        self._seen = keys.fingerprint_of(self.folder)
        self._last_good: dict[tuple[str, int], bytes] = {}

    def secure_server(self, socket: zmq.asyncio.Socket) -> None:
        """Before bind: nobody without an authorised key gets a message through."""
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, self.ring.secret)
        socket.set_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        # Without a handler ZMQ would let everybody in.
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def secure_client(self, socket: zmq.asyncio.Socket, key: PeerKey) -> None:
        """Before connect: only the holder of `key`'s secret is talked to."""
        socket.set(zmq.CURVE_SERVERKEY, key.public)
        socket.set(zmq.CURVE_PUBLICKEY, self.ring.public)
        socket.set(zmq.CURVE_SECRETKEY, self.ring.secret)

    def candidates(self, host: str, ip: str, port: int) -> list[PeerKey]:
        """Keys to try at an address; the one that fitted last goes first."""
        last = self._last_good.get((ip, port))
        found = self.ring.candidates(host, ip, port)
        found.sort(key=lambda key: key.public != last)
        return found[:MAX_TRIES]

    def fitted(self, ip: str, port: int, key: PeerKey) -> None:
        """Remembers which key a daemon has."""
        if len(self._last_good) >= keys.MAX_PEERS:
            self._last_good.clear()
        self._last_good[ip, port] = key.public

    def reload(self) -> bool:
        """Reads the peers' keys again if they changed; whether they did. Blocks on the disk."""
        seen = keys.fingerprint_of(self.folder)
        if seen == self._seen:
            return False
        self._seen = seen
        peers = keys.load_peers(self.folder)
        changed = peers != self.ring.peers
        self.ring = KeyRing(self.ring.public, self.ring.secret, peers)
        return changed


class ZapHandler:
    """Answers ZMQ's question whose key a client has. One per context."""

    def __init__(self, context: zmq.asyncio.Context, curve: Curve, drops: Drops) -> None:
        self._curve = curve
        self._drops = drops
        self._socket: zmq.asyncio.Socket = context.socket(zmq.REP)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(ZAP_ENDPOINT)

    async def serve(self) -> None:
        """Answers, until cancelled."""
        while True:
            request = await self._socket.recv_multipart()
            await self._socket.send_multipart(self._answer(request))

    def close(self) -> None:
        self._socket.close(0)

    def _answer(self, request: Sequence[bytes]) -> list[bytes]:
        request_id = request[1] if len(request) > 1 else b""
        if len(request) != ZAP_PARTS or request[0] != b"1.0":
            self._drops.drop("curve", BAD_HANDSHAKE)
            return _reply(request_id, b"500", b"not ZAP 1.0")
        domain, address, _, mechanism, credentials = request[2:]
        if domain != ZAP_DOMAIN.encode() or mechanism != b"CURVE" or len(credentials) != 32:
            self._drops.drop("curve", NO_CURVE, source=address.decode("ascii", "replace"))
            return _reply(request_id, b"400", b"CURVE is needed")
        public = z85.encode(credentials)
        name = self._curve.ring.name_of(public)
        if name is None:
            self._drops.drop(
                "curve",
                UNKNOWN_KEY,
                source=address.decode("ascii", "replace"),
                key=public.decode(),
                fix="if it is a peer of yours: kvd keys add NAME KEY",
            )
            return _reply(request_id, b"400", b"unknown key")
        return _reply(request_id, b"200", b"OK", user=name.encode())


def _reply(request_id: bytes, status: bytes, text: bytes, user: bytes = b"") -> list[bytes]:
    return [b"1.0", request_id, status, text, user, b""]


async def count_failures(monitor: zmq.asyncio.Socket, drops: Drops) -> None:
    """Counts the handshakes that a server turned down, until cancelled."""
    while True:
        event = parse_monitor_message(await monitor.recv_multipart())
        if zmq.Event(event["event"]) is zmq.Event.HANDSHAKE_FAILED_AUTH:
            continue  # our handler said no, and counted it
        reasons = {_CRYPTOGRAPHIC: WRONG_KEY, _MISMATCH: NO_CURVE}
        if zmq.Event(event["event"]) is zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            drops.drop("curve", reasons.get(int(event["value"]), BAD_HANDSHAKE))
        elif int(event["value"]) != 0:
            drops.drop("curve", BAD_HANDSHAKE)


async def reload_when_changed(
    curve: Curve, executor: Executor, on_change: Callable[[], None]
) -> None:
    """Looks at the folder from time to time. What is wrong in it is logged, and changes nothing."""
    loop = asyncio.get_running_loop()
    told = ""
    while True:
        await asyncio.sleep(RELOAD_S)
        try:
            changed = await loop.run_in_executor(executor, curve.reload)
        except (KvdError, OSError) as e:
            if str(e) != told:
                told = str(e)
                log.error("keys_not_reloaded", detail=told)
            continue
        told = ""
        if changed:
            log.info("keys_reloaded", peers=len(curve.ring.peers))
            on_change()
