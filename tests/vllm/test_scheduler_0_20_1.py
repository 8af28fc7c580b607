"""Our modules against the real scheduler of vLLM 0.20.1.

The oldest supported version cannot be installed beside the current one, but its Python part runs:
a process of its own gets it from the unpacked wheel.
"""

from __future__ import annotations

import re

import pytest

from tests.vllm.fetch_sources import OLD_VERSION
from tests.vllm.own_processes import Runs, said

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_life_cycles_on_the_oldest_version(own_processes: Runs) -> None:
    done = own_processes.oldest
    output = said(done)
    assert f"\n{OLD_VERSION}\n" in f"\n{done.stdout}", output
    assert done.returncode == 0, output
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, output
    assert int(passed[1]) >= 57, output
    # What is left out is what that version cannot do, and nothing else.
    skipped = [int(n) for n in re.findall(r"SKIPPED \[(\d+)\].*several groups", done.stdout)]
    assert sum(skipped) == len(re.findall(r"s(?=[.s]*\s*\[100%\])", done.stdout)) == 6, output
