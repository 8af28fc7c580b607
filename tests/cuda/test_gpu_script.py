"""tests/gpu/run.sh: what it says without a GPU, and that its processes work, over the fakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cuda.test_without_gpu import no_gpu

ROOT = Path(__file__).parents[2]


def script(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "tests/gpu/run.sh"), *arguments],
        env={**os.environ, "PYTHON": sys.executable, **env},
        capture_output=True,
        text=True,
        timeout=150,
        cwd="/",
    )


@no_gpu
def test_without_a_gpu_it_is_skipped_and_never_good() -> None:
    ran = script()
    assert ran.returncode == 77
    lines = (ran.stdout + ran.stderr).strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("skipped: no GPU here (")


def test_its_rows_work_over_the_fakes() -> None:
    ran = script("VMM", KVD_TEST_FAKE_GPU="1")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "result: 1 of 1 rows are good" in ran.stdout


def test_a_row_that_cannot_be_run_is_not_good() -> None:
    ran = script("fences", KVD_TEST_FAKE_GPU="1")
    assert ran.returncode == 1
    assert "result: 0 of 1 rows are good" in ran.stdout
