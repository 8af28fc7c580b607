"""Tests that need a process of their own: against vLLM 0.20.1, and those of vLLM 0.32.0 itself.

vLLM takes a long time to import, on one core; so both run at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.vllm.fetch_sources import SOURCE_VERSION, old_vllm, vllm_source
from tests.vllm.models import write_tiny_llama

TIMEOUT_S = 840.0
ROOT = Path(__file__).parents[2]
OLD_MODULES = ("scheduler_lifecycle", "scheduler_producer", "scheduler_groups", "streaming")
UNIT = "tests/v1/kv_connector/unit"
TESTS = ("test_remote_prefill_lifecycle.py", "test_remote_decode_lifecycle.py")
WANTED = {
    "tests/__init__.py",
    "tests/v1/__init__.py",
    "tests/v1/kv_connector/__init__.py",
    f"{UNIT}/__init__.py",
    f"{UNIT}/utils.py",
    *(f"{UNIT}/{name}" for name in TESTS),
}
NOT_OURS = f"{UNIT}/test_remote_prefill_lifecycle.py::test_p_side_chunked_prefill_mamba"
"""Patches NIXL's own scheduler module, and is about how that class cuts Mamba prompts."""


def unpack(archive: Path, target: Path) -> None:
    """Only the tests themselves: vLLM's package in the archive must not hide the installed one."""
    prefix = f"vllm-{SOURCE_VERSION}/"
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.removeprefix(prefix)
            if name in WANTED and member.isfile():
                data = tar.extractfile(member)
                assert data is not None
                path = target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data.read())
    missing = [name for name in WANTED if not (target / name).exists()]
    assert not missing, f"not in the archive: {missing}"


def run(
    arguments: list[str], cwd: Path, path: list[Path], env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Python with these folders on its path, and vLLM on one thread."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            # vLLM would otherwise run the entry point of an installed kvd a second time.
            "VLLM_PLUGINS": "",
            **(env or {}),
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def on_the_oldest_version(vllm: Path) -> subprocess.CompletedProcess[str]:
    """Our modules, with that version's Python files; says first which version was imported."""
    code = "import sys, pytest, vllm; print(vllm.__version__); sys.exit(pytest.main(sys.argv[1:]))"
    modules = [str(Path(__file__).with_name(f"test_{name}.py")) for name in OLD_MODULES]
    return run(["-c", code, "-q", "-rs", "-p", "no:cacheprovider", *modules], ROOT, [vllm, ROOT])


def upstream(archive: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """vLLM's own tests, with our connector in place of NIXL's."""
    unpack(archive, folder / "upstream")
    model = write_tiny_llama(folder / "model")
    arguments = [
        "-m", "pytest", "-q", "-ra", "-p", "upstream_plugin",
        "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".", "--import-mode", "prepend",
        "--deselect", NOT_OURS, *(f"{UNIT}/{name}" for name in TESTS),
    ]  # fmt: skip
    path = [Path(__file__).parent, ROOT]
    return run(arguments, folder / "upstream", path, {"KVD_TEST_MODEL": str(model)})


@dataclass(frozen=True)
class Runs:
    oldest: subprocess.CompletedProcess[str]
    upstream: subprocess.CompletedProcess[str]


def run_both(folder: Path) -> Runs:
    """Fetches what they need, one after the other, and runs both."""
    vllm, archive = old_vllm(), vllm_source()
    with ThreadPoolExecutor(2) as pool:
        oldest = pool.submit(on_the_oldest_version, vllm)
        theirs = pool.submit(upstream, archive, folder)
        return Runs(oldest.result(), theirs.result())


def said(run: subprocess.CompletedProcess[str]) -> str:
    """For a failure's text."""
    return run.stdout[-8000:] + run.stderr[-2000:]
