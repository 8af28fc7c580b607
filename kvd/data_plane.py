"""The data plane of this daemon: its transports, and the tickets that let peers read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import structlog

from kvd.addresses import parse_network
from kvd.core.events import ClientMessage, Event, PeerMessage
from kvd.core.instructions import ExtendTicket, OpenTicket
from kvd.errors import ConfigError
from kvd.local.listener import BindError
from kvd.memory.cuda.device import open_gpu
from kvd.memory.cuda.memory import memory_opener
from kvd.memory.engine import EngineMemory
from kvd.metrics import Metrics
from kvd.peers.resolve import in_networks
from kvd.protocol.peer import NcclToConsumer, NcclToProducer, ToConsumer, ToProducer
from kvd.protocol.types import PeerAddr
from kvd.reads import Reads
from kvd.settings import Settings
from kvd.transport.base import TicketView, TransportError
from kvd.transport.channel import load_tls
from kvd.transport.gpu import GpuTransports
from kvd.transport.nccl_lib import NcclError, load_nccl
from kvd.transport.options import TransportOptions
from kvd.transport.registry import Transports
from kvd.transport.tcp_server import TcpServer

log = structlog.get_logger("kvd.data")


class DataPlane:
    """`start` before use; `aclose` at the end, once no puller is open any more."""

    def __init__(
        self, settings: Settings, metrics: Metrics, *, feed: Callable[[Event], None]
    ) -> None:
        """Make it on the loop. Raises ConfigError for a transport that cannot be had here."""
        self._metrics = metrics
        self._reads = Reads(feed)
        self._at = settings.data_listen_at
        self._allow = tuple(parse_network(text) for text in settings.allow_peers)
        files = (settings.tls_cert, settings.tls_key, settings.tls_ca)
        tls = load_tls(*files) if all(files) else None
        if tls is not None and (problem := tls.problem()):
            log.warning("tls_certificate", file=settings.tls_cert, detail=problem)
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
                    device=settings.device,
                    gpu_hang_s=settings.gpu_hang_s,
                    nccl_max_comms=settings.nccl_max_comms,
                    nccl_chunk_bytes=settings.nccl_chunk_bytes,
                    nccl_ring=settings.nccl_ring,
                    nccl_direct_bytes=settings.nccl_direct_bytes,
                    nccl_max_ctas=settings.nccl_max_ctas,
                    nccl_channels=settings.nccl_channels,
                    nccl_interface=settings.nccl_interface,
                    nccl_init_timeout_s=settings.nccl_init_timeout_s,
                    nccl_abort_timeout_s=settings.nccl_abort_timeout_s,
                )
            )
        except TransportError as e:
            raise ConfigError(e.detail) from None
        self.gpu: GpuTransports | None = None
        """What there is besides on a GPU, if the daemon has one."""
        if settings.device != "cpu":
            self.gpu = GpuTransports(open_gpu(settings.device), self.transports.options)
        self.open_memory = memory_opener(None if self.gpu is None else self.gpu.gpu)
        self._server: TcpServer | None = None
        self._tickets: dict[bytes, TicketView] = {}
        self._dropped: Counter[str] = Counter()

    def start(self) -> None:
        """Listens for data connections where a transport wants it. Raises BindError."""
        try:
            self._server = self.transports.start_server(
                self._at.host, self._at.port, self._admit, self._reads.note
            )
        except TransportError as e:
            raise BindError(
                f"data_listen: {e.detail} (give another with --data-listen; port 0 is any free one)"
            ) from None

    async def aclose(self) -> None:
        """Ends what runs; returns when nothing is read or written any more."""
        if self._server is not None:
            await self._server.aclose()
        await self.transports.aclose()
        if self.gpu is not None:
            await self.gpu.aclose()

    def check(self) -> None:
        """Raises KvdError when the GPU is lost to this process."""
        if self.gpu is not None:
            self.gpu.check()

    @property
    def gpu_lost(self) -> str:
        """Why nothing moves on the GPU any more, "" while it does."""
        return "" if self.gpu is None else self.gpu.stuck()

    @property
    def port(self) -> int | None:
        """Where the data server listens; None without one."""
        return None if self._server is None else self._server.port

    def stuck(self, limit_s: float) -> list[str]:
        """Names of threads that do not get on with their work; see `Transports.stuck`."""
        gpu = [f"gpu: {self.gpu_lost}"] if self.gpu_lost else []
        return gpu + self.transports.stuck(limit_s)

    def _admit(self, address: str) -> bool:
        return in_networks(address, self._allow)

    # --- tickets ------------------------------------------------------------------------------

    def open_ticket(self, ask: OpenTicket, memory: EngineMemory, block_size: int) -> None:
        """Lets whoever shows the ticket read these blocks, `block_size` tokens each."""
        nccl = None if self.gpu is None else self.gpu.nccl
        if self._server is None and nccl is None:
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
        if self._server is not None:
            self._server.open_ticket(ask.ticket, view)
        if nccl is not None:
            nccl.open_ticket(ask.ticket, view)

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
        if self._tickets.pop(ticket, None) is None:
            return
        if self._server is not None:
            self._server.close_ticket(ticket)
        if self.gpu is not None and self.gpu.nccl is not None:
            self.gpu.nccl.close_ticket(ticket)

    # --- messages -----------------------------------------------------------------------------

    def connect(
        self,
        *,
        send_peer: Callable[[PeerAddr, ToProducer], None],
        send_client: Callable[[int, ToConsumer], None],
    ) -> None:
        """How messages of transports reach other daemons. Raises ConfigError."""
        if self.gpu is not None and "nccl" in self.transports.names:
            try:
                lib = load_nccl()
            except NcclError as e:
                raise ConfigError(e.detail) from None
            self.gpu.use_nccl(
                lib, send_peer=send_peer, send_client=send_client, on_read=self._reads.note
            )

    def takes(self, event: Event) -> bool:
        """Whether an event is a transport's own, and nothing for the core."""
        if self.gpu is not None and self.gpu.nccl is not None:
            return self.gpu.nccl.takes(event)
        match event:
            case PeerMessage(message=message) | ClientMessage(message=message):
                return isinstance(message, NcclToProducer | NcclToConsumer)
            case _:
                return False

    # --- metrics ------------------------------------------------------------------------------

    def count(self) -> None:
        """Brings what the transports have counted into the metrics."""
        if self.gpu is not None and self.gpu.nccl is not None:
            now = self.gpu.nccl.statistics()
            self._metrics.set_nccl(now["comms"], now["staging_bytes"], now["abandoned"])
        if self._server is None:
            return
        dropped = self._server.statistics()["dropped"]
        if isinstance(dropped, dict):
            for reason, count in dropped.items():
                if count > self._dropped[reason]:
                    self._metrics.dropped("data", reason, count - self._dropped[reason])
                    self._dropped[reason] = count
