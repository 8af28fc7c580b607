"""The GPU transports in the contract suite, over a fake driver."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvd.core import events
from kvd.memory.cuda.driver import CudaError
from kvd.memory.engine import EngineMemory
from kvd.protocol.peer import NcclToConsumer, NcclToProducer, ToConsumer, ToProducer
from kvd.protocol.types import PeerAddr, Watermark
from kvd.transport import cuda_ipc, tcp_jobs
from kvd.transport.base import Puller, PullJob, TicketView
from kvd.transport.gpu_thread import GpuThread
from kvd.transport.nccl import NcclTransport
from kvd.transport.nccl_lib import Nccl
from kvd.transport.nccl_puller import NcclPuller
from kvd.transport.options import TransportOptions
from tests.contract.harness import TcpHarness, TlsHarness
from tests.contract.rig import SLOT, TICKET, WORD, Rig, Side, pack
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.fake_nccl import FakeNccl
from tests.cuda.sides import CudaSide, VmmSide, fake_gpu

GATE_TIMEOUT_S = 20.0


class StreamGate:
    """Holds the copy that follows `after` others on the GPU, without holding the thread."""

    def __init__(self, after: int) -> None:
        self._steps = itertools.count()
        self._after = after
        self._reached = threading.Event()
        self._go = threading.Event()

    def __call__(self) -> Callable[[], bool]:
        if next(self._steps) != self._after:
            return lambda: True
        self._reached.set()
        return self._go.is_set

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, GATE_TIMEOUT_S), "no copy came here"

    def release(self) -> None:
        self._go.set()


class Opening:
    """A puller that opens itself at its first pull, as the tests expect pullers to be ready."""

    def __init__(self, inner: cuda_ipc.CudaIpcPuller) -> None:
        self.inner = inner
        self.local = inner.local
        self._opened: asyncio.Task[None] | None = None

    async def pull(self, job: PullJob) -> int:
        if self._opened is None:
            self._opened = asyncio.ensure_future(self.inner.open())
        await asyncio.shield(self._opened)
        return await self.inner.pull(job)

    def stop(self, fetch_id: str) -> None:
        self.inner.stop(fetch_id)

    async def aclose(self) -> None:
        if self._opened is not None:
            await asyncio.wait({self._opened})
        await self.inner.aclose()


class Unchecked:
    """Memory of a GPU has no checksums."""

    checked = False

    def flip(self) -> None:
        raise NotImplementedError

    swap = flip


class CudaIpcHarness(Unchecked):
    name = "cuda_ipc"
    side = CudaSide
    version = 13_000
    timeout_s = 5.0

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        assert isinstance(rig.src, CudaSide)
        assert isinstance(rig.dst, CudaSide)
        self.driver = FakeDriver(version=self.version)
        self.gpu = fake_gpu(self.driver)
        self.producer = fake_gpu(FakeDriver())
        self.local = rig.dst.open_on(self.gpu, writable=True)
        owner = rig.src.open_on(self.producer, writable=True)
        self.remote = rig.src.open_shared_on(self.gpu, owner)
        self.fence_memory: EngineMemory = self.remote
        self.broken: list[CudaError] = []
        self.thread = GpuThread(self.gpu, "kvd-gpu", self.broken.append)
        self._pullers: list[Puller] = []

    def puller(self) -> Puller:
        puller = Opening(
            cuda_ipc.CudaIpcPuller(self.local, self.remote, self.thread, self.timeout_s)
        )
        self._pullers.append(puller)
        return puller

    def admit(self, blocks: Sequence[Sequence[int]], word: int = WORD) -> None:
        pass

    def small_calls(self, nbytes: int) -> None:
        self._patch.setattr(cuda_ipc, "BATCH_BYTES", nbytes)

    def gate(self, after: int) -> StreamGate:
        self.driver.gate = gate = StreamGate(after)
        return gate

    async def aclose(self) -> None:
        for puller in self._pullers:
            await puller.aclose()
        assert await asyncio.to_thread(self.thread.close, 5.0)
        for kind in ("stream", "event"):
            assert self.driver.live[kind] == 0, self.driver.live


class VmmHarness(CudaIpcHarness):
    """Memory of the vmm kind, and a driver that has no batched copies."""

    name = "cuda_ipc"
    side = VmmSide
    version = 12_080


ADDR = PeerAddr("127.0.0.1", 1)


class Daemons:
    """Two daemons' NCCL transports in one process, that hear each other's messages."""

    def __init__(self, options: TransportOptions) -> None:
        self.consumer_driver, self.producer_driver = FakeDriver(), FakeDriver(devices=2)
        self.consumer_gpu = fake_gpu(self.consumer_driver)
        self.producer_gpu = fake_gpu(self.producer_driver)
        self.consumer_nccl = FakeNccl(self.consumer_driver)
        self.producer_nccl = FakeNccl(self.producer_driver)
        self.said: list[NcclToProducer | NcclToConsumer] = []
        self.cut = False
        """Set: no message arrives any more, as when the other daemon has died."""
        self.lost: list[CudaError] = []
        self.read: list[bytes] = []
        """Tickets under which chunks were sent."""
        self.copiers = [
            GpuThread(gpu, "kvd-gpu", self.lost.append)
            for gpu in (self.consumer_gpu, self.producer_gpu)
        ]
        self.consumer = NcclTransport(
            self.consumer_gpu,
            Nccl(self.consumer_nccl),
            options,
            copier=self.copiers[0],
            send_peer=lambda addr, message: self._pass(self._to_producer, message),
            send_client=lambda client, message: None,
            on_read=self.read.append,
        )
        self.producer = NcclTransport(
            self.producer_gpu,
            Nccl(self.producer_nccl),
            options,
            copier=self.copiers[1],
            send_peer=lambda addr, message: None,
            send_client=lambda client, message: self._pass(self._to_consumer, message),
            on_read=self.read.append,
        )

    def _pass(self, hear: Callable[[bytes], None], message: Any) -> None:
        self.said.append(message)
        if not self.cut:
            # A message takes a while, and arrives in order.
            asyncio.get_running_loop().call_soon(hear, msgspec.msgpack.encode(message))

    def _to_producer(self, data: bytes) -> None:
        message = msgspec.msgpack.decode(data, type=ToProducer)
        assert self.producer.takes(events.ClientMessage(1, message))

    def _to_consumer(self, data: bytes) -> None:
        message = msgspec.msgpack.decode(data, type=ToConsumer)
        assert self.consumer.takes(events.PeerMessage(ADDR, message))

    def count(self, kind: type) -> int:
        return sum(isinstance(one, kind) for one in self.said)

    async def aclose(self) -> None:
        await asyncio.gather(self.consumer.aclose(), self.producer.aclose())
        for copier in self.copiers:
            assert await asyncio.to_thread(copier.close, 5.0)

    async def bury(self) -> None:
        """What the end of the process would do for communicators that cannot be ended."""
        for transport, nccl in (
            (self.consumer, self.consumer_nccl),
            (self.producer, self.producer_nccl),
        ):
            for one in transport._everyone():
                while not one.comm.ended:
                    await asyncio.sleep(0.01)
                one.comm._on_lost = lambda why: None
            nccl.bury()
            for one in transport._everyone():
                if one.comm.slots:
                    await asyncio.wait({one.comm._thread.call(one.comm._free)})
                await asyncio.to_thread(one.comm._thread.close, 5.0)

    def nothing_left(self) -> dict[str, int]:
        """What was not given back on either side; empty if all was."""
        found: dict[str, int] = {}
        for who in (self.consumer_driver, self.producer_driver):
            for what in ("stream", "event", "alloc"):
                if who.live[what]:
                    found[what] = found.get(what, 0) + who.live[what]
        for nccl in (self.consumer_nccl, self.producer_nccl):
            if nccl.live["comm"]:
                found["comm"] = found.get("comm", 0) + nccl.live["comm"]
        return found


class TcpCudaHarness(TcpHarness):
    """GPU memory at both ends, or at one of a rig's choice, through pinned buffers."""

    side = CudaSide

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drivers: list[FakeDriver] = []
        super().__init__(rig, monkeypatch)

    def open_both(self, rig: Rig) -> tuple[EngineMemory, EngineMemory]:
        return self._open(rig.dst), self._open(rig.src)

    def _open(self, side: Side) -> EngineMemory:
        if not isinstance(side, CudaSide):
            return side.open(writable=True)
        self.drivers.append(FakeDriver())
        return side.open_on(fake_gpu(self.drivers[-1]), writable=True)

    def small_calls(self, nbytes: int) -> None:
        """A chunk lands as a whole, so chunks have to be small."""
        super().small_calls(nbytes)
        self._patch.setattr(tcp_jobs, "MIN_CHUNK_BYTES", nbytes)
        self._patch.setattr(tcp_jobs, "MAX_CHUNK_BYTES", nbytes)

    async def aclose(self) -> None:
        await super().aclose()
        for driver in self.drivers:
            for what in ("stream", "event", "host"):
                assert driver.live[what] == 0, driver.live


