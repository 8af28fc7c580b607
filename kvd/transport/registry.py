"""Which transports exist, which can be used here, and how each end of one is made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from kvd.memory.engine import EngineMemory
from kvd.protocol.codes import Code
from kvd.transport.base import TransportError
from kvd.transport.copy_pool import CopyPool
from kvd.transport.gpu import nccl_missing
from kvd.transport.options import TransportOptions
from kvd.transport.pulse import Pulse
from kvd.transport.shm import ShmPuller
from kvd.transport.tcp_puller import TcpPuller
from kvd.transport.tcp_server import TcpServer, admit_anybody, tell_nobody
from kvd.transport.tcp_socket import check_congestion

log = structlog.get_logger("kvd.transport")

BUILT_IN = ("shm", "tcp")
"""Best first."""

OF_A_GPU = ("cuda_ipc", "nccl")
"""Those of `kvd.transport.gpu`, which are there if the daemon has a GPU."""

POOL_CLOSE_S = 5.0


def available(options: TransportOptions) -> list[str]:
    """The transports that this daemon may use, best first.

    "auto" gives all that work here; a name gives that one alone, or raises TransportError
    (TRANSPORT_UNAVAILABLE with the reason): what was asked for is never silently replaced.
    """
    if options.transport != "auto":
        check_name(options.transport, options.device, options.nccl_interface)
        return [options.transport]
    names = [*OF_A_GPU, *BUILT_IN] if options.device != "cpu" else list(BUILT_IN)
    missing = nccl_missing(options.nccl_interface) if "nccl" in names else ""
    if missing:
        log.warning("no_nccl", detail=missing, effect="GPUs of two hosts use tcp")
        names.remove("nccl")
    return names


def check_name(name: str, device: str = "cpu", interface: str = "") -> None:
    """Raises TransportError (TRANSPORT_UNAVAILABLE) unless the transport can be had here."""
    if name in BUILT_IN:
        return
    if name not in OF_A_GPU:
        reason = f"unknown; there are {', '.join((*BUILT_IN, *OF_A_GPU))}"
    elif device == "cpu":
        reason = "moves KV of GPUs; this daemon has none (--device cuda:N)"
    else:
        reason = nccl_missing(interface) if name == "nccl" else ""
    if reason:
        raise TransportError(Code.TRANSPORT_UNAVAILABLE, f"transport {name!r}: {reason}")


class Transports:
    """Makes pullers and servers for one daemon; they share its copy threads."""

    def __init__(self, options: TransportOptions) -> None:
        """Raises TransportError if the options name what cannot be had here."""
        self.options = options
        self.names = available(options)
        check_congestion(options.tcp_congestion)
        self._pulse = Pulse()
        self._pool = CopyPool(options.shm_threads, self._pulse) if "shm" in self.names else None

    def shm(self, local: EngineMemory, remote: EngineMemory) -> ShmPuller:
        """A puller from a peer's memory on this host; raises TransportError."""
        if self._pool is None:
            raise TransportError(
                Code.TRANSPORT_UNAVAILABLE, f"shm: transport is {self.options.transport!r}"
            )
        return ShmPuller(local, remote, self._pool, checked=self.options.checked)

    def tcp(self, local: EngineMemory, host: str, port: int, remote_blocks: int) -> TcpPuller:
        """A puller from the data port at an address in numbers; raises TransportError."""
        if "tcp" not in self.names:
            raise TransportError(
                Code.TRANSPORT_UNAVAILABLE, f"tcp: transport is {self.options.transport!r}"
            )
        return TcpPuller(local, host, port, remote_blocks, self.options, self._pulse)

    def open_puller(
        self,
        name: str,
        local: EngineMemory,
        *,
        remote: EngineMemory | None = None,
        host: str = "",
        port: int = 0,
        remote_blocks: int = 0,
    ) -> ShmPuller | TcpPuller:
        """By name: "shm" takes `remote`, "tcp" host, port and blocks. Raises TransportError."""
        check_name(name)
        if name == "tcp":
            return self.tcp(local, host, port, remote_blocks)
        if remote is None:
            raise TransportError(Code.TRANSPORT_UNAVAILABLE, "shm: the peer passed no memory")
        return self.shm(local, remote)

    def start_server(
        self,
        host: str,
        port: int,
        admit: Callable[[str], bool] = admit_anybody,
        on_read: Callable[[bytes], None] = tell_nobody,
    ) -> TcpServer | None:
        """The data server, listening; None if no transport here needs one.

        `admit(address)` says whether a host may connect; `on_read(ticket)` hears, on a thread of
        the server, of each request that was served. Raises TransportError.
        """
        if "tcp" not in self.names:
            return None
        return TcpServer(host, port, self.options, admit, self._pulse, on_read)

    def stuck(self, limit_s: float) -> list[str]:
        """Names of threads that ended, or that did not get on with their work for `limit_s`."""
        dead = [] if self._pool is None else self._pool.dead()
        return dead + self._pulse.stuck(limit_s)

    async def aclose(self) -> None:
        """Ends the copy threads; all pullers and servers were closed before."""
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close, POOL_CLOSE_S)
