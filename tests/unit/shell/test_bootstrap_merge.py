"""Answers of other ranks' daemons are added to our own, and are not trusted to be well formed."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.peers.bootstrap import merge


def own() -> dict[str, Any]:
    return {"0": {"engine_id": "e", "worker_addr": {"0": {"0": "tcp://a:1"}}}}


def entry(engine_id: str, **ranks: dict[str, str]) -> dict[str, Any]:
    return {"engine_id": engine_id, "worker_addr": {key[1:]: value for key, value in ranks.items()}}


def test_ranks_are_added_and_ours_stand() -> None:
    told = [
        {"0": entry("e", t1={"0": "tcp://b:1"}), "1": entry("f", t0={"0": "tcp://c:1"})},
        {"0": entry("e", t0={"0": "tcp://liar:1", "1": "tcp://d:1"})},
        {"0": entry("another", t2={"0": "tcp://x:1"})},
    ]
    assert merge(own(), told) == {
        "0": entry("e", t0={"0": "tcp://a:1", "1": "tcp://d:1"}, t1={"0": "tcp://b:1"}),
        "1": entry("f", t0={"0": "tcp://c:1"}),
    }


@pytest.mark.parametrize(
    "told", [None, [], "text", {"0": None}, {"0": {}}, {"0": {"engine_id": "e"}},
             {"0": {"engine_id": "e", "worker_addr": 5}},
             {"0": {"engine_id": "e", "worker_addr": {"0": None}}},
             {"0": {"engine_id": "e", "worker_addr": {"0": ["x"]}}}],
)  # fmt: skip
def test_nonsense_adds_nothing(told: Any) -> None:
    assert merge(own(), [told]) == own()
