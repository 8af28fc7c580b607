"""/metrics, /healthz, /readyz and /v1 over HTTP, on a TCP address and on a Unix socket.

Whoever reaches the port may be slow, silent or greedy: each connection serves one request, lives
at most CONNECTION_S seconds whatever it does, and only MAX_CONNECTIONS of them are open at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import socket
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

import structlog
from aiohttp import web

from kvd.addresses import HostPort
from kvd.local.listener import BindError
from kvd.metrics import Metrics
from kvd.peers.bootstrap import OWN, PATH
from kvd.protocol.codes import Code

log = structlog.get_logger("kvd.http")

CONNECTION_S = 15.0
MAX_CONNECTIONS = 64
MAX_BODY = 64 * 1024
MAX_LINE = 4096
CLOSE_TIMEOUT_S = 2.0
OWN_PACKAGE = __name__.split(".")[0]

Reasons = Callable[[], Mapping[str, str]]
"""What speaks against it, by name; nothing when all is well."""
Bootstrap = Callable[[bool], Awaitable[Mapping[str, object]]]
"""Where producers are; with True, those of this daemon alone."""


def _is_ours(record: logging.LogRecord) -> bool:
    """Strangers must not be able to fill the log: what breaks before any code of ours has a part in
    it (no HTTP, headers that aiohttp cannot answer, a client that hangs up) is only counted."""
    trace = record.exc_info[2] if record.exc_info else None
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(trace)]
    return not modules or any(name.split(".")[0] == OWN_PACKAGE for name in modules)


_server_log = logging.getLogger("kvd.http.server")
_server_log.addFilter(_is_ours)


def bind_tcp(setting: str, at: HostPort, backlog: int = 128) -> socket.socket:
    """A listening, non-blocking TCP socket. Raises BindError that names setting and address."""
    family = socket.AF_INET6 if ":" in at.host else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as e:
        raise BindError(f"{setting}: cannot make a socket for {at}: {e.strerror}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if at.is_wildcard else 1)
        sock.bind(socket.getaddrinfo(at.host, at.port, family, socket.SOCK_STREAM)[0][4])
        sock.listen(backlog)
        sock.setblocking(False)
    except OSError as e:
        sock.close()
        raise BindError(f"{setting}: cannot listen on {at}: {_why(e, at)}") from None
    return sock


def _why(error: OSError, at: HostPort) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {at.port} is in use; choose another, or 0 for a free one"
        case errno.EADDRNOTAVAIL:
            return f"{at.host} is not an address of this host"
        case errno.EACCES:
            return f"port {at.port} needs privilege; choose one above 1023"
        case code if code is not None and not isinstance(error, socket.gaierror):
            return os.strerror(code)
        case _:
            return str(error)


class HttpServer:
    """The endpoints of one daemon. `ready` and `healthy` are asked at each request."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        ready: Reasons,
        healthy: Reasons = dict,
        bootstrap: Bootstrap | None = None,
        routes: Callable[[web.Application], None] = lambda app: None,
        connection_s: float = CONNECTION_S,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._metrics = metrics
        self._ready = ready
        self._healthy = healthy
        self._bootstrap = bootstrap
        self._routes = routes
        self._connection_s = connection_s
        self._max_connections = max_connections
        self._open: dict[_Bounded, None] = {}
        self._servers: list[asyncio.Server] = []
        self._runner: web.AppRunner | None = None
        self.address: HostPort | None = None
        """Where it listens; the port is the real one."""

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._open)

    async def start(self, at: HostPort, setting: str = "metrics") -> HostPort:
        """Listens; returns the bound address. Raises BindError that names the setting."""
        sock = bind_tcp(setting, at)
        await self._listen(sock)
        self.address = HostPort(at.host, sock.getsockname()[1])
        return self.address

    async def start_unix(self, sock: socket.socket) -> None:
        """Serves the same on a bound and listening Unix stream socket; takes it over."""
        await self._listen(sock)

    async def _listen(self, sock: socket.socket) -> None:
        try:
            if self._runner is None:
                await self._set_up()
            loop = asyncio.get_running_loop()
            if sock.family == socket.AF_UNIX:
                server = await loop.create_unix_server(self._accept, sock=sock)
            else:
                server = await loop.create_server(self._accept, sock=sock)
        except BaseException:
            sock.close()
            await self.aclose()
            raise
        self._servers.append(server)

    async def _set_up(self) -> None:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/healthz", self._get_healthz)
        app.router.add_get("/readyz", self._get_readyz)
        app.router.add_get(PATH, self._get_bootstrap)
        self._routes(app)
        app.on_response_prepare.append(self._prepare)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_server_log,
            handle_signals=False,
            max_line_size=MAX_LINE,
            max_field_size=MAX_LINE,
            lingering_time=1.0,
            shutdown_timeout=1.0,
        )
        await self._runner.setup()

    def _accept(self) -> asyncio.Protocol:
        assert self._runner is not None
        assert self._runner.server is not None
        if len(self._open) >= self._max_connections:
            # The oldest goes, not the newest: a probe is answered although strangers hold all.
            self._metrics.dropped("http", "max_connections")
            next(iter(self._open)).abort()
        return _Bounded(self._runner.server(), self._open, self._metrics, self._connection_s)

    async def aclose(self) -> None:
        """Stops listening and ends every connection, within CLOSE_TIMEOUT_S."""
        while self._servers:
            self._servers.pop().close()
        for connection in tuple(self._open):
            connection.abort()
        if self._runner is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self._runner.cleanup()
            self._runner = None
        self.address = None

    async def _prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Before the first byte of each answer to a request that could be read."""
        for connection in self._open:
            if connection.transport is request.transport:
                connection.understood = True
        if response.status >= 400 and response.status != 503:
            self._metrics.dropped("http", "refused")
        _one_request(response)

    # --- endpoints --------------------------------------------------------------------------

    async def _get_metrics(self, request: web.Request) -> web.Response:
        body, content_type = self._metrics.render(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _get_healthz(self, _request: web.Request) -> web.Response:
        # That this runs at all says that the loop ticks.
        return _verdict("healthy", self._healthy)

    async def _get_readyz(self, _request: web.Request) -> web.Response:
        return _verdict("ready", self._ready)

    async def _get_bootstrap(self, request: web.Request) -> web.Response:
        """Where this daemon's producers are, for routers that know no more than this address."""
        if self._bootstrap is None:
            return web.json_response({})
        return web.json_response(await self._bootstrap(OWN in request.query))


