"""The producer's end of `tcp`: a listener, and one thread per accepted connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable

from kvd.protocol.codes import Code
from kvd.transport.base import TicketView, TransportError
from kvd.transport.options import TransportOptions
from kvd.transport.pulse import Pulse
from kvd.transport.tcp_serving import Connection
from kvd.transport.tcp_socket import TICK_S, check_congestion, prepare, shut

BACKLOG = 64
DROP_REASONS = (
    "not_allowed",
    "too_many",
    "too_many_of_peer",
    "first_frame",
    "bad_frame",
    "idle",
    "stalled",
    "broken",
    "tls",
    "accept",
    str(Code.UNKNOWN_TRANSFER),
    str(Code.ENGINE_GONE),
    str(Code.BAD_MESSAGE),
    str(Code.RANGE_NOT_HELD),
    str(Code.FENCED),
    str(Code.INTERNAL),
)
"""Why connections are closed, and (the codes) why single requests are refused."""


def admit_anybody(host: str) -> bool:
    return True


def tell_nobody(ticket: bytes) -> None:
    pass


class TcpServer:
    """Serves blocks to whoever shows a ticket. See `kvd.transport.base.DataServer`."""

    def __init__(
        self,
        host: str,
        port: int,
        options: TransportOptions,
        admit: Callable[[str], bool] = admit_anybody,
        pulse: Pulse | None = None,
        on_read: Callable[[bytes], None] = tell_nobody,
    ) -> None:
        """Binds and listens; `port` 0 takes a free one. `admit(address)` is asked for each
        connection; `on_read(ticket)` hears of each request that was served, before the peer
        does, on the connection's thread. Raises TransportError naming the address."""
        check_congestion(options.tcp_congestion)
        self.options = options
        self.pulse = pulse or Pulse()
        self._admit = admit
        self._on_read = on_read
        self._tickets: dict[bytes, TicketView] = {}
        self._lock = threading.Lock()
        self._connections: dict[Connection, threading.Thread] = {}
        self._dropped: Counter[str] = Counter()
        self._served_bytes = 0
        self._closing = threading.Event()
        self._listener = _listen(host, port)
        self.host: str = self._listener.getsockname()[0]
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="kvd-data-accept", daemon=True)
        self._acceptor.start()

    def open_ticket(self, ticket: bytes, view: TicketView) -> None:
        """Admits `ticket` to what `view` names; again, to replace the view."""
        self._tickets[ticket] = view

    def close_ticket(self, ticket: bytes) -> None:
        """Refuses `ticket` from now on. A request that is being served ends in ABORT."""
        self._tickets.pop(ticket, None)

    async def aclose(self) -> None:
        """Closes the listener and every connection; returns when no thread is left."""
        self._closing.set()
        self._tickets.clear()
        shut(self._listener)
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.shut()
        await asyncio.to_thread(self._join)

    def statistics(self) -> dict[str, int | dict[str, int]]:
        """connections, tickets, served_bytes (committed), dropped by reason (all, also at 0)."""
        with self._lock:
            return {
                "connections": len(self._connections),
                "tickets": len(self._tickets),
                "served_bytes": self._served_bytes,
                "dropped": {reason: self._dropped[reason] for reason in DROP_REASONS},
            }

    # --- for the connections' threads -------------------------------------------------------

    @property
    def closing(self) -> bool:
        return self._closing.is_set()

    def ticket(self, ticket: bytes) -> TicketView | None:
        return self._tickets.get(ticket)

    def count_served(self, ticket: bytes, nbytes: int) -> None:
        with self._lock:
            self._served_bytes += nbytes
        self._on_read(ticket)

    def count_dropped(self, reason: str) -> None:
        with self._lock:
            self._dropped[reason] += 1

    # --- inside -----------------------------------------------------------------------------

    def _accept(self) -> None:
        with self._listener:
            while not self.closing:
                try:
                    sock, address = self._listener.accept()
                except OSError:
                    if not self.closing:
                        # Out of descriptors, most likely: they may come back.
                        self.count_dropped("accept")
                        self._closing.wait(TICK_S)
                    continue
                self._take(sock, str(address[0]))

    def _take(self, sock: socket.socket, peer: str) -> None:
        try:
            reason = self._start(sock, peer)
        except (OSError, RuntimeError):  # options refused, or no thread to be had
            reason = "accept"
        if reason:
            self.count_dropped(reason)
            sock.close()

    def _start(self, sock: socket.socket, peer: str) -> str:
        if not self._admit(peer):
            return "not_allowed"
        prepare(sock, peer, self.options.tcp_congestion)
        connection = Connection(self, sock, peer)
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="kvd-data-serve", daemon=True
        )
        with self._lock:
            if len(self._connections) >= self.options.max_data_connections:
                return "too_many"
            of_peer = sum(one.peer == peer for one in self._connections)
            if of_peer >= self.options.max_data_connections_per_peer:
                return "too_many_of_peer"
            if self.closing:
                return "broken"
            self._connections[connection] = thread
            try:
                thread.start()
            except RuntimeError:
                del self._connections[connection]
                raise
        return ""

    def _serve(self, connection: Connection) -> None:
        try:
            reason = connection.run()
        finally:
            self.pulse.idle()
            connection.close()
            with self._lock:
                del self._connections[connection]
        if reason:
            self.count_dropped(reason)

    def _join(self) -> None:
        self._acceptor.join()
        while True:
            with self._lock:
                threads = list(self._connections.values())
            if not threads:
                return
            for thread in threads:
                thread.join()


def _listen(host: str, port: int) -> socket.socket:
    what = f"data listener on {host} port {port}"
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as exc:
        raise TransportError(Code.TRANSPORT_UNAVAILABLE, f"{what}: {exc}") from None
    family, kind, proto, _, address = found[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # "::" is to mean IPv4 too, whatever the system's default is.
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as exc:
        sock.close()
        raise TransportError(Code.TRANSPORT_UNAVAILABLE, f"{what}: {exc.strerror}") from None
    return sock
