"""The daemon: owns the core, the sockets and the threads; `kvd.dispatch` joins them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import structlog
import zmq
import zmq.asyncio

from kvd import __version__, state
from kvd.addresses import CONTROL_SUFFIX, LINK_SUFFIX, parse_network
from kvd.attachments import Attachments
from kvd.control import Busy, Control, read_token, wait_event
from kvd.core import events
from kvd.core.machine import Core
from kvd.data_plane import DataPlane
from kvd.dispatch import Dispatcher
from kvd.drops import Drops
from kvd.errors import KvdError
from kvd.history import History
from kvd.http import HttpServer
from kvd.local.listener import BindError, Listener, bind, from_systemd
from kvd.local.server import LocalServer
from kvd.metrics import Metrics
from kvd.peers import bootstrap
from kvd.peers.client import PeerOptions
from kvd.peers.curve import Curve, ZapHandler, reload_when_changed
from kvd.peers.identity import identify
from kvd.peers.link_server import LinkServer
from kvd.peers.server import PeerServer
from kvd.peers.table import PeerTable
from kvd.protocol import local
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr
from kvd.protocol.version import PROTO_MAJOR, PROTO_MINOR
from kvd.reactor import Reactor
from kvd.settings import Settings
from kvd.spans import open_spans
from kvd.tasks import TaskSet

log = structlog.get_logger("kvd.daemon")

MEMORY_THREADS = 4
"""Registrations and attachments that are mapped at once."""
WATCH_S = 0.5
"""How often the loop's lag is measured and the gauges are set."""
HANG_S = 30.0
"""A thread that is at the same few megabytes for so long hangs; /healthz says so."""
STOP_TIMEOUT_S = 5.0
"""How long a stopping daemon waits for the last copies and sessions to end."""
BOOTSTRAP_PEERS_S = 2.0
"""For the daemons of other ranks to say where they are; whoever asked this one waits for it."""

LINKS_PER_CLIENT = 2
SOCKETS_PER_PEER = 4
"""A DEALER, both ends of its monitor, and one that is still closing."""


