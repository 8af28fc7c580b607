"""From vLLM's configuration to the two halves. What differs between vLLM versions is asked here."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

from connector_shim.client import Client
from connector_shim.errors import ClientError
from connector_shim.geometry import build_geometry
from connector_shim.keeper import DaemonKeeper
from connector_shim.layout import describe_kv_caches, unsupported_groups
from connector_shim.memory import MemoryDescription
from connector_shim.paths import resolve_socket
from connector_shim.plans import EngineShape
from connector_shim.scheduler import SchedulerHalf
from connector_shim.settings import ShimSettings
from connector_shim.spawn import private_socket_path
from connector_shim.worker import WorkerHalf
from kvd.protocol.types import Rank, Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

log = logging.getLogger("vllm.kvd")

_ROLES: dict[str | None, Role] = {
    "kv_producer": "producer",
    "kv_consumer": "consumer",
    "kv_both": "both",
    None: "both",
}
FULL_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec")
"""Groups whose blocks stay with a request until it ends, so that they may be read meanwhile."""


def build_scheduler_half(
    vllm_config: Any, kv_cache_config: Any, failures_by_id: bool
) -> SchedulerHalf:
    """`failures_by_id`: this vLLM can be told which request's load failed (0.30 and later).

    Raises ValueError for what the operator must change.
    """
    settings = _settings(vllm_config, kv_cache_config, failures_by_id)
    parallel = vllm_config.parallel_config
    groups = kv_cache_config.kv_cache_groups
    shape = EngineShape(
        engine_id=_engine_id(vllm_config),
        block_sizes=tuple(int(group.kv_cache_spec.block_size) for group in groups),
        num_blocks=int(kv_cache_config.num_blocks),
        pp_size=int(parallel.pipeline_parallel_size),
        tp_size=int(parallel.tensor_parallel_size),
        full_attention=all(
            type(group.kv_cache_spec).__name__ in FULL_ATTENTION for group in groups
        ),
    )
    return SchedulerHalf(shape, settings)


def build_worker_half(vllm_config: Any, kv_cache_config: Any, failures_by_id: bool) -> WorkerHalf:
    """Raises ValueError for what the operator must change."""
    settings = _settings(vllm_config, kv_cache_config, failures_by_id)
    return WorkerHalf(
        _rank(vllm_config),
        len(kv_cache_config.kv_cache_groups),
        settings,
        degraded=_unsupported(vllm_config, kv_cache_config),
    )


def start_worker(
    worker: WorkerHalf,
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, torch.Tensor],
) -> None:
    """Share the KV memory and connect to the daemon. Whatever fails degrades, with its reason."""
    if worker.degraded:
        worker.degrade(worker.degraded)
        return
    try:
        layout = describe_kv_caches(kv_caches, kv_cache_config)
    except ClientError as error:
        worker.degrade(error.detail)
        return
    keeper: DaemonKeeper | None = None
    try:
        geometry = build_geometry(
            vllm_config, kv_cache_config, layout, worker.rank, worker.settings.model_name
        )
        memory = MemoryDescription(
            segments=layout.segments,
            layers=layout.layers,
            geometry=geometry,
            num_blocks=int(kv_cache_config.num_blocks),
        )
        keeper = _keeper(worker, vllm_config)
        client = _client(worker, vllm_config, keeper)
        if keeper is not None:
            keeper.keep()
        worker.start(client, memory, keeper)
    except Exception as error:
        if keeper is not None:
            keeper.stop()
        if isinstance(error, ClientError):
            worker.degrade(error.detail)
        else:
            log.exception("kvd: the worker half could not start")
            worker.degrade(f"internal: {error!r}")
    finally:
        # The client keeps descriptors of its own.
        layout.close()


def _keeper(worker: WorkerHalf, vllm_config: Any) -> DaemonKeeper | None:
    """With "spawn", who starts this rank's daemon and starts it again."""
    settings = worker.settings
    if settings.daemon != "spawn":
        return None
    if settings.socket:
        path = resolve_socket(settings.socket, local_rank=_local_rank(vllm_config))
    else:
        path = private_socket_path(_engine_id(vllm_config), worker.rank)
    return DaemonKeeper(path, settings.spawn)


def _client(worker: WorkerHalf, vllm_config: Any, keeper: DaemonKeeper | None) -> Client:
    settings = worker.settings
    return Client(
        keeper.path if keeper is not None else settings.socket or None,
        engine_id=_engine_id(vllm_config),
        rank=worker.rank,
        role=_ROLES[vllm_config.kv_transfer_config.kv_role],
        client=f"vllm {_vllm_version()}",
        local_rank=_local_rank(vllm_config),
        connect_timeout_s=settings.connect_timeout_s,
        daemon_hang_s=settings.daemon_hang_s,
    )


def _engine_id(vllm_config: Any) -> str:
    return str(vllm_config.kv_transfer_config.engine_id)


def _settings(vllm_config: Any, kv_cache_config: Any, failures_by_id: bool) -> ShimSettings:
    settings = ShimSettings.parse(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
    logging.getLogger("vllm.kvd").setLevel(settings.log_level.upper())
    if kv_cache_config is None:
        raise ValueError("KvdConnector needs the KV cache configuration, which vLLM did not give")
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        raise ValueError(
            "KvdConnector does not support enable_sleep_mode: the daemon would keep the memory "
            "of a sleeping engine and read stale KV after it wakes"
        )
    if len(kv_cache_config.kv_cache_groups) > 1 and not failures_by_id:
        raise ValueError(
            f"KvdConnector cannot report failed loads to vLLM {_vllm_version()} with "
            f"{len(kv_cache_config.kv_cache_groups)} KV cache groups: leave the hybrid KV cache "
            "manager off (do not pass --no-disable-hybrid-kv-cache-manager), or use vLLM 0.30 or "
            "later"
        )
    return settings


def _unsupported(vllm_config: Any, kv_cache_config: Any) -> str:
    """Why this engine's KV cannot be moved at all, "" if it can."""
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = int(getattr(parallel, name, 1) or 1)
        if size > 1:
            return f"{name} is {size}: blocks of interleaved tokens are not supported"
    return unsupported_groups(kv_cache_config)


def _rank(vllm_config: Any) -> Rank:
    from vllm.distributed import parallel_state

    parallel = vllm_config.parallel_config
    tp_size = int(parallel.tensor_parallel_size)
    try:
        tp_rank = int(parallel_state.get_tp_group().rank_in_group)
        pp_rank = int(parallel_state.get_pp_group().rank_in_group)
    except AssertionError:  # no process groups: a single process
        pp_rank, tp_rank = divmod(int(parallel.rank), tp_size)
    return Rank(
        pp_rank=pp_rank,
        pp_size=int(parallel.pipeline_parallel_size),
        tp_rank=tp_rank,
        tp_size=tp_size,
        dp_rank=int(parallel.data_parallel_rank),
    )


def _local_rank(vllm_config: Any) -> int:
    from vllm.distributed import parallel_state

    try:
        return int(parallel_state.get_world_group().local_rank)
    except AssertionError:
        return int(os.environ.get("LOCAL_RANK", "0"))


def _vllm_version() -> str:
    import vllm

    return str(vllm.__version__)