def _verdict(name: str, ask: Reasons) -> web.Response:
    try:
        reasons = dict(ask())
    except Exception as e:
        log.error("probe_failed", probe=name, exc_info=e)
        reasons = {str(Code.INTERNAL): repr(e)}
    return web.json_response(
        {name: not reasons, "reasons": reasons},
        status=503 if reasons else 200,
        dumps=lambda value: json.dumps(value, default=str),
    )


def _one_request(response: web.StreamResponse) -> None:
    response.force_close()
    response.headers["Connection"] = "close"
    response.headers["Cache-Control"] = "no-store"
    response.headers["X-Content-Type-Options"] = "nosniff"


class _Bounded(asyncio.Protocol):
    """Hands everything to aiohttp's protocol, and cuts the connection when its time is over.

    aiohttp bounds neither the time that a client takes for its request's head nor the time that
    it takes to read the answer.
    """

    def __init__(
        self,
        inner: asyncio.Protocol,
        peers: dict[_Bounded, None],
        metrics: Metrics,
        seconds: float,
    ) -> None:
        self._inner = inner
        self._peers = peers
        self._metrics = metrics
        self._seconds = seconds
        self.understood = False
        """A request came that could be read, or there is nobody to blame that none did."""
        self._heard = False
        self.transport: asyncio.WriteTransport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.WriteTransport, transport)
        self._peers[self] = None
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._expire)
        self._inner.connection_made(transport)

    def _expire(self) -> None:
        self._metrics.dropped("http", "timeout")
        self.abort()

    def abort(self) -> None:
        """Closes without waiting for what is still to be written."""
        self.understood = True
        self._peers.pop(self, None)
        if self.transport is not None:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._heard = True
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._peers.pop(self, None)
        if self._heard and not self.understood:
            self._metrics.dropped("http", "bad_request")
        self._inner.connection_lost(exc)
