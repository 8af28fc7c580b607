"""The data plane of this daemon: its transports, and the tickets that let peers read."""

from __future__ import annotations

from collections import Counter

from kvd.addresses import parse_network
from kvd.core.instructions import ExtendTicket, OpenTicket
from kvd.errors import ConfigError
from kvd.local.listener import BindError
from kvd.memory.engine import EngineMemory
from kvd.metrics import Metrics
from kvd.peers.resolve import in_networks
from kvd.settings import Settings
from kvd.transport.base import TicketView, TransportError
from kvd.transport.channel import load_tls
from kvd.transport.options import TransportOptions
from kvd.transport.registry import Transports
from kvd.transport.tcp_server import TcpServer


class DataPlane:
    """`start` before use; `aclose` at the end, once no puller is open any more."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        """Raises ConfigError for a transport that cannot be had here."""
        self._metrics = metrics
        self._at = settings.data_listen_at
        self._allow = tuple(parse_network(text) for text in settings.allow_peers)
        files = (settings.tls_cert, settings.tls_key, settings.tls_ca)
        tls = load_tls(*files) if all(files) else None
        try:
            self.transports = Transports(
                TransportOptions(
                    transport=settings.transport,
                    shm_threads=settings.shm_threads,
                    tcp_streams=settings.tcp_streams,
                    tcp_congestion=settings.tcp_congestion,
                    data_timeout_s=settings.data_timeout_s,
                    connect_timeout_s=settings.connect_timeout_s,
                    tls=tls,
                    max_data_connections=settings.max_data_connections,
                    verify=settings.verify,
                    max_data_connections_per_peer=settings.max_data_connections_per_peer,
                )
            )
        except TransportError as e:
            raise ConfigError(e.detail) from None
        self._server: TcpServer | None = None
        self._tickets: dict[bytes, TicketView] = {}
        self._dropped: Counter[str] = Counter()

    def start(self) -> None:
        """Listens for data connections where a transport wants it. Raises BindError."""
        try:
            self._server = self.transports.start_server(self._at.host, self._at.port, self._admit)
        except TransportError as e:
            raise BindError(
                f"data_listen: {e.detail} (give another with --data-listen; port 0 is any free one)"
            ) from None

    async def aclose(self) -> None:
        """Ends what runs; returns when nothing is read or written any more."""
        if self._server is not None:
            await self._server.aclose()
        await self.transports.aclose()

    @property
    def port(self) -> int | None:
        """Where the data server listens; None without one."""
        return None if self._server is None else self._server.port

    def stuck(self, limit_s: float) -> list[str]:
        """Names of threads that do not get on with their work; see `Transports.stuck`."""
        return self.transports.stuck(limit_s)

    def _admit(self, address: str) -> bool:
        return in_networks(address, self._allow)

    # --- tickets ------------------------------------------------------------------------------

    def open_ticket(self, ask: OpenTicket, memory: EngineMemory, block_size: int) -> None:
        """Lets whoever shows the ticket read these blocks, `block_size` tokens each."""
        if self._server is None:
            return
        view = TicketView(
            memory=memory,
            fence_slot=ask.fence_slot,
            fence_word=ask.fence_word,
            first_index=ask.first_index,
            blocks=ask.blocks,
            valid=ask.valid,
            block_size=block_size,
        )
        self._tickets[ask.ticket] = view
        self._server.open_ticket(ask.ticket, view)

    def extend_ticket(self, ask: ExtendTicket) -> None:
        """More blocks, or more of them valid."""
        view = self._tickets.get(ask.ticket)
        if view is None:
            return
        # One assignment each, blocks first: the server's threads never see a block that is
        # valid and missing.
        view.blocks = tuple(old + more for old, more in zip(view.blocks, ask.blocks, strict=True))
        view.valid = ask.valid

    def close_ticket(self, ticket: bytes) -> None:
        """Nobody may read with it any more."""
        if self._tickets.pop(ticket, None) is not None and self._server is not None:
            self._server.close_ticket(ticket)

    # --- metrics ------------------------------------------------------------------------------

    def count(self) -> None:
        """Brings what the server's threads have dropped into the metrics."""
        if self._server is None:
            return
        dropped = self._server.statistics()["dropped"]
        if isinstance(dropped, dict):
            for reason, count in dropped.items():
                if count > self._dropped[reason]:
                    self._metrics.dropped("data", reason, count - self._dropped[reason])
                    self._dropped[reason] = count
