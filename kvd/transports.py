"""The transports of this daemon: what all attachments share, and the producer's data server."""

from __future__ import annotations

from kvd.addresses import parse_network
from kvd.core.instructions import ExtendTicket, OpenTicket
from kvd.drops import Drops
from kvd.local.listener import BindError
from kvd.memory.engine import EngineMemory
from kvd.metrics import Metrics
from kvd.peers.resolve import in_networks
from kvd.protocol.codes import Code
from kvd.settings import Settings
from kvd.transport.base import Puller, TicketView, TransportError
from kvd.transport.copy_pool import CopyPool
from kvd.transport.options import TransportOptions
from kvd.transport.shm import ShmPuller
from kvd.transport.tcp_server import TcpServer

POOL_CLOSE_S = 2.0


class Transports:
    """`start` before use; `aclose`, then `close`, at the end."""

    def __init__(self, settings: Settings, metrics: Metrics, drops: Drops) -> None:
        self._settings = settings
        self._metrics = metrics
        self._drops = drops
        self._allow = tuple(parse_network(text) for text in settings.allow_peers)
        self._options = TransportOptions(
            transport=settings.transport,
            shm_threads=settings.shm_threads,
            tcp_streams=settings.tcp_streams,
            tcp_congestion=settings.tcp_congestion,
            data_timeout_s=settings.data_timeout_s,
            connect_timeout_s=settings.connect_timeout_s,
            max_data_connections=settings.max_data_connections,
        )
        self._pool = CopyPool(settings.shm_threads)
        self._server: TcpServer | None = None
        self._tickets: dict[bytes, TicketView] = {}

    @property
    def data_port(self) -> int | None:
        """Where the data server listens; None without one."""
        return None if self._server is None else self._server.port

    async def start(self) -> None:
        """Listens for data connections where a transport wants it. Raises BindError."""
        if "tcp" not in self._settings.transports:
            return
        at = self._settings.data_listen_at
        try:
            self._server = TcpServer(at.host, at.port, self._options, self._admit)
        except TransportError as e:
            raise BindError(f"data_listen: {e.detail}") from None

    async def aclose(self) -> None:
        """Ends what runs; returns when nothing is read or written any more."""
        if self._server is not None:
            await self._server.aclose()
        self._pool.close(POOL_CLOSE_S)

    def _admit(self, address: str) -> bool:
        return in_networks(address, self._allow)

    # --- consumer -----------------------------------------------------------------------------

    def shm(self, local: EngineMemory, remote: EngineMemory) -> Puller:
        return ShmPuller(local, remote, self._pool)

    def tcp(self, local: EngineMemory, host: str, port: int, remote_blocks: int) -> Puller:
        raise TransportError(Code.TRANSPORT_UNAVAILABLE, "tcp is not built in yet")

    # --- producer -----------------------------------------------------------------------------

    def open_ticket(self, ask: OpenTicket, memory: EngineMemory, block_size: int) -> None:
        """Lets whoever shows the ticket read these blocks."""
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
        longer = tuple(old + more for old, more in zip(view.blocks, ask.blocks, strict=True))
        # One assignment each: the server's threads see the old list or the new one.
        view.blocks = longer
        view.valid = ask.valid

    def close_ticket(self, ticket: bytes) -> None:
        if self._tickets.pop(ticket, None) is not None and self._server is not None:
            self._server.close_ticket(ticket)
