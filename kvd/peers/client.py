"""DEALERs: daemons that we ask for KV. One task and one connection per peer.

A connection that breaks is never mended below us: ZMQ would go on as if no message had been lost,
so its own reconnecting is switched off, and each new connection starts with a new hello.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvd.addresses import Network
from kvd.core import events
from kvd.drops import Drops
from kvd.errors import KvdError, ProtocolError
from kvd.keys import PeerKey
from kvd.peers import bootstrap, wire
from kvd.peers.curve import Curve
from kvd.peers.identity import Identity
from kvd.peers.link import LinkClient
from kvd.peers.resolve import candidates, tcp_url
from kvd.peers.sockets import RECV_BUDGET, error_text, open_socket, send_nowait
from kvd.peers.wire import code_of
from kvd.protocol import peer
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr

log = structlog.get_logger("kvd.peers")

T = TypeVar("T")

BACKOFF_S = (0.05, 2.0)
"""First and longest pause before a peer is tried again."""
ENDINGS = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_MISMATCH = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
CLOSE_LINGER_MS = 200
"""What was said last (a fetch is closed, an attachment given up) may still leave."""


class PeerProblem(KvdError):
    """Why a peer is not, or no longer, up."""


class WrongKey(PeerProblem):
    """It hung up on the key that we took for its own."""


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """What all peers share."""

    identity: Identity
    allow: Sequence[Network]
    heartbeat_s: float
    peer_timeout_s: float
    connect_timeout_s: float
    curve: Curve | None = None


class PeerClient:
    """Keeps one peer connected until `close`; feeds PeerUp, PeerMessage and PeerDown."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        address: PeerAddr,
        options: PeerOptions,
        *,
        feed: Callable[[events.Event], None],
        drops: Drops,
    ) -> None:
        self.address = address
        self._target = address
        self.ip = ""
        """The numeric address that we talk to, while up."""
        self.link: LinkClient | None = None
        self.up = False
        self.key = ""
        """The name of the key that it holds, where there are keys."""
        self.rtt_s = -1.0
        """Of the last heartbeat; -1 before the first."""
        self.problem = ""
        """Why it was down last."""
        self.daemon_id = ""
        self._beat: tuple[int, float] = (0, 0.0)
        self._context = context
        self._options = options
        self._feed = feed
        self._drops = drops
        self._dealer: zmq.asyncio.Socket | None = None
        self._boot_id = -1
        self._problem: asyncio.Future[None] | None = None
        self._monitor: zmq.asyncio.Socket | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._poke = asyncio.Event()
        self._was_down = False
        self._told_no_link = False
        self._retired = False
        self._heard = 0.0

    # --- for the daemon -------------------------------------------------------------------

    def ask(self) -> None:
        """The next attempt is made at once."""
        if not self.up:
            self._poke.set()

    def send(self, message: peer.ToProducer) -> None:
        """Sends, or drops the peer when it does not take it. While down, nothing is sent."""
        if self.up:
            self._send(message)

    @property
    def state(self) -> str:
        """up, connecting or down."""
        if self.up:
            return "up"
        return "connecting" if self._dealer is not None else "down"

    def retire(self) -> None:
        """Feeds nothing any more; `run` is about to be cancelled."""
        self._retired = True

    def fail(self, code: Code, detail: str) -> None:
        """Ends the present connection, from outside of it."""
        self._break(PeerProblem(detail, code))

    async def run(self) -> None:
        """Connects, stays, and tries again, until cancelled."""
        pause = BACKOFF_S[0]
        try:
            while True:
                started = time.monotonic()
                try:
                    await self._live()
                except KvdError as e:
                    self._down(e)
                except Exception as e:
                    log.exception("peer_failed", peer=str(self.address))
                    self._down(PeerProblem(f"{self.address}: {e!r}", Code.INTERNAL))
                if time.monotonic() - started > self._options.peer_timeout_s:
                    pause = BACKOFF_S[0]
                self._poke.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause * random.uniform(0.75, 1.25)):
                        await self._poke.wait()
                pause = min(2 * pause, BACKOFF_S[1])
        finally:
            self._close(CLOSE_LINGER_MS)

    # --- one connection -------------------------------------------------------------------

    async def _live(self) -> None:
        options = self._options
        address = await self._locate()
        ips = await candidates(address.host, address.port, options.allow, options.connect_timeout_s)
        problem = PeerProblem(f"{address} has no address", Code.PEER_UNREACHABLE)
        for ip in ips:
            try:
                welcome = await self._greet(ip)
                break
            except PeerProblem as e:
                problem = e
                if e.code is not Code.PEER_UNREACHABLE:
                    raise
        else:
            raise problem
        self.ip = ip
        same_host = await self._open_link(welcome)
        log.info(
            "peer_up",
            peer=str(self.address),
            daemon_id=welcome.daemon_id,
            version=welcome.version,
            same_host=same_host,
        )
        self.up = True
        self.daemon_id = welcome.daemon_id
        self._was_down = False
        self._feed(events.PeerUp(self.address, welcome.daemon_id, self._boot_id, same_host))
        await self._unless_broken(self._stay())

    async def _locate(self) -> PeerAddr:
        """Where the peer listens now: a bootstrap service is asked at each attempt."""
        options = self._options
        self._target = self.address
        if self.address.rank is not None:
            timeout_s = options.connect_timeout_s
            self._target = await bootstrap.locate(self.address, options.allow, timeout_s)
        return self._target

    async def _greet(self, ip: str) -> peer.PeerWelcome:
        """One address: with CURVE, each key that may be its is tried, until one is."""
        curve, address = self._options.curve, self._target
        if curve is None:
            return await self._attempt(ip, None)
        tried: list[str] = []
        for key in curve.candidates(address.host, ip, address.port):
            try:
                welcome = await self._attempt(ip, key)
            except WrongKey:
                tried.append(key.name)
                continue
            curve.fitted(ip, address.port, key)
            self.key = key.name
            return welcome
        self._drops.drop("curve_client", "no_key_fits", peer=str(address), tried=tried)
        raise PeerProblem(
            f"{address} has none of the keys that are trusted at its address "
            f"({', '.join(tried) or 'none'}; kvd keys list), has no keys at all, or broke off",
            Code.PEER_NOT_ALLOWED,
        )

    async def _attempt(self, ip: str, key: PeerKey | None) -> peer.PeerWelcome:
        try:
            return await self._handshake(ip, key)
        except PeerProblem:
            self._close(0)
            raise

    async def _handshake(self, ip: str, key: PeerKey | None) -> peer.PeerWelcome:
        options = self._options
        loop = asyncio.get_running_loop()
        self._problem = loop.create_future()
        dealer = open_socket(self._context, zmq.DEALER, ipv6=":" in ip)
        self._dealer = dealer
        dealer.set(zmq.RECONNECT_IVL, -1)
        dealer.set(zmq.CONNECT_TIMEOUT, max(1, int(options.connect_timeout_s * 1000)))
        if options.curve is not None and key is not None:
            options.curve.secure_client(dealer, key)
        self._monitor = dealer.get_monitor_socket(ENDINGS)
        self._watcher = asyncio.ensure_future(self._guard(self._watch(self._monitor)))
        try:
            dealer.connect(tcp_url(ip, self._target.port))
        except zmq.ZMQError as e:
            raise PeerProblem(f"{self.address}: {error_text(e)}", Code.PEER_UNREACHABLE) from None
        identity = options.identity
        self._send(peer.PeerHello(identity.daemon_id, identity.version, identity.host))
        try:
            async with asyncio.timeout(options.connect_timeout_s):
                return await self._unless_broken(self._welcome(dealer))
        except TimeoutError:
            raise PeerProblem(
                f"{self.address} did not answer within {options.connect_timeout_s:g} s",
                Code.PEER_UNREACHABLE,
            ) from None

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Any ending of the TCP connection ends the peer, at once."""
        event = parse_monitor_message(await monitor.recv_multipart())
        what = zmq.Event(event["event"])
        if what is zmq.Event.CLOSED:
            self._break(PeerProblem(f"{self.address} refuses connections", Code.PEER_UNREACHABLE))
        elif what is zmq.Event.HANDSHAKE_FAILED_AUTH:
            self._break(
                PeerProblem(
                    f"{self.address} does not know our key; add it there: kvd keys add",
                    Code.PEER_NOT_ALLOWED,
                )
            )
        elif what is zmq.Event.HANDSHAKE_FAILED_PROTOCOL and event["value"] == _MISMATCH:
            ours = "has no keys, this one does" if self._options.curve else "asks for keys (CURVE)"
            self._break(PeerProblem(f"{self.address} {ours}", Code.PEER_NOT_ALLOWED))
        elif what is zmq.Event.HANDSHAKE_FAILED_NO_DETAIL and self._options.curve is not None:
            self._break(WrongKey(f"{self.address}: {what.name}", Code.PEER_NOT_ALLOWED))
        elif what is not zmq.Event.MONITOR_STOPPED:
            code = Code.PEER_LOST if self.up else Code.PEER_UNREACHABLE
            hint = "" if self.up else "; it may ask for keys (CURVE)"
            self._break(
                PeerProblem(f"{self.address} closed the connection ({what.name}){hint}", code)
            )

    async def _guard(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """What runs beside the connection ends it when it fails."""
        try:
            await coroutine
        except Exception as e:
            log.error("peer_failed", peer=str(self.address), exc_info=e)
            self._break(PeerProblem(f"{self.address}: {e!r}", Code.INTERNAL))

    async def _unless_broken(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result; raises the connection's problem as soon as there is one."""
        task = asyncio.ensure_future(coroutine)
        waits: set[asyncio.Future[Any]] = {task}
        if self._problem is not None:
            waits.add(self._problem)
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and self._problem is not None:
                self._problem.result()
            return task.result()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, KvdError):
                await task

    async def _welcome(self, dealer: zmq.asyncio.Socket) -> peer.PeerWelcome:
        epoch, body = self._decode(await dealer.recv_multipart())
        self._heard = time.monotonic()
        match body:
            case peer.PeerWelcome():
                self._boot_id = epoch
                return body
            case peer.PeerRefused():
                raise _refused(self.address, body)
            case _:
                raise PeerProblem(
                    f"{self.address} answered a hello with {type(body).__name__}",
                    Code.BAD_MESSAGE,
                )

    async def _open_link(self, welcome: peer.PeerWelcome) -> bool:
        """Whether the peer proved that it runs on this host."""
        identity = self._options.identity
        if not welcome.link or not identity.host or welcome.host != identity.host:
            return False
        link = LinkClient(self._link_eof)
        self.link = link
        try:
            await self._unless_broken(
                link.open(
                    welcome.link,
                    daemon_id=identity.daemon_id,
                    boot_id=identity.boot_id,
                    nonce=welcome.nonce,
                    timeout_s=self._options.connect_timeout_s,
                )
            )
        except PeerProblem:
            raise
        except KvdError as e:
            self.link = None
            if not self._told_no_link:
                self._told_no_link = True
                log.warning("no_link", peer=str(self.address), detail=e.detail)
            return False
        return True

    def _link_eof(self, detail: str) -> None:
        self._break(PeerProblem(f"{self.address}: its link closed: {detail}", Code.PEER_LOST))

    async def _stay(self) -> None:
        """Receives, and sends heartbeats, until cancelled."""
        beats = asyncio.ensure_future(self._guard(self._heartbeats()))
        try:
            while self._dealer is not None:
                for _ in range(RECV_BUDGET):
                    self._take(*self._decode(await self._dealer.recv_multipart()))
                await asyncio.sleep(0)
        finally:
            beats.cancel()

    def _take(self, epoch: int, body: peer.ToConsumer) -> None:
        if epoch != self._boot_id:
            raise PeerProblem(f"{self.address} restarted", Code.PEER_LOST)
        self._heard = time.monotonic()
        match body:
            case peer.HeartbeatAck():
                if body.seq == self._beat[0]:
                    self.rtt_s = self._heard - self._beat[1]
            case peer.PeerRefused():
                raise _refused(self.address, body)
            case peer.PeerWelcome():
                raise PeerProblem(f"{self.address} sent a second welcome", Code.BAD_MESSAGE)
            case _:
                self._feed(events.PeerMessage(self.address, body))

    def _decode(self, frames: Sequence[bytes]) -> tuple[int, peer.ToConsumer]:
        try:
            if len(frames) != 1:
                raise ProtocolError(f"a message of {len(frames)} parts")
            return wire.decode_to_consumer(frames[0])
        except ProtocolError as e:
            self._drops.drop("peer_client", str(e.code), peer=str(self.address), detail=e.detail)
            raise PeerProblem(f"{self.address}: {e.detail}", e.code) from None

    async def _heartbeats(self) -> None:
        options = self._options
        last = time.monotonic()
        for seq in itertools.count(1):
            self._beat = (seq, time.monotonic())
            self._send(peer.Heartbeat(seq))
            await asyncio.sleep(options.heartbeat_s)
            now = time.monotonic()
            late, last = now - last > 2 * options.heartbeat_s + 0.1, now
            silent = now - self._heard
            # If we were the ones who slept, its answers are still to be read.
            if not late and silent > options.peer_timeout_s:
                self._break(
                    PeerProblem(f"{self.address} is silent for {silent:.1f} s", Code.PEER_LOST)
                )
                return

    def _send(self, message: peer.ToProducer) -> None:
        dealer = self._dealer
        if dealer is None:
            return
        try:
            data = wire.encode_to_producer(self._options.identity.boot_id, message)
        except ProtocolError as e:
            log.error("message_too_long", message=type(message).__name__, detail=e.detail)
            self._break(PeerProblem(e.detail, e.code))
            return
        error = send_nowait(dealer, [data])
        if isinstance(error, zmq.Again) and not self.up:
            # The attempt has failed already, so that there is nothing to send by; the monitor
            # is about to say why.
            return
        if isinstance(error, zmq.Again):
            self._drops.drop("peer_client", "queue_full", peer=str(self.address))
            self._break(PeerProblem(f"{self.address} takes no messages", Code.OVERLOADED))
        elif error is not None:
            self._break(PeerProblem(f"{self.address}: {error}", Code.PEER_LOST))

    def _break(self, problem: PeerProblem) -> None:
        if self._problem is not None and not self._problem.done():
            self._problem.set_exception(problem)
            self._problem.exception()  # nobody may be waiting

    def _down(self, error: KvdError) -> None:
        """Every failed attempt is told, so that who waits for this peer need not wait longer."""
        first, self._was_down = self.up or not self._was_down, True
        self.problem = error.detail
        self._close(0)
        if self._retired:
            return
        tell = log.warning if first else log.debug
        tell("peer_down", peer=str(self.address), code=str(error.code), detail=error.detail)
        self._feed(events.PeerDown(self.address, error.code, error.detail))

    def _close(self, linger_ms: int) -> None:
        self.up = False
        self._boot_id = -1
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        if self.link is not None:
            self.link.close()
            self.link = None
        if self._dealer is not None:
            self._dealer.disable_monitor()
            if self._monitor is not None:
                self._monitor.close(0)
                self._monitor = None
            self._dealer.close(linger_ms)
            self._dealer = None


def _refused(address: PeerAddr, message: peer.PeerRefused) -> PeerProblem:
    return PeerProblem(f"{address} refused: {message.detail}", code_of(message.code))
