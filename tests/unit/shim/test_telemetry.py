"""Counts that travel through vLLM: sums are right, and nothing that arrives can raise."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from connector_shim.telemetry import MAX_SECONDS, Telemetry, empty, is_empty, merge, summary
from kvd.protocol.codes import Code

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["fetches", "offers", "nbytes", "tokens", "seconds", "ok"]),
                      inner),
    max_leaves=10,
)  # fmt: skip


def test_counting() -> None:
    telemetry = Telemetry()
    assert telemetry.take() is None
    telemetry.fetch_ended(Code.OK, 100, 16, 0.5)
    telemetry.fetch_ended(Code.PEER_LOST, 50, 8, 0.1)
    telemetry.fetch_ended("something else")
    telemetry.offer_ended(Code.EXPIRED)
    data = telemetry.take()
    assert data == {
        "fetches": {"ok": 1, "peer_lost": 1, "other": 1},
        "offers": {"expired": 1},
        "nbytes": 100,
        "tokens": 16,
        "seconds": [0.5],
    }
    assert json.loads(json.dumps(data)) == data
    assert telemetry.take() is None


def test_sums() -> None:
    a, b = Telemetry(), Telemetry()
    a.fetch_ended(Code.OK, 1, 2, 0.3)
    b.fetch_ended(Code.OK, 10, 20, 0.1)
    b.fetch_ended(Code.FENCED)
    total = merge(merge(empty(), a.take()), b.take())
    assert total["fetches"] == {"ok": 2, "fenced": 1}
    assert (total["nbytes"], total["tokens"], total["seconds"]) == (11, 22, [0.3, 0.1])
    line = summary(total)
    assert (line["Fetches"], line["Failed fetches"]) == (2, 1)
    assert line["Avg fetch (ms)"] == 200.0
    assert summary(empty())["Avg fetch (ms)"] == 0


def test_durations_are_bounded() -> None:
    telemetry = Telemetry()
    for _ in range(MAX_SECONDS + 10):
        telemetry.fetch_ended(Code.OK, 1, 1, 0.1)
    data = telemetry.take()
    assert data is not None
    assert len(data["seconds"]) == MAX_SECONDS
    assert data["fetches"]["ok"] == MAX_SECONDS + 10
    assert len(merge(data, data)["seconds"]) == MAX_SECONDS


@given(junk)
def test_junk_does_no_harm(other: Any) -> None:
    mine = merge(empty(), {"fetches": {"ok": 2}, "nbytes": 5, "seconds": [0.5]})
    total = merge(mine, other)
    assert total["fetches"]["ok"] >= 2
    assert total["nbytes"] >= 5
    assert total["seconds"][0] == 0.5
    assert all(isinstance(n, int) and n >= 0 for n in total["fetches"].values())
    assert not is_empty(total)
    assert json.loads(json.dumps(summary(total), allow_nan=True)) is not None