class TcpCudaTlsHarness(TlsHarness, TcpCudaHarness):
    """The same inside TLS."""


class NcclHarness(Unchecked):
    name = "nccl"
    side = CudaSide
    options = TransportOptions(
        data_timeout_s=5.0,
        nccl_init_timeout_s=5.0,
        nccl_abort_timeout_s=5.0,
        nccl_chunk_bytes=2**20,
        nccl_ring=3,
    )

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        assert isinstance(rig.src, CudaSide)
        assert isinstance(rig.dst, CudaSide)
        self._patch = monkeypatch
        self._rig = rig
        self.daemons = Daemons(self.options)
        self.local = rig.dst.open_on(self.daemons.consumer_gpu, writable=True)
        self.owner = rig.src.open_on(self.daemons.producer_gpu, writable=True)
        self.fence_memory: EngineMemory = self.owner
        self._pullers: list[NcclPuller] = []

    def puller(self) -> NcclPuller:
        consumer = self.daemons.consumer
        puller = NcclPuller(self.local, self._rig.src.num_blocks, lambda: consumer.link(ADDR))
        self._pullers.append(puller)
        return puller

    def admit(self, blocks: Sequence[Sequence[int]], word: int = WORD) -> None:
        self.daemons.producer.open_ticket(TICKET, self.view(blocks, word))

    def view(self, blocks: Sequence[Sequence[int]], word: int = WORD) -> TicketView:
        return TicketView(
            memory=self.owner,
            fence_slot=SLOT,
            fence_word=word,
            first_index=0,
            blocks=tuple(pack(group) for group in blocks),
            valid=(Watermark(0, self.owner.num_layers, 2**40),),
            block_size=16,
        )

    def small_calls(self, nbytes: int) -> None:
        """Chunks of one block; where one region is more than that, of one layer's block."""
        for one in (self.daemons.consumer, self.daemons.producer):
            one._options = replace(one._options, nccl_chunk_bytes=max(nbytes, 256))

    def gate(self, after: int) -> StreamGate:
        """Holds a gather at the producer."""
        self.daemons.producer_driver.gate = gate = StreamGate(after)
        return gate

    async def aclose(self) -> None:
        for puller in self._pullers:
            await puller.aclose()
        await self.daemons.aclose()
        assert self.daemons.nothing_left() == {}


class NcclRunsHarness(NcclHarness):
    """Whatever lies in one piece is sent from where it lies."""

    name = "nccl_runs"
    options = replace(NcclHarness.options, nccl_direct_bytes=1)

    def gate(self, after: int) -> StreamGate:
        """Holds a send at the producer, half of which is gone."""
        self.daemons.producer_nccl.gate = gate = StreamGate(after)
        return gate
