"""Starts vllm-router in front of the two engines, with NIXL's parameters or with Mooncake's."""

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
    bootstrap_port: int | None = None,
) -> Child:
    """Start the router between two servers that are up (it waits for their health by itself).

    With prefill's `bootstrap_port` it speaks as to Mooncake's connector. Raises OSError.
    """
    argv = [sys.executable, "-c", LAUNCH]
    argv += ["--vllm-pd-disaggregation", "--policy", "round_robin", "--decode", decode]
    if bootstrap_port is None:
        argv += ["--kv-connector", "nixl", "--prefill", prefill]
    else:
        argv += ["--kv-connector", "mooncake", "--prefill", prefill, str(bootstrap_port)]
    argv += ["--host", "127.0.0.1", "--port", str(port)]
    argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)]
    argv += ["--worker-startup-check-interval", "1", "--log-level", "info"]
    # A retried request would move its KV twice and hide an error: the demo shows what happens.
    argv += ["--disable-retries", "--disable-circuit-breaker"]
    return children.start("router", argv, log=folder / "router.log", env=LOCAL_ONLY, grace_s=5.0)
