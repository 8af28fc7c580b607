"""kv_transfer_params: what is understood, and that nothing else does harm."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_shim.params import (
    ParamsError,
    offer_params,
    parse_remote_prefill,
    wanted_transfer_id,
    wants,
)
from tests.unit.shim.fakes import Blocks as FakeBlocks
from tests.unit.shim.fakes import Request, remote_params, scheduler_half, table

KINDS = {
    "not_a_mapping", "bad_flag", "bad_extension", "bad_version", "bad_ranks", "bad_value",
    "missing_key", "no_transfer_id",
}  # fmt: skip

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=4)
    | st.sampled_from([2**63, 2**200, -1, "", "\ud800", "x" * 600, 0.5])
)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def test_round_trip() -> None:
    ranks = {(0, 0): ("10.0.0.1", 7000), (0, 1): ("fe80::1", 7001)}
    made = offer_params(
        transfer_id="t",
        generation=5,
        request_id="r",
        engine_id="e",
        tokens=40,
        block_ids=[[1, 2, 3]],
        ranks=ranks,
        tp_size=2,
        lease_s=12.5,
    )
    read = parse_remote_prefill(json.loads(json.dumps(made)))
    assert (read.transfer_id, read.generation, read.engine_id, read.num_tokens) == ("t", 5, "e", 40)
    assert dict(read.ranks) == ranks
    assert (made["remote_host"], made["remote_port"]) == ("10.0.0.1", 7000)
    assert made["do_remote_prefill"] is True
    assert read.lease_s == 12.5


def test_without_our_key_nixls_are_enough() -> None:
    params = remote_params()
    del params["kvd"], params["transfer_id"]
    read = parse_remote_prefill(params)
    assert (read.transfer_id, read.generation) == ("cmpl-1-abc", None)
    assert read.ranks == (((0, 0), ("10.0.0.2", 7001)),)
    del params["remote_num_tokens"]
    assert parse_remote_prefill(params).num_tokens is None


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"kvd": "x"}, "bad_extension"),
        ({"kvd": {"v": 2}}, "bad_version"),
        ({"kvd": {"v": True}}, "bad_version"),
        ({"kvd": {"v": 1}}, "missing_key"),
        ({"kvd": {"v": 1, "transfer_id": "t", "ranks": []}}, "bad_ranks"),
        ({"kvd": {"v": 1, "transfer_id": "t", "ranks": [[0, 0, "h", 0]]}}, "bad_value"),
        ({"kvd": {"v": 1, "transfer_id": "t", "ranks": [[0, 0, "h", True]]}}, "bad_value"),
        (
            {"kvd": {"v": 1, "transfer_id": "t", "ranks": [[0, 0, "h", 1], [0, 0, "h", 2]]}},
            "bad_ranks",
        ),
        ({"remote_engine_id": None}, "missing_key"),
        ({"remote_engine_id": 7}, "bad_value"),
        ({"remote_num_tokens": -1}, "bad_value"),
        ({"remote_num_tokens": True}, "bad_value"),
        ({"remote_num_tokens": 2**63}, "bad_value"),
        ({"kvd": None, "remote_port": 70000}, "bad_value"),
        ({"kvd": None, "remote_port": "7001"}, "bad_value"),
        ({"kvd": None, "remote_host": "\ud800"}, "bad_value"),
        ({"kvd": None, "transfer_id": "", "remote_request_id": None}, "no_transfer_id"),
        ({"kvd": None, "transfer_id": "x" * 513}, "bad_value"),
    ],
)
def test_refused_by_kind(change: dict[str, Any], kind: str) -> None:
    with pytest.raises(ParamsError) as caught:
        parse_remote_prefill(remote_params(**change))
    assert caught.value.kind == kind
    assert len(str(caught.value)) < 200, "a hostile value must not flood the log"


@pytest.mark.parametrize(
    ("params", "result"),
    [(None, False), ({}, False), ({"f": None}, False), ({"f": False}, False), ({"f": True}, True)],
)
def test_flags(params: object, result: bool) -> None:
    assert wants(params, "f") is result


@pytest.mark.parametrize("params", ["f", ["f"], {"f": 1}, {"f": "true"}, {"f": [True]}, 3])
def test_flags_of_another_type(params: object) -> None:
    with pytest.raises(ParamsError):
        wants(params, "f")


@pytest.mark.parametrize(
    ("given_id", "result"),
    [(None, "own"), ("", "own"), ("router-1", "router-1"), (5, "own"), ("x" * 600, "own")],
)
def test_transfer_id_of_the_router(given_id: object, result: str) -> None:
    assert wanted_transfer_id({"transfer_id": given_id}, "own") == result


@given(st.dictionaries(st.sampled_from([*remote_params(), *remote_params()["kvd"]]), anything))
def test_nothing_but_params_errors(params: dict[str, Any]) -> None:
    kind, read = "", None
    try:
        read = parse_remote_prefill(params)
    except ParamsError as error:
        kind = error.kind
    if read is None:
        assert kind in KINDS
    else:
        assert 1 <= len(read.transfer_id) <= 512
        assert all(1 <= port <= 65535 and host for _, (host, port) in read.ranks)


@given(
    params=st.builds(
        lambda whole, keys, value: value if whole else {**remote_params(), **keys},
        st.booleans(),
        st.dictionaries(st.sampled_from([*remote_params(), "do_remote_decode"]), anything),
        anything,
    ),
    computed=st.sampled_from([0, 16, 32]),
)
def test_a_request_never_harms_the_scheduler(params: Any, computed: int) -> None:
    """Whatever the params are: an answer of the right form, at most one fetch, clean at the end."""
    half = scheduler_half()
    request = Request(params=params)
    count, is_async = half.get_num_new_matched_tokens(request, computed)
    assert isinstance(count, int)
    assert is_async == (count > 0)
    assert computed + count <= request.num_tokens
    blocks = FakeBlocks((table(1, 2, 3, hashed=computed // 16),))
    half.update_state_after_alloc(request, blocks, count)
    half.update_state_after_alloc(request, blocks, 0)
    jobs = half.take_jobs()
    assert len(jobs.fetches) == (1 if count else 0)
    assert not any(job.doomed for job in jobs.fetches)
    half.worker_output([], [job.req_id for job in jobs.fetches])
    request.finish()
    held, answer = half.request_finished(request, ([1, 2, 3],))
    assert held == (answer is not None) == bool(half.take_jobs().offers)
    half.worker_output([request.request_id] if held else [], [])
    gauges = half.statistics()
    assert all(gauges[n] == 0 for n in ("held_blocks", "offers", "receiving", "planned", "waiting"))
