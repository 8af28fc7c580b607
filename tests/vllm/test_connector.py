"""The connector's class as vLLM finds, builds and asks it, on the installed version."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    supports_hma,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

from connector_shim import memory
from connector_shim.connector import KvdConnector, TransferResults
from connector_shim.geometry import cpu_isa
from connector_shim.jobs import RankState
from connector_shim.metadata import KvdHandshake, KvdWorkerMetadata
from connector_shim.plugin import NAME, register
from connector_shim.stats import KvdPromMetrics, KvdStats
from kvd.protocol.codes import Code
from tests.vllm.engine import Engine, kv_cache_config
from tests.vllm.models import write_tiny_llama

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return Engine(write_tiny_llama(tmp_path_factory.mktemp("model")))


# --- finding it ---------------------------------------------------------------------------------


def test_registered_by_the_plugin_and_only_once() -> None:
    register()
    first = KVConnectorFactory._registry[NAME]
    register()
    assert KVConnectorFactory._registry[NAME] is first
    config = KVTransferConfig(kv_connector=NAME, kv_role="kv_both")
    assert KVConnectorFactory.get_connector_class(config) is KvdConnector


def test_found_by_its_module_path() -> None:
    code = (
        "from vllm.config import KVTransferConfig;"
        "from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory as F;"
        f"assert {NAME!r} not in F._registry;"
        f"c = KVTransferConfig(kv_connector={NAME!r}, kv_role='kv_both',"
        "kv_connector_module_path='connector_shim.connector');"
        "print(F.get_connector_class(c).__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.split()[-1] == "connector_shim.connector"


def test_every_method_that_vllm_calls_is_there() -> None:
    assert not KvdConnector.__abstractmethods__
    assert issubclass(KvdConnector, KVConnectorBase_V1)
    assert supports_hma(KvdConnector)
    assert KvdConnector.requires_piecewise_for_cudagraph({}) is False


@pytest.mark.parametrize(("use_mla", "layout"), [(False, "HND"), (True, None)])
def test_the_layout_that_it_asks_for(use_mla: bool, layout: str | None) -> None:
    config: Any = SimpleNamespace(model_config=SimpleNamespace(use_mla=use_mla))
    assert KvdConnector.get_required_kvcache_layout(config) == layout


# --- building it --------------------------------------------------------------------------------


def build(engine: Engine, role: KVConnectorRole, kv_config: Any = None, **extra: Any) -> Any:
    engine.vllm_config.kv_transfer_config.kv_connector_extra_config = extra
    return KvdConnector(engine.vllm_config, role, kv_config or kv_cache_config(64))


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_unknown_keys_stop_the_start(engine: Engine, role: KVConnectorRole) -> None:
    with pytest.raises(ValueError, match=r"unknown key 'sokket'.*socket"):
        build(engine, role, sokket="/x")


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_sleep_mode_is_refused_by_name(
    engine: Engine, role: KVConnectorRole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.vllm_config.model_config, "enable_sleep_mode", True)
    with pytest.raises(ValueError, match="enable_sleep_mode"):
        build(engine, role)


def test_the_other_halfs_methods_are_told_apart(engine: Engine) -> None:
    worker = build(engine, KVConnectorRole.WORKER)
    with pytest.raises(RuntimeError, match="scheduler-side"):
        worker.build_connector_meta(None)
    scheduler = build(engine, KVConnectorRole.SCHEDULER)
    with pytest.raises(RuntimeError, match="worker-side"):
        scheduler.get_finished(set())
    assert scheduler.get_kv_connector_stats() is None
    assert worker.get_finished_count() is None
    worker.shutdown()
    scheduler.shutdown()


# --- starting the worker ------------------------------------------------------------------------


def tensors(device: str = "cpu") -> dict[str, torch.Tensor]:
    return {"layer.0": torch.zeros(64, 1, 16, 2, dtype=torch.float32, device=device)}


@pytest.fixture
def nobody(tmp_path: Path) -> str:
    return str(tmp_path / "no.sock")


def started(engine: Engine, caches: Any, kv_config: Any = None, **extra: Any) -> Any:
    connector = build(engine, KVConnectorRole.WORKER, kv_config, **extra)
    connector.register_kv_caches(caches)
    return connector


def test_no_daemon_says_how_to_start_one(engine: Engine, nobody: str) -> None:
    connector = started(engine, tensors(), socket=nobody)
    state = connector.get_handshake_metadata().state
    assert state.phase == "down"
    assert f"kvd serve --socket {nobody}" in state.detail
    connector.shutdown()


def test_no_room_in_shared_memory_degrades(
    engine: Engine, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_shm_free", lambda: 100)
    caches = tensors()
    connector = started(engine, caches, socket=nobody)
    assert "/dev/shm" in connector.get_handshake_metadata().state.detail
    caches["layer.0"].fill_(2)
    assert connector.get_finished(set()) == (None, None)
    connector.shutdown()


def test_another_device_degrades(engine: Engine, nobody: str) -> None:
    connector = started(engine, tensors("meta"), socket=nobody)
    detail = connector.get_handshake_metadata().state.detail
    assert "memory is not supported by this version" in detail
    connector.shutdown()


def test_state_caches_degrade_before_memory_is_touched(engine: Engine, nobody: str) -> None:
    spec = MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,))
    config = KVCacheConfig(64, [], [KVCacheGroupSpec(["layer.0"], spec)])
    caches = tensors()
    connector = started(engine, caches, config, socket=nobody)
    assert "MambaSpec" in connector.get_handshake_metadata().state.detail
    assert not caches["layer.0"].untyped_storage().is_shared()
    connector.shutdown()


def test_a_bad_socket_path_degrades(engine: Engine) -> None:
    connector = started(engine, tensors(), socket="/tmp/" + "x" * 200)
    assert "at most 107" in connector.get_handshake_metadata().state.detail
    connector.shutdown()


def test_the_isa_is_vllms_own_choice(engine: Engine) -> None:
    groups = kv_cache_config(64).kv_cache_groups
    specs: list[Any] = [SimpleNamespace(block_size=32, head_size=64, num_kv_heads=1)]
    assert cpu_isa(engine.vllm_config, specs) not in ("", "vec16")
    specs[0].block_size = 16
    assert cpu_isa(engine.vllm_config, specs)
    assert groups


# --- between the halves -------------------------------------------------------------------------


class Foreign(KVConnectorHandshakeMetadata):
    """Another connector's, as MultiConnector hands it to all of its children."""


