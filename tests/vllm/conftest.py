"""Engines with a real scheduler, for the modules that say what those engines are like."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.engine import Engine
from tests.vllm.kv_requests import MakeEngine
from tests.vllm.models import write_tiny_llama
from tests.vllm.own_processes import Runs, run_both


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make(model: Path) -> MakeEngine:
    """Engines that offer KV after prefill; test_streaming.py has the others."""
    return lambda **options: Engine(model, **{"send_type": "get", **options})


@pytest.fixture(scope="session")
def own_processes(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return run_both(tmp_path_factory.mktemp("own-processes"))