class Daemon:
    """Make it on the loop. `start`, then `run_until_stopped`, and `stop` in the end, always."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self.draining = False
        self.stopping = False
        """Whether it ends by itself once nothing is in flight."""
        self.addresses: dict[str, Any] = {}
        """Where it is reached, once started: for the discovery file and the log."""
        self.serving = False
        self.failure: BaseException | None = None
        """Why it stopped by itself, if it did."""
        self._stopped = asyncio.Event()
        self._idle = asyncio.Event()
        self._closers: list[Callable[[], object]] = []
        self._background: list[asyncio.Task[None]] = []
        self._links: LinkServer | None = None

        self._allow = tuple(parse_network(text) for text in settings.allow_peers)
        self._drops = Drops(metrics)
        self._tasks = TaskSet()
        self._executor = ThreadPoolExecutor(MEMORY_THREADS, thread_name_prefix="kvd-memory")
        self._context = zmq.asyncio.Context()
        self._context.set(zmq.MAX_SOCKETS, SOCKETS_PER_PEER * settings.max_peers + 64)
        self._curve = Curve(settings.keys) if settings.keys else None
        self._zap: ZapHandler | None = None
        self._history = History()
        self._spans = open_spans(settings.otlp_endpoint)
        self._started = time.monotonic()
        control = Control(
            self,
            token=read_token(settings.control_token_file),
            address=lambda: self._http.address,
        )
        self._http = HttpServer(
            metrics,
            ready=self._not_ready,
            healthy=self._unhealthy,
            bootstrap=self._bootstrap,
            routes=control.add_to,
        )
        self._bootstrap_http = HttpServer(metrics, ready=self._not_ready, bootstrap=self._bootstrap)
        self._data = DataPlane(settings, metrics, feed=self._feed)
        self._server = PeerServer(
            self._context,
            feed=self._feed,
            on_left=self._client_left,
            allow=self._allow,
            drops=self._drops,
            heartbeat_s=settings.heartbeat_s,
            peer_timeout_s=settings.peer_timeout_s,
            max_clients=settings.max_clients,
            max_clients_per_peer=settings.max_clients_per_peer,
            curve=self._curve,
        )

    # --- life -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Binds everything, then serves. Raises BindError; `stop` leaves nothing behind."""
        settings = self.settings
        listener = from_systemd() or bind(settings.socket, gid=settings.socket_gid)
        self._closers.append(listener.close)
        link_listener = self._bind_link(listener.path + LINK_SUFFIX)
        if self._curve is not None:
            # Before anybody can connect: without it ZMQ turns everybody away.
            self._zap = ZapHandler(self._context, self._curve, self._drops)
        bound = self._server.bind(*settings.listen_at)
        told = settings.advertise_at
        self.advertise = bound if told is None else PeerAddr(told.host, told.port or bound.port)
        self.identity = identify(bound, __version__)
        self._data.start()
        if settings.metrics_at is not None:
            await self._http.start(settings.metrics_at)
        if settings.bootstrap_at is not None:
            await self._bootstrap_http.start(settings.bootstrap_at, "bootstrap")

        self._core = Core(
            replace(settings.core(), transports=tuple(self._data.transports.names)),
            self.identity.boot_id,
            self.identity.daemon_id,
            self.advertise,
            __version__,
        )
        self._peers = PeerTable(
            self._context,
            PeerOptions(
                identity=self.identity,
                allow=self._allow,
                heartbeat_s=settings.heartbeat_s,
                peer_timeout_s=settings.peer_timeout_s,
                connect_timeout_s=settings.connect_timeout_s,
                curve=self._curve,
            ),
            feed=self._feed,
            tasks=self._tasks,
            drops=self._drops,
        )
        self._local = LocalServer(
            listener,
            feed=self._feed,
            welcome=self._welcome,
            executor=self._executor,
            tasks=self._tasks,
            drops=self._drops,
            max_sessions=settings.max_sessions,
            max_queue=settings.max_frame_queue,
            gid=settings.socket_gid,
            open_memory=self._data.open_memory,
        )
        if link_listener is not None:
            self._links = LinkServer(
                link_listener,
                clients=self._server,
                share=self._share,
                drops=self._drops,
                max_links=LINKS_PER_CLIENT * settings.max_clients,
            )
            self._links.start()
        self._data.connect(send_peer=self._peers.send, send_client=self._server.send)
        self._attachments = Attachments(
            feed=self._feed,
            tasks=self._tasks,
            executor=self._executor,
            memory_of=self._local.memory,
            peer_of=self._peers.get,
            pullers=self._data.transports,
            gpu=self._data.gpu,
            open_memory=self._data.open_memory,
        )
        dispatcher = Dispatcher(
            feed=self._feed,
            local=self._local,
            server=self._server,
            peers=self._peers,
            attachments=self._attachments,
            data=self._data,
            metrics=self.metrics,
            history=self._history,
            spans=self._spans,
        )
        self._reactor = Reactor(
            self._core,
            carry_out=dispatcher.carry_out,
            on_bug=dispatcher.give_up,
            after=self._after,
        )
        link = "" if self._links is None else self._links.path
        self._run(self._server.serve(self.identity, link), "peer-server")
        self._run(self._watch(), "watch")
        if self._curve is not None and self._zap is not None:
            self._run(self._zap.serve(), "zap")
            changed = self._server.recheck_keys
            self._run(reload_when_changed(self._curve, self._executor, changed), "keys")
        await self._serve_control(listener.path + CONTROL_SUFFIX)
        self._local.start()
        self.serving = True
        self.addresses = {
            "socket": listener.path,
            "listen": str(bound),
            "advertise": str(self.advertise),
            "metrics": "" if self._http.address is None else str(self._http.address),
            "bootstrap": (
                "" if self._bootstrap_http.address is None else str(self._bootstrap_http.address)
            ),
            "data_port": self._data.port,
        }
        log.info("started", daemon_id=self.identity.daemon_id, **self.addresses)

    async def run_until_stopped(self) -> None:
        """Returns once a drain has ended, or a part that must not end has ended."""
        await self._stopped.wait()

    def drain(self, *, stop: bool = True) -> None:
        """Takes nothing new. With `stop` it ends when nothing is in flight, or after
        drain_timeout_s; without, it stays up, drained, until it is told to end.
        """
        if not self.serving:
            return
        if not self.draining:
            self.draining = True
            log.info("draining", timeout_s=self.settings.drain_timeout_s, **self.in_flight())
            self._feed(events.DrainStarted())
            self._after()
        if stop and not self.stopping:
            self.stopping = True
            self._run(self._wait_idle(), "drain")

    def stop_now(self) -> None:
        """Makes `run_until_stopped` return at once."""
        self._stopped.set()

    async def stop(self) -> None:
        """Ends everything, in bounded time. Shims hear EOF only when no copy runs any more."""
        if self.serving:
            self.serving = False
            self._local.stop_accepting()
            self._local.end_all(Code.DRAINING, "the daemon stops")
            if not await self._local.wait_empty(STOP_TIMEOUT_S):
                log.error("sessions_still_open", sessions=len(self._local))
            self._attachments.close_all()
            self._reactor.close()
            self._peers.close()
            if self._links is not None:
                self._links.close()
        for task in self._background:
            task.cancel()
        await self._http.aclose()
        await self._bootstrap_http.aclose()
        await self._data.aclose()
        if not await self._tasks.wait(STOP_TIMEOUT_S):
            await self._tasks.cancel()
        self._server.close()
        if self._zap is not None:
            self._zap.close()
        if self._spans is not None:
            # It waits for the network, and only for a moment.
            await asyncio.to_thread(self._spans.close)
        self._executor.shutdown(wait=False, cancel_futures=True)
        for close in reversed(self._closers):
            close()
        self._context.destroy()
        self._stopped.set()
        log.info("stopped")

    # --- state ------------------------------------------------------------------------------

    def status(self) -> dict[str, object]:
        """Everything about it, as plain values (`kvd.state`)."""
        return state.collect(
            core=self._core,
            peers=self._peers,
            clients=self._server,
            history=self._history,
            settings=self.settings,
            curve=self._curve,
            daemon_id=self.identity.daemon_id,
            addresses=self.addresses,
            started=self._started,
            not_ready=self._not_ready(),
            mapped_bytes=self._mapped_bytes(),
        )

    def transfers(self, count: int) -> list[dict[str, object]]:
        """The last ones that ended, newest first."""
        return self._history.last(count)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether, while draining, nothing is in flight any more within `timeout_s`."""
        return await wait_event(self._idle, timeout_s)

    def release(self, transfer_id: str, engine_id: str | None, *, force: bool) -> list[str]:
        """Ends the offers of a transfer; returns the engines that had one.

        Raises Busy when a peer reads from one of them, unless by `force`: its fetch then fails
        as revoked.
        """
        ended = []
        found = [
            (session, offer)
            for session in self._core.sessions.by_id.values()
            for offer in session.offers.values()
            if offer.transfer_id == transfer_id and engine_id in (None, session.engine_id)
        ]
        for _, offer in found:
            if offer.grants and not force:
                raise Busy(f"{len(offer.grants)} fetches of {transfer_id} are open (force=true)")
        for session, offer in found:
            log.warning("released_by_operator", transfer_id=transfer_id, force=force)
            message = local.Revoke(transfer_id, offer.generation)
            self._feed(events.ShimMessage(session.id, message))
            ended.append(session.engine_id)
        return ended

    def in_flight(self) -> dict[str, int]:
        """What a drain waits for. Offers count: their consumers were told to come for them."""
        now = self._core.statistics()
        return {
            "offers": now.held,
            "fetches": sum(now.fetches.values()),
            "requests": now.requests,
            "jobs": now.jobs,
        }

    def stuck(self, limit_s: float) -> list[str]:
        """Names of the data threads that did not get on with their work for `limit_s`."""
        return self._data.stuck(limit_s)

    def _unhealthy(self) -> dict[str, str]:
        return dict.fromkeys(self.stuck(HANG_S), f"no progress for {HANG_S:g} s")

    def _not_ready(self) -> dict[str, str]:
        reasons = {}
        if not self.serving:
            reasons["not_serving"] = "sockets are not bound, or closed again"
        if self.draining:
            reasons[str(Code.DRAINING)] = "nothing new is taken"
        if self._data.gpu_lost:
            reasons["gpu"] = self._data.gpu_lost
        return reasons

    async def _bootstrap(self, own: bool) -> dict[str, Any]:
        if not self.serving or self.draining:
            return {}
        found = bootstrap.answer(self._core.producers(), self.advertise)
        others, settings = () if own else self.settings.bootstrap_peers_at, self.settings
        if not others:
            return found
        told = await bootstrap.ask_others(others, settings.peer_networks, BOOTSTRAP_PEERS_S)
        return bootstrap.merge(found, told)

    def _gauges(self) -> None:
        metrics, now = self.metrics, self._core.statistics()
        metrics.set_offers(now.offers)
        metrics.set_fetches_in_flight(sum(now.fetches.values()))
        metrics.set_parked(now.parked)
        metrics.set_peers(self._peers.by_state())
        metrics.set_clients(len(self._server))
        metrics.set_sessions(len(self._local))
        metrics.set_mapped_bytes(self._mapped_bytes())
        metrics.late_bytes(self._attachments.take_late_bytes())
        self._data.count()

    # --- inside -----------------------------------------------------------------------------

    def _mapped_bytes(self) -> int:
        return self._local.mapped_nbytes() + self._attachments.mapped_nbytes()

    async def _serve_control(self, path: str) -> None:
        """HTTP on a Unix socket that only our user can open."""
        try:
            listener = bind(path, any_length=True, kind=socket.SOCK_STREAM)
        except BindError as e:
            log.warning("no_control_socket", detail=e.detail, effect="kvd status needs --at")
            return
        self._closers.append(listener.close)
        await self._http.start_unix(listener.sock)

    def _run(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """A task without which the daemon is none: should it fail, the daemon stops."""
        self._background.append(self._tasks.start(coroutine, name, on_error=self._failed))

    def _failed(self, error: BaseException) -> None:
        self.failure = error
        self._stopped.set()

    def _bind_link(self, path: str) -> Listener | None:
        """The same-host link. Where it cannot be bound, only tcp is left, if that is allowed."""
        try:
            listener = bind(path, any_length=True)
        except BindError as e:
            if "tcp" not in self.settings.transports:
                raise
            log.warning("no_link", detail=e.detail, effect="peers on this host use tcp too")
            return None
        self._closers.append(listener.close)
        return listener

    def _feed(self, event: events.Event) -> None:
        if not self._data.takes(event):
            self._reactor.feed(event)

    def _after(self) -> None:
        if self.draining and not any(self.in_flight().values()):
            self._idle.set()

    async def _wait_idle(self) -> None:
        try:
            async with asyncio.timeout(self.settings.drain_timeout_s):
                await self._idle.wait()
            log.info("drained")
        except TimeoutError:
            log.warning("drain_timeout", **self.in_flight())
        self._stopped.set()

    async def _watch(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(WATCH_S)
            self.metrics.set_loop_lag(max(0.0, time.monotonic() - before - WATCH_S))
            self._gauges()
            self._data.check()

    def _welcome(self) -> local.Welcome:
        return local.Welcome(
            proto_major=PROTO_MAJOR,
            proto_minor=PROTO_MINOR,
            daemon_id=self.identity.daemon_id,
            boot_id=self.identity.boot_id,
            advertise=self.advertise,
            version=__version__,
            draining=self.draining,
        )

    def _client_left(self, client: int) -> None:
        if self._links is not None:
            self._links.close_client(client)

    def _share(self, memory_key: int) -> list[int]:
        """Descriptors of a live session's memory; the core names sessions by memory_key."""
        memory = self._local.memory(memory_key)
        if memory is None:
            raise KvdError("the engine has left", Code.ENGINE_GONE)
        return memory.share()