def test_handshakes(engine: Engine) -> None:
    connector = build(engine, KVConnectorRole.SCHEDULER)
    connector.set_xfer_handshake_metadata({})
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): Foreign()})
    assert "not reported" in connector._scheduler.daemons.problem()
    connector.set_xfer_handshake_metadata_pp_aware(
        {(0, 0): KvdHandshake((0, 0), RankState("up", "h", 1)),
         (1, 0): KvdHandshake((1, 0), RankState("up", "h", 2))}
    )  # fmt: skip
    assert connector._scheduler.daemons.problem() is None


def test_worker_metadata_of_several_ranks() -> None:
    a = KvdWorkerMetadata({(0, 0): RankState("up", "h", 1)})
    b = KvdWorkerMetadata({(0, 1): RankState("down")})
    both = a.aggregate(b)
    assert isinstance(both, KvdWorkerMetadata)
    assert both.ranks.keys() == {(0, 0), (0, 1)}
    assert a.ranks.keys() == {(0, 0)}


def test_one_drain_a_step_and_no_bad_block_is_lost(engine: Engine) -> None:
    connector = build(engine, KVConnectorRole.WORKER)
    connector._worker.reports.receive_started("a", "f1", (b"\1\0\0\0",))
    connector._worker.reports.receive_ended("f1", ok=False)
    if TransferResults is None:
        assert connector.get_finished(set()) == (None, {"a"})
    else:
        assert connector.get_transfer_results(set()).finished_recving == {"a"}
    connector._worker.reports.receive_started("b", "f2", (b"\2\0\0\0",))
    connector._worker.reports.receive_ended("f2", ok=False)
    assert connector.get_finished(set()) == (None, {"b"})
    assert connector.get_block_ids_with_load_errors() == {1, 2}
    assert connector.get_block_ids_with_load_errors() == set()
    connector.shutdown()


# --- metrics ------------------------------------------------------------------------------------


class Metric:
    """Stands for a prometheus_client class, of which vLLM has several kinds."""

    made: dict[str, Metric]

    def __init__(self, name: str, documentation: str, labelnames: list[str], **kw: Any) -> None:
        assert documentation
        self.labelnames = labelnames
        self.values: dict[tuple[Any, ...], list[Any]] = {}
        type(self).made[name] = self

    def labels(self, *values: Any) -> Any:
        assert len(values) == len(self.labelnames)
        cell = self.values.setdefault(values, [])
        return SimpleNamespace(inc=cell.append, observe=cell.append)


def prom(labels: list[str]) -> tuple[KvdPromMetrics, dict[str, Metric]]:
    from prometheus_client import Counter, Gauge, Histogram

    class Kind(Metric):
        made: dict[str, Metric] = {}  # noqa: RUF012 - one for each call

    config: Any = SimpleNamespace(kv_transfer_config=None)
    metrics = KvdConnector.build_prom_metrics(
        config, {Counter: Kind, Gauge: Kind, Histogram: Kind}, labels, {0: ["m", "0"]}
    )
    return metrics, Kind.made


def test_stats_from_worker_to_metrics(engine: Engine) -> None:
    connector = build(engine, KVConnectorRole.WORKER)
    assert connector.get_kv_connector_stats() is None
    connector._worker.stats.fetch_ended(Code.OK, 4096, 16, 0.2)
    connector._worker.stats.fetch_ended(Code.PEER_LOST)
    stats = connector.get_kv_connector_stats()
    assert not stats.is_empty()
    again = KvdConnector.build_kv_connector_stats(stats.data)
    total = again.aggregate(KvdStats.build(stats.data))
    assert total.reduce()["Fetches"] == 2
    metrics, made = prom(["model_name", "engine"])
    metrics.observe(stats.data, 0)
    assert made["vllm:kvd_fetches"].values == {("m", "0", "ok"): [1], ("m", "0", "peer_lost"): [1]}
    assert made["vllm:kvd_fetched_bytes"].values == {("m", "0"): [4096]}
    assert made["vllm:kvd_fetch_seconds"].values == {("m", "0"): [0.2]}
    connector.shutdown()


@pytest.mark.parametrize("data", [None, {}, {"fetches": 5}, {"fetches": {"x": "y"}}, [1], "no"])
def test_metrics_never_raise(data: Any) -> None:
    metrics, _ = prom(["model_name", "engine"])
    metrics.observe(data, 0)
    metrics.observe({"fetches": {"ok": 1}}, 7)
    stats = KvdConnector.build_kv_connector_stats(data)
    assert stats.aggregate(stats).is_empty() or data == {"fetches": {"x": "y"}}
    assert isinstance(stats.reduce(), dict)
