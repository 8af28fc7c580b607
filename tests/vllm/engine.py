"""vLLM's real scheduler with both halves of the connector around it, but no model and no daemon.

Works on vLLM 0.20.1 and on 0.32.0. Each `step` goes the way that vLLM's workers go: jobs are acted
on before the forward, results are drained after it, and what the worker half says reaches the
scheduler in the model's output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from connector_shim.connector import KvdConnector, TransferResults
from connector_shim.plugin import register
from tests.unit.shim.fakes import FakeClient, memory_description

BLOCK = 16
EOS = 2

register()


def kv_cache_config(num_blocks: int, window: int = 0) -> KVCacheConfig:
    """One group of full attention; with a `window`, a second one of sliding-window layers."""
    common: dict[str, Any] = {
        "block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32,
    }  # fmt: skip
    groups = [KVCacheGroupSpec(["layer.0"], FullAttentionSpec(**common))]
    if window:
        spec = SlidingWindowSpec(sliding_window=window, **common)
        groups.append(KVCacheGroupSpec(["layer.1"], spec))
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


class Engine:
    """`client` is the worker half's; a test makes the daemon talk through it."""

    def __init__(
        self,
        model: Path,
        *,
        num_blocks: int = 64,
        window: int = 0,
        policy: str = "recompute",
        max_tokens_per_step: int = 4096,
        max_num_seqs: int = 16,
        **extra: Any,
    ) -> None:
        # What a step costs here is no measure for how old news of a daemon are.
        extra = {"recheck_s": 3600.0, **extra}
        model_config = ModelConfig(
            model=str(model), dtype="float16", seed=0, skip_tokenizer_init=True, max_model_len=8192
        )
        scheduler_config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_tokens_per_step,
            max_model_len=8192,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            disable_hybrid_kv_cache_manager=not window,
        )
        cache_config = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
        if hasattr(cache_config, "kv_cache_layout"):
            cache_config.kv_cache_layout = "LBHNC"
        self.vllm_config = VllmConfig(
            model_config=model_config,
            scheduler_config=scheduler_config,
            cache_config=cache_config,
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(
                kv_connector="KvdConnector",
                kv_role="kv_both",
                engine_id="engine-under-test",
                kv_connector_extra_config=extra,
                kv_load_failure_policy=policy,
            ),
        )
        cache_config.num_gpu_blocks = num_blocks
        init_none_hash(sha256)
        kv_config = kv_cache_config(num_blocks, window)
        self.scheduler = Scheduler(
            vllm_config=self.vllm_config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(self.vllm_config),
            block_size=BLOCK,
            log_stats=True,
        )
        assert isinstance(self.scheduler.connector, KvdConnector)
        assert self.scheduler.connector._scheduler is not None
        self.half = self.scheduler.connector._scheduler
        self.worker = KvdConnector(self.vllm_config, KVConnectorRole.WORKER, kv_config)
        assert self.worker._worker is not None
        self.client = FakeClient()
        self.worker._worker.start(
            self.client, memory_description(range(len(kv_config.kv_cache_groups)))
        )
        self.scheduler.connector.set_xfer_handshake_metadata(
            {0: self.worker.get_handshake_metadata()}
        )
        self.outputs: dict[str, Any] = {}
        """Last output of each request that gave one."""

    # --- requests ---------------------------------------------------------------------------

    def add(
        self,
        req_id: str,
        prompt: list[int],
        params: dict[str, Any] | None = None,
        *,
        max_tokens: int = 4,
        **sampling: Any,
    ) -> Request:
        sampling_params = SamplingParams(max_tokens=max_tokens, **sampling)
        sampling_params.update_from_generation_config({}, EOS)
        request = Request(
            request_id=req_id,
            prompt_token_ids=prompt,
            sampling_params=sampling_params,
            pooling_params=None,
            mm_features=None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        request.kv_transfer_params = params
        self.scheduler.add_request(request)
        return request

    def abort(self, request: Request) -> None:
        self.scheduler.finish_requests([request.request_id], RequestStatus.FINISHED_ABORTED)

    # --- steps ------------------------------------------------------------------------------

    def step(self) -> Any:
        """One step; returns the scheduler's decision. Every request that ran samples token 9."""
        decision = self.scheduler.schedule()
        metadata = decision.kv_connector_metadata
        self.worker.handle_preemptions(metadata)
        self.worker.bind_connector_metadata(metadata)
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        output = KVConnectorOutput()
        if TransferResults is None:
            sent, received = self.worker.get_finished(decision.finished_req_ids)
            output.finished_sending, output.finished_recving = sent, received
        else:
            results = self.worker.get_transfer_results(decision.finished_req_ids)
            output.finished_sending = results.finished_sending
            output.finished_recving = results.finished_recving
            output.failed_recving = results.failed_recving
        output.invalid_block_ids = self.worker.get_block_ids_with_load_errors()
        output.kv_connector_stats = self.worker.get_kv_connector_stats()
        output.kv_connector_worker_meta = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        ran = list(decision.num_scheduled_tokens)
        sampled = [[9] if self._samples(req_id) else [] for req_id in ran]
        runner_output = ModelRunnerOutput(
            req_ids=ran,
            req_id_to_index={req_id: i for i, req_id in enumerate(ran)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=None,
            kv_connector_output=output,
        )
        for outputs in self.scheduler.update_from_output(decision, runner_output).values():
            for item in outputs.outputs:
                self.outputs[item.request_id] = item
        return decision

    def _samples(self, req_id: str) -> bool:
        request = self.scheduler.requests[req_id]
        return bool(request.num_computed_tokens >= request.num_tokens)

    def run(self, steps: int = 50) -> None:
        """Step until nothing is left to do."""
        for _ in range(steps):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
        raise AssertionError(f"still not finished: {list(self.scheduler.requests)}")

    # --- looking ----------------------------------------------------------------------------

    def blocks_of(self, request: Request) -> tuple[list[int], ...]:
        ids = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return tuple(list(group) for group in ids)

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def is_empty(self) -> bool:
        """No request, no held block, nothing tracked by either half."""
        pool = self.scheduler.kv_cache_manager.block_pool
        assert self.worker._worker is not None
        reports = self.worker._worker.reports
        return (
            not self.scheduler.requests
            and pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
            and reports.receiving == reports.holding == 0
            and all(
                self.half.statistics()[name] == 0
                for name in ("held_blocks", "offers", "receiving", "planned", "waiting", "renewed")
            )
        )
