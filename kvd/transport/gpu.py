"""What a daemon with a GPU has besides: the device, its copying thread, and their watch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import structlog

from kvd.errors import KvdError
from kvd.memory.cuda.device import Gpu
from kvd.memory.cuda.driver import CudaError
from kvd.memory.cuda.memory import DeviceMemory
from kvd.memory.engine import EngineMemory
from kvd.protocol import peer as wire
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr
from kvd.transport.base import TransportError
from kvd.transport.cuda_ipc import CudaIpcPuller
from kvd.transport.gpu_thread import GpuThread
from kvd.transport.nccl import NcclTransport
from kvd.transport.nccl_lib import Nccl, NcclError, load_nccl, refused_env
from kvd.transport.nccl_puller import NcclPuller
from kvd.transport.options import TransportOptions

log = structlog.get_logger("kvd.gpu")

CLOSE_S = 5.0
INTERFACE = "NCCL_SOCKET_IFNAME"


class GpuLost(KvdError):
    """Nothing but a new process can use the GPU again."""

    code = Code.INTERNAL


def nccl_missing(interface: str) -> str:
    """Why NCCL cannot be used here, "" if it can. Sets the interface that NCCL is to use."""
    wrong = refused_env(os.environ)
    theirs = os.environ.get(INTERFACE)
    if interface and theirs not in (None, interface):
        wrong = wrong or f"{INTERFACE} is {theirs}, nccl_interface is {interface}: unset one"
    if not wrong:
        if interface:
            os.environ[INTERFACE] = interface
        try:
            load_nccl()
        except NcclError as exc:
            wrong = exc.detail
    return wrong


class GpuTransports:
    """Make it on the loop; `aclose` once no puller is open and no memory mapped any more."""

    def __init__(self, gpu: Gpu, options: TransportOptions) -> None:
        self.gpu = gpu
        self.nccl: NcclTransport | None = None
        """There once `use_nccl` was called."""
        self._options = options
        self._lost: str = ""
        self._thread = GpuThread(gpu, "kvd-gpu", self._broken)

    def use_nccl(
        self,
        lib: Nccl,
        *,
        send_peer: Callable[[PeerAddr, wire.NcclToProducer], None],
        send_client: Callable[[int, wire.NcclToConsumer], None],
        on_read: Callable[[bytes], None],
    ) -> None:
        """Lets GPUs that no memory is shared between have a transport; for its messages, see
        `NcclTransport`."""
        self.nccl = NcclTransport(
            self.gpu,
            lib,
            self._options,
            copier=self._thread,
            send_peer=send_peer,
            send_client=send_client,
            on_read=on_read,
        )

    async def cuda_ipc(self, local: EngineMemory, remote: EngineMemory) -> CudaIpcPuller:
        """A puller from a peer's memory on this host; raises TransportError."""
        if not isinstance(local, DeviceMemory) or not isinstance(remote, DeviceMemory):
            raise TransportError(Code.TRANSPORT_UNAVAILABLE, "cuda_ipc: not memory of a GPU")
        puller = CudaIpcPuller(local, remote, self._thread, self._options.data_timeout_s)
        await puller.open()
        return puller

    async def nccl_puller(
        self, local: EngineMemory, addr: PeerAddr, remote_blocks: int
    ) -> NcclPuller:
        """A puller from another GPU; raises TransportError."""
        if self.nccl is None or not isinstance(local, DeviceMemory):
            raise TransportError(Code.TRANSPORT_UNAVAILABLE, "nccl: not memory of a GPU")
        return await self.nccl.puller(local, addr, remote_blocks)

    def stuck(self) -> str:
        """Why this daemon cannot go on, "" while it can. Work that is late is none yet."""
        thread, limit = self._thread, self._options.gpu_hang_s
        for what, seconds in (
            ("a call", thread.call_for),
            ("work", thread.work_for),
            ("a staged copy, or a send from blocks,", self.gpu.waiting.longest()),
        ):
            if seconds > limit:
                return f"{what} on {self.gpu.uuid} has not ended for {seconds:.0f} s"
        return self._lost or ("" if self.nccl is None else self.nccl.stuck())

    def check(self) -> None:
        """Raises GpuLost when only a new process can help."""
        why = self.stuck()
        if why:
            raise GpuLost(why)

    async def aclose(self) -> None:
        """Ends the threads, and lets go of the device."""
        if self.nccl is not None:
            await self.nccl.aclose()
        if await asyncio.to_thread(self._thread.close, CLOSE_S):
            try:
                self.gpu.close()
            except CudaError as exc:
                log.error("device_not_released", detail=exc.detail)
        else:
            log.error("gpu_thread_left_behind", call_s=self._thread.call_for)

    def _broken(self, error: CudaError) -> None:
        self._lost = f"{self.gpu.uuid}: {error.detail}"
