"""Daemons in processes of their own, over the fakes: real messages, handles and bytes."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from connector_shim.device_memory import DeviceExporter
from connector_shim.memory import MemoryDescription
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr
from tests.cuda.daemon import HANGS
from tests.cuda.fake_driver import EXPORTABLE, LEGACY, FakeDriver
from tests.cuda.sides import OFFSET, fake_gpu
from tests.integration.daemon.conftest import Site
from tests.integration.daemon.engine import EMPTY, Engine
from tests.integration.daemon.harness import Daemon

LAYERS, BLOCK_BYTES = 4, 4096
PAIRS = {7: 5, 8: 9, 60: 2, 0: 40}


class GpuEngine(Engine):
    """An engine in this process, whose KV memory other processes open by its handle."""

    def __init__(self, socket: str, engine_id: str, *, gpu: int, kind: str, **setup: Any) -> None:
        self._gpu = gpu
        self._kind = kind
        super().__init__(socket, engine_id, **setup)

    def make_memory(
        self, num_layers: int, num_blocks: int, block_bytes: int, model: str
    ) -> tuple[MemoryDescription, Any]:
        on_cpu, mapping = super().make_memory(num_layers, num_blocks, block_bytes, model)
        driver = FakeDriver(devices=2, engine_on=self._gpu)
        fake_gpu(driver, self._gpu).bind()
        nbytes = len(mapping)
        base = driver.engine_alloc(OFFSET + nbytes, self._kind)
        segment = DeviceExporter(driver).export(0, base + OFFSET, nbytes)
        on_cpu.close()
        mapping.close()
        return replace(on_cpu, segments=(segment,)), buffer_over(driver, base + OFFSET, nbytes)


def buffer_over(driver: FakeDriver, address: int, nbytes: int) -> Any:
    """A buffer over memory of a fake GPU, that can be closed."""
    kind: Any = type(
        "Memory",
        (ctypes.Array,),
        {"_type_": ctypes.c_uint8, "_length_": nbytes, "close": lambda self: driver.close()},
    )
    return kind.from_address(address)


class GpuSite(Site):
    def gpu_daemon(self, name: str, gpu: int, **settings: Any) -> Daemon:
        made = Daemon(
            name, self.folder, module="tests.cuda.daemon", device=f"cuda:{gpu}", **settings
        )
        self._ends.append(made.stop)
        self._processes.append(made)
        return made.ready()

    def gpu_engine(self, daemon: Daemon, engine_id: str, **setup: Any) -> GpuEngine:
        made = GpuEngine(daemon.socket, engine_id, **setup)
        self._ends.append(made.close)
        return made


@pytest.fixture
def site(tmp_run_dir: Path) -> Iterator[GpuSite]:
    made = GpuSite(tmp_run_dir)
    yield made
    print(made.logs())
    made.close()


def pair(site: GpuSite, gpus: tuple[int, int], kind: str, **settings: Any) -> tuple[Any, ...]:
    p = site.gpu_daemon("p", gpus[0], **settings)
    d = site.gpu_daemon("d", gpus[1], **settings)
    producer = site.gpu_engine(p, "p", seed=3, gpu=gpus[0], kind=kind)
    consumer = site.gpu_engine(d, "d", gpu=gpus[1], kind=kind)
    at = producer.up()
    consumer.up()
    return p, d, producer, consumer, at


def move(producer: GpuEngine, consumer: GpuEngine, at: PeerAddr, name: str = "t") -> Any:
    producer.offer(name, list(PAIRS.values()))
    return consumer.fetch(name, list(PAIRS), remote=at, engine_id="p")


@pytest.mark.parametrize(
    ("transport", "gpus", "kind", "used"),
    [
        ("auto", (0, 0), LEGACY, "cuda_ipc"),
        ("auto", (0, 0), EXPORTABLE, "cuda_ipc"),
        ("cuda_ipc", (1, 1), LEGACY, "cuda_ipc"),
        ("nccl", (0, 1), LEGACY, "nccl"),
        ("tcp", (0, 0), LEGACY, "tcp"),
    ],
)
def test_kv_of_gpus_moves_between_daemons(
    site: GpuSite, transport: str, gpus: tuple[int, int], kind: str, used: str
) -> None:
    p, d, producer, consumer, at = pair(site, gpus, kind, transport=transport)
    done = move(producer, consumer, at)
    assert done.code == Code.OK, done
    assert done.transport == used
    assert done.nbytes == len(PAIRS) * LAYERS * BLOCK_BYTES
    assert consumer.wrong(3, PAIRS) == 0
    assert d.metric("kvd_fetched_bytes_total", transport=used) == done.nbytes
    for daemon in (p, d):
        daemon.get("/readyz")  # raises where it is not ready


def test_runs_go_from_where_they_lie(site: GpuSite) -> None:
    """The producer's daemon would hang in the first copy that it made."""
    p = site.gpu_daemon(
        "p", 0, transport="nccl", nccl_direct_bytes=1, env={HANGS: "cuMemcpyBatchAsync"}
    )
    d = site.gpu_daemon("d", 1, transport="nccl", nccl_direct_bytes=1)
    producer = site.gpu_engine(p, "p", seed=3, gpu=0, kind=LEGACY)
    consumer = site.gpu_engine(d, "d", gpu=1, kind=LEGACY)
    at = producer.up()
    consumer.up()
    pairs = dict(zip([7, 8, 60, 0], range(5, 9), strict=True))
    producer.offer("t", list(pairs.values()))
    done = consumer.fetch("t", list(pairs), remote=at, engine_id="p")
    assert done.code == Code.OK, done
    assert consumer.wrong(3, pairs) == 0


