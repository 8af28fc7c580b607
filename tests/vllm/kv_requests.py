"""Requests that several modules begin with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.vllm.engine import Engine

PROMPT = [10 + i for i in range(40)]
MakeEngine = Callable[..., Engine]


def fetch_of(engine: Engine) -> tuple[str, dict[str, Any]]:
    (item,) = engine.client.fetched.items()
    return item


def prefill(engine: Engine, req_id: str = "p-1", prompt: list[int] | None = None) -> Any:
    request = engine.add(req_id, prompt or PROMPT, {"do_remote_decode": True}, max_tokens=1)
    engine.run()
    return request
