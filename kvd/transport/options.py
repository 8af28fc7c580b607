"""What a daemon sets for its transports."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.transport.channel import Tls


@dataclass(frozen=True, slots=True)
class TransportOptions:
    """Seconds for `_s`, counts otherwise; see `kvd.config` for what they mean to an operator.

    `transport`: "auto" or the one that alone will do. `first_frame_s`: how long an accepted data
    connection may take to show a ticket that is known here. `idle_s`: how long one that did may
    then do nothing. `verify`: "off", or "crc" to check every job's bytes before it counts.
    `tls`: with it, data connections of both ends are inside TLS.
    """

    transport: str = "auto"
    device: str = "cpu"
    shm_threads: int = 2
    tcp_streams: int = 2
    tcp_congestion: str = ""
    data_timeout_s: float = 10.0
    connect_timeout_s: float = 5.0
    tls: Tls | None = None
    max_data_connections: int = 256
    max_data_connections_per_peer: int = 256
    first_frame_s: float = 5.0
    idle_s: float = 300.0
    gpu_hang_s: float = 30.0
    nccl_max_comms: int = 16
    nccl_chunk_bytes: int = 8 * 2**20
    nccl_ring: int = 4
    nccl_direct_bytes: int = 2 * 2**20
    nccl_max_ctas: int = 4
    nccl_channels: int = 0
    nccl_interface: str = ""
    nccl_init_timeout_s: float = 8.0
    nccl_abort_timeout_s: float = 10.0
    verify: str = "off"

    @property
    def checked(self) -> bool:
        """Whether pullers compare checksums."""
        return self.verify == "crc"
