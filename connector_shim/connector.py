"""`KvdConnector`: the class that vLLM loads. It only delegates; importing it has no side effect.

One class serves vLLM 0.20.1 to 0.32.0: methods that a version does not know are never called
there, and names that a version does not have are looked up, not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base as vllm_base
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

from connector_shim.jobs import Drained, RankId, RankState
from connector_shim.metadata import KvdHandshake, KvdMetadata, KvdWorkerMetadata
from connector_shim.settings import hooks_layers
from connector_shim.stats import KvdPromMetrics, KvdStats
from connector_shim.wiring import build_scheduler_half, build_worker_half, start_worker

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # before 0.32
    CacheHitSource = None

if TYPE_CHECKING:
    import torch

    from connector_shim.scheduler import SchedulerHalf
    from connector_shim.worker import WorkerHalf

TransferResults = getattr(vllm_base, "KVConnectorTransferResults", None)
"""What 0.30 and later want to be told in; None before."""


class KvdConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves KV between prefill and decode engines through the kvd daemon."""

    if CacheHitSource is not None:
        _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None
    ) -> None:
        """Raises ValueError for settings that the operator must change; all else degrades."""
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        by_id = TransferResults is not None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = build_scheduler_half(vllm_config, kv_cache_config, by_id)
        else:
            self._worker = build_worker_half(vllm_config, kv_cache_config, by_id)
        self._drained: Drained | None = None

    # --- class level, also asked in the API process -----------------------------------------

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Heads outside of tokens, so that a head range of a block is one piece of memory."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "HND"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Only layer by layer does it hook into the forward pass, which a full graph skips."""
        return hooks_layers(extra_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        return KvdStats.build(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        return KvdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- scheduler side ---------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        self._s.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._s.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._s.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvdMetadata:
        return KvdMetadata(self._s.take_jobs(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        self._s.worker_output(
            connector_output.finished_sending or (), connector_output.finished_recving or ()
        )
        meta = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(meta, KvdWorkerMetadata):
            self._s.update_daemons(meta.ranks)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._s.request_finished(request, block_ids)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """A load fills every group, so none of its new blocks needs to be zeroed first."""
        ids = getattr(self._kv_cache_config, "transfer_group_ids", None)
        return tuple(range(len(self._kv_cache_config.kv_cache_groups))) if ids is None else ids

    def has_pending_push_work(self) -> bool:
        return False

    def has_pending_block_frees(self) -> bool:
        return False

    def reset_cache(self) -> bool | None:
        return self._scheduler.reset_cache() if self._scheduler is not None else None

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        self._take_handshakes(metadata.values())

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        self._take_handshakes(metadata.values())

    def _take_handshakes(self, metadata: Any) -> None:
        states: dict[RankId, RankState] = {
            item.rank: item.state for item in metadata if isinstance(item, KvdHandshake)
        }
        if states and self._scheduler is not None:
            self._scheduler.update_daemons(states)

    # --- worker side ------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        start_worker(self._w, self._vllm_config, self._kv_cache_config, kv_caches)

    def get_handshake_metadata(self) -> KvdHandshake | None:
        return KvdHandshake(self._w.rank_id, self._w.state())

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        if isinstance(kv_connector_metadata, KvdMetadata):
            self._w.step(kv_connector_metadata.jobs)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing, but for a model runner that did not call handle_preemptions in this step."""
        if self.has_connector_metadata():
            self.handle_preemptions(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if self._worker is not None:
            self._worker.layer_saved(layer_name)

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.forward_done()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        drained = self._drain()
        return drained.sending or None, drained.recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        drained = self._drain()
        if TransferResults is None:
            raise NotImplementedError("this vLLM has no KVConnectorTransferResults")
        return TransferResults(
            finished_sending=drained.sending,
            finished_recving=drained.recving,
            failed_recving=drained.failed,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Of the drain that came just before; asked for once a step."""
        drained, self._drained = self._drained, None
        return drained.invalid_blocks if drained is not None else set()

    def build_connector_worker_meta(self) -> KvdWorkerMetadata | None:
        return KvdWorkerMetadata({self._w.rank_id: self._w.state()})

    def get_kv_connector_stats(self) -> Any:
        return KvdStats.take(self._worker.stats) if self._worker is not None else None

    def get_finished_count(self) -> int | None:
        """None: every worker reports every id."""
        return None

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        if self._scheduler is not None:
            self._scheduler.shutdown()

    # --- helpers ----------------------------------------------------------------------------

    def _drain(self) -> Drained:
        """One drain a step; what an earlier one left untold of bad blocks is not lost."""
        drained = self._w.drain()
        if self._drained is not None:
            drained.invalid_blocks |= self._drained.invalid_blocks
        self._drained = drained
        return drained

    @property
    def _s(self) -> SchedulerHalf:
        if self._scheduler is None:
            raise RuntimeError("a scheduler-side method was called on a worker's connector")
        return self._scheduler

    @property
    def _w(self) -> WorkerHalf:
        if self._worker is None:
            raise RuntimeError("a worker-side method was called on the scheduler's connector")
        return self._worker