def test_one_gpu_never_goes_to_nccl(site: GpuSite) -> None:
    _, _, producer, consumer, at = pair(site, (0, 0), LEGACY, transport="nccl")
    done = move(producer, consumer, at)
    assert done.code == Code.TRANSPORT_UNAVAILABLE
    assert "both engines are on one GPU" in done.detail


def test_a_producer_that_is_killed_fails_the_fetch_and_nothing_else(site: GpuSite) -> None:
    p, d, producer, consumer, at = pair(
        site, (0, 1), LEGACY, transport="nccl", data_timeout_s=2.0, nccl_abort_timeout_s=2.0
    )
    assert move(producer, consumer, at).code == Code.OK
    p.kill(signal.SIGKILL)
    p.wait()
    fetch_id = consumer.start_fetch("later", list(PAIRS), remote=at, engine_id="p")
    done = consumer.finish(fetch_id)
    assert done.code in (Code.PEER_LOST, Code.PEER_UNREACHABLE), done
    d.get("/readyz")
    other = site.gpu_daemon("p2", 0, transport="nccl")
    again = site.gpu_engine(other, "p", seed=4, gpu=0, kind=LEGACY)
    at = again.up()
    again.offer("t2", list(PAIRS.values()))
    done = consumer.fetch("t2", list(PAIRS), remote=at, engine_id="p")
    assert done.code == Code.OK, done
    assert consumer.wrong(4, PAIRS) == 0


def test_a_gpu_that_hangs_ends_its_daemon_and_not_its_engine(site: GpuSite) -> None:
    p = site.gpu_daemon("p", 0, transport="cuda_ipc")
    d = site.gpu_daemon(
        "d", 0, transport="cuda_ipc", gpu_hang_s=1.0, env={HANGS: "cuMemcpyBatchAsync"}
    )
    producer = site.gpu_engine(p, "p", seed=3, gpu=0, kind=LEGACY)
    consumer = site.gpu_engine(d, "d", gpu=0, kind=LEGACY)
    at = producer.up()
    consumer.up()
    done = move(producer, consumer, at)
    assert done.code in (Code.DAEMON_GONE, Code.DRAINING), done
    assert d.wait() != 0
    assert any("has not ended for" in str(line) for line in d.lines("task_failed")) or (
        "has not ended for" in d.tail()
    )
    assert (consumer.words == EMPTY).all()


def test_an_engine_on_another_gpu_than_its_daemon_is_refused(site: GpuSite) -> None:
    d = site.gpu_daemon("d", 0)
    engine = site.gpu_engine(d, "e", gpu=1, kind=LEGACY)
    engine.wait(lambda: engine.client.last_error is not None, "a refusal")
    error = engine.client.last_error
    assert error is not None
    assert "the engine's memory is on GPU-0202" in error.detail
