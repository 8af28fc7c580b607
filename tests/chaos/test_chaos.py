"""A short run of the fault suite over each transport; `make chaos` runs longer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("KVDTEST_CHAOS_SECONDS", "20"))


@pytest.mark.chaos
@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_engines_are_told_is_true_whatever_fails(transport: str) -> None:
    """The driver goes on past its time until it has seen enough, so a slow machine sees as much."""
    run = subprocess.run(
        [
            sys.executable, "-m", "tests.chaos.driver",
            "--seconds", str(SECONDS), "--at-most", "120", "--transports", transport,
            "--transfers", "60", "--faults", "4", "--hits", "4", "--logs",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )  # fmt: skip
    print(run.stdout)  # shown when it fails: the seed is in it
    first, last = run.stdout.rindex("\n{\n"), run.stdout.rindex("\n}\n")
    result = json.loads(run.stdout[first : last + 2])
    assert [what[:300] for what in result["violations"]] == []
    assert result["short"] == []
    assert run.returncode == 0
