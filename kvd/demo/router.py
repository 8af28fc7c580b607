"""Starts vllm-router in front of the two engines, in the mode that speaks NIXL's parameters."""

from __future__ import annotations

import sys
from pathlib import Path

from kvd.demo.processes import LOCAL_ONLY, Child, Children

LAUNCH = "from vllm_router.launch_router import main; main()"


def start_router(
    children: Children,
    *,
    prefill: str,
    decode: str,
    port: int,
    metrics_port: int,
    folder: Path,
) -> Child:
    """Start the router between two servers that are up (it waits for their health by itself).

    Raises OSError.
    """
    argv = [sys.executable, "-c", LAUNCH]
    argv += ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    argv += ["--prefill", prefill, "--decode", decode, "--policy", "round_robin"]
    argv += ["--host", "127.0.0.1", "--port", str(port)]
    argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    argv += ["--worker-startup-check-interval", "1", "--log-level", "info"]
    # A retried request would move its KV twice and hide an error: the demo shows what happens.
    argv += ["--disable-retries", "--disable-circuit-breaker"]
    return children.start("router", argv, log=folder / "router.log", env=LOCAL_ONLY, grace_s=5.0)
