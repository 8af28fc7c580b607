"""The modules below against the real scheduler of vLLM 0.20.1.

The oldest supported version cannot be installed beside the current one, but its Python part runs:
a process of its own gets it from the unpacked wheel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.fetch_sources import OLD_VERSION, old_vllm

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
MODULES = ("scheduler_lifecycle", "scheduler_producer", "scheduler_groups", "streaming")


def test_life_cycles_on_the_oldest_version() -> None:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(old_vllm()), str(ROOT)]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_PLUGINS": "",
    }
    version = subprocess.run(
        [sys.executable, "-c", "import vllm; print(vllm.__version__)"],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=500, check=True,
    )  # fmt: skip
    assert version.stdout.split()[-1] == OLD_VERSION

    command = [
        sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider",
        *(str(Path(__file__).with_name(f"test_{name}.py")) for name in MODULES),
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=840, check=False
    )
    output = done.stdout[-8000:] + done.stderr[-2000:]
    assert done.returncode == 0, output
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, output
    assert int(passed[1]) >= 57, output
    # What is left out is what that version cannot do, and nothing else.
    skipped = [int(n) for n in re.findall(r"SKIPPED \[(\d+)\].*several groups", done.stdout)]
    assert sum(skipped) == len(re.findall(r"s(?=[.s]*\s*\[100%\])", done.stdout)) == 6, output
