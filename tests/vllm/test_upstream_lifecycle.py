"""vLLM 0.32.0's own tests of remote prefill and remote decode, with `KvdConnector` in place.

They come out of vLLM's source archive at run time and run in a process of their own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.vllm.fetch_sources import SOURCE_VERSION, vllm_source
from tests.vllm.models import write_tiny_llama

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

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


def test_vllms_own_lifecycle_tests_pass(tmp_path: Path) -> None:
    unpack(vllm_source(), tmp_path / "upstream")
    model = write_tiny_llama(tmp_path / "model")
    here = Path(__file__).parent
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])]),
        "KVD_TEST_MODEL": str(model),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        # vLLM would otherwise run the entry point of an installed kvd a second time.
        "VLLM_PLUGINS": "",
    }
    command = [
        sys.executable, "-m", "pytest", "-q", "-ra", "-p", "upstream_plugin",
        "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".", "--import-mode", "prepend",
        "--deselect", NOT_OURS, *(f"{UNIT}/{name}" for name in TESTS),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path / "upstream", env=env, capture_output=True, text=True,
        timeout=540, check=False,
    )  # fmt: skip
    output = done.stdout[-8000:] + done.stderr[-2000:]
    assert done.returncode == 0, output
    built = re.search(r"KvdConnector was built (\d+) times", done.stdout)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert built, output
    assert passed, output
    # Every one of them drove a scheduler with our connector in it, and none was skipped.
    assert int(built[1]) >= int(passed[1]) >= 12, output
    assert "skipped" not in done.stdout, output
