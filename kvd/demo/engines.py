"""Starts the two vLLM servers of the demo, and reads what they count."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvd.demo.client import Client, Metrics, total
from kvd.demo.model import ModelShape
from kvd.demo.processes import LOCAL_ONLY, Child, Children

MODEL = "demo"
BLOCK_SIZE = 32
CHUNK = 128
STREAM_CHUNK = 64
STREAM_LONG = 512
"""Where KV moves while prefill computes, long prompts take many small steps: on a small machine the
two engines hear of a request up to 0.1 s apart, while this model takes 0.02 s for a step."""
KV_BYTES = 64 * 2**20
MAX_MODEL_LEN = 2048

Policy = Literal["recompute", "fail"]

ENVIRONMENT = {
    # Two engines share a small machine: one thread each, none pinned to a core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Nothing is looked for or told outside this machine.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "INFO",
    **LOCAL_ONLY,
}


@dataclass(slots=True)
class Engine:
    """One running vLLM server."""

    name: str
    child: Child
    port: int
    socket: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def metrics_url(self) -> str:
        return f"{self.url}/metrics"


def start_engine(
    children: Children,
    name: Literal["prefill", "decode"],
    *,
    model: Path,
    folder: Path,
    port: int,
    socket: Path,
    policy: Policy,
    chunk: int = CHUNK,
) -> Engine:
    """Start a server that offers (prefill) or fetches (decode) KV through the daemon at `socket`.

    `chunk`: the most tokens that one step of it computes.

    Raises OSError.
    """
    transfer = {
        "kv_connector": "KvdConnector",
        "kv_connector_module_path": "connector_shim.connector",
        "kv_role": "kv_producer" if name == "prefill" else "kv_consumer",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"socket": str(socket)},
    }
    # `vllm serve` does not find its own package's metadata in the CPU build; this is what it runs.
    argv = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", str(model), "--served-model-name", MODEL]
    argv += ["--host", "127.0.0.1", "--port", str(port)]
    argv += ["--dtype", "float32", "--enforce-eager", "--seed", "0"]
    argv += ["--block-size", str(BLOCK_SIZE), "--kv-cache-memory-bytes", str(KV_BYTES)]
    argv += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "8"]
    # Small steps, so that a long prompt takes several and has blocks out before its last one.
    argv += ["--max-num-batched-tokens", str(chunk)]
    argv += ["--kv-transfer-config", json.dumps(transfer)]
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    child = children.start(
        f"{name} engine",
        argv,
        log=folder / f"{name}-engine.log",
        env={**ENVIRONMENT, "TMPDIR": str(temporary)},
        grace_s=20.0,
    )
    return Engine(name, child, port, socket)


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """vLLM's own counters, in tokens; `external_hits` are those that a KV connector brought."""

    prompt: float
    local_hits: float
    external_hits: float

    def __sub__(self, earlier: EngineCounts) -> EngineCounts:
        return EngineCounts(
            self.prompt - earlier.prompt,
            self.local_hits - earlier.local_hits,
            self.external_hits - earlier.external_hits,
        )


async def engine_counts(client: Client, engine: Engine) -> EngineCounts:
    """Read the counters now. Raises DemoError."""
    metrics = await client.metrics(engine.metrics_url)
    return EngineCounts(
        total(metrics, "vllm:prompt_tokens_total"),
        total(metrics, "vllm:prefix_cache_hits_total"),
        total(metrics, "vllm:external_prefix_cache_hits_total"),
    )


def running(metrics: Metrics) -> float:
    """Requests that the engine has not finished."""
    return total(metrics, "vllm:num_requests_running") + total(metrics, "vllm:num_requests_waiting")


def block_nbytes(shape: ModelShape) -> int:
    """Bytes that one block of the demo's engines takes over all layers."""
    return shape.kv_block_nbytes(BLOCK_SIZE)
