"""vLLM's own Mooncake proxy, which asks prefill and decode at the same moment.

It is an example in vLLM's source archive, not part of its package: fetched by pip at run time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from kvd.demo import pip_sdist
from kvd.demo.client import DemoError
from kvd.demo.processes import Child, Children

VERSION = "0.32.0"
MEMBER = f"vllm-{VERSION}/examples/disaggregated/mooncake_connector/mooncake_connector_proxy.py"
FETCH_S = 600.0
READY = "All prefiller instances are ready."


def fetch_proxy() -> Path:
    """The proxy's script, from the user's cache or from pip's index. Raises DemoError."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvd"
    script = base / f"mooncake_connector_proxy-{VERSION}.py"
    if script.is_file():
        return script
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base) as scratch:
        archive = Path(scratch) / "vllm.tar.gz"
        command = [sys.executable, str(Path(pip_sdist.__file__)), "vllm", VERSION, str(archive)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=FETCH_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise DemoError(f"vLLM's source archive did not arrive in {FETCH_S:g} s") from None
        if done.returncode:
            raise DemoError(
                f"vLLM's source archive, which has the proxy, cannot be had: {done.stderr[-600:]}"
            )
        json.loads(done.stdout)
        with tarfile.open(archive) as tar:
            found = tar.extractfile(MEMBER)
            if found is None:
                raise DemoError(f"vLLM's source archive has no {MEMBER}")
            part = Path(scratch) / "proxy.py"
            part.write_bytes(found.read())
        os.replace(part, script)
    return script


def start_proxy(
    children: Children,
    script: Path,
    *,
    prefill: str,
    bootstrap_port: int,
    decode: str,
    port: int,
    folder: Path,
) -> Child:
    """Start the proxy between two servers that are up. Raises OSError."""
    argv = [sys.executable, "-u", str(script), "--host", "127.0.0.1", "--port", str(port)]
    argv += ["--prefill", prefill, str(bootstrap_port), "--decode", decode]
    return children.start("router", argv, log=folder / "router.log", grace_s=5.0)
