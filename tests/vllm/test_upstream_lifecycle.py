"""vLLM 0.32.0's own tests of remote prefill and remote decode, with `KvdConnector` in place.

They come out of vLLM's source archive at run time and run in a process of their own.
"""

from __future__ import annotations

import re

import pytest

from tests.vllm.own_processes import Runs, said

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_vllms_own_lifecycle_tests_pass(own_processes: Runs) -> None:
    done = own_processes.upstream
    output = said(done)
    assert done.returncode == 0, output
    built = re.search(r"KvdConnector was built (\d+) times", done.stdout)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert built, output
    assert passed, output
    # Every one of them drove a scheduler with our connector in it, and none was skipped.
    assert int(built[1]) >= int(passed[1]) >= 12, output
    assert "skipped" not in done.stdout, output
