"""The producer's side of the scheduler half."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_shim.jobs import unpack_u32
from connector_shim.params import parse_remote_prefill
from connector_shim.scheduler import SchedulerHalf
from kvd.protocol.types import NULL_BLOCK
from tests.unit.shim.fakes import DOWN, UP, Blocks, Request, scheduler_half, table


def producer(**changes: Any) -> Request:
    request = Request(**{"request_id": "p-1", "params": {"do_remote_decode": True}, **changes})
    request.finish()
    return request


def test_what_is_offered_and_what_is_answered() -> None:
    half = scheduler_half()
    held, params = half.request_finished(producer(), ([5, 6, 7],))
    assert held is True
    assert params is not None
    (job,) = half.take_jobs().offers
    assert (job.req_id, job.transfer_id, job.tokens) == ("p-1", "p-1", 40)
    assert unpack_u32(job.blocks[0]) == [5, 6, 7]
    assert unpack_u32(job.positions) == [16, 32, 40]
    assert len(job.digests) == 48
    assert params["remote_block_ids"] == [[5, 6, 7]]
    assert params["remote_engine_id"] == "engine-d"
    read = parse_remote_prefill(params)
    assert (read.transfer_id, read.generation, read.num_tokens) == ("p-1", job.generation, 40)
    assert half.statistics()["held_blocks"] == 3


def test_lookahead_blocks_are_left_out() -> None:
    half = scheduler_half()
    half.request_finished(producer(), ([5, 6, 7, 8, 9],))
    (job,) = half.take_jobs().offers
    assert unpack_u32(job.blocks[0]) == [5, 6, 7]
    assert half.statistics()["held_blocks"] == 3


def test_what_a_sliding_window_left_behind() -> None:
    half = scheduler_half(block_sizes=(16, 16))
    _, params = half.request_finished(producer(), ([5, 6, 7], [0, 0, 8]))
    (job,) = half.take_jobs().offers
    assert unpack_u32(job.blocks[1]) == [NULL_BLOCK, NULL_BLOCK, 8]
    assert half.statistics()["held_blocks"] == 4
    assert params is not None
    assert params["remote_block_ids"] == [[5, 6, 7], [0, 0, 8]]


@pytest.mark.parametrize(
    ("output", "computed", "tokens"),
    [([1], 40, 40), ([1, 2, 3], 42, 42), ([1, 2, 3], 45, 42), ([], 40, 40), ([1], 17, 17)],
)
def test_only_tokens_that_have_kv(output: list[int], computed: int, tokens: int) -> None:
    half = scheduler_half()
    request = producer()
    request.output, request.num_computed_tokens = output, computed
    half.request_finished(request, ([5, 6, 7],))
    (job,) = half.take_jobs().offers
    assert job.tokens == tokens
    assert unpack_u32(job.positions)[-1] == tokens


@pytest.mark.parametrize(
    "status",
    ["FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_IGNORED", "RUNNING", "PREEMPTED", "WAITING"],
)
def test_other_ends_offer_nothing(status: str) -> None:
    half = scheduler_half()
    request = producer()
    request.status = SimpleNamespace(name=status)
    assert half.request_finished(request, ([5, 6, 7],)) == (False, None)
    assert half.take_jobs().offers == ()


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        ({"params": None}, [5, 6, 7]),
        ({"params": {}}, [5, 6, 7]),
        ({"params": {"do_remote_decode": False}}, [5, 6, 7]),
        ({"params": {"do_remote_decode": "yes"}}, [5, 6, 7]),
        ({"params": [1]}, [5, 6, 7]),
        ({"prompt_embeds": object()}, [5, 6, 7]),
        ({}, []),
        ({}, [5, 6]),
    ],
)
def test_not_offered(changes: dict[str, Any], blocks: list[int]) -> None:
    half = scheduler_half()
    assert half.request_finished(producer(**changes), (blocks,)) == (False, None)
    assert half.take_jobs().offers == ()


def test_prompt_logprobs_do_not_matter_here() -> None:
    half = scheduler_half()
    request = producer(sampling_params=SimpleNamespace(prompt_logprobs=1))
    assert half.request_finished(request, ([5, 6, 7],))[0] is True


def test_any_daemon_down_offers_nothing() -> None:
    half = scheduler_half(tp_size=2)
    half.update_daemons({(0, 1): DOWN})
    assert half.request_finished(producer(), ([5, 6, 7],)) == (False, None)
    half.update_daemons({(0, 1): UP})
    _, params = half.request_finished(producer(), ([5, 6, 7],))
    assert params is not None
    assert len(params["kvd"]["ranks"]) == 2


def test_a_producer_asks_for_fresh_news_before_it_prefills() -> None:
    half = scheduler_half(up=False)
    request = Request(params={"do_remote_decode": True})
    assert half.get_num_new_matched_tokens(request, 0) == (None, False)
    half.update_daemons({(0, 0): DOWN})
    assert half.get_num_new_matched_tokens(request, 0) == (0, False), "it serves without"


def test_the_routers_name_is_kept() -> None:
    half = scheduler_half()
    params = {"do_remote_decode": True, "transfer_id": "router-9"}
    _, answer = half.request_finished(producer(params=params), ([5, 6, 7],))
    assert answer is not None
    assert answer["transfer_id"] == answer["kvd"]["transfer_id"] == "router-9"


def test_generations_only_grow_also_over_a_restart() -> None:
    seen = []
    for started_s in (10, 11):
        half = SchedulerHalf(
            scheduler_half().shape, scheduler_half().settings, started_ns=started_s * 10**9
        )
        half.update_daemons({(0, 0): UP})
        for i in range(50):
            half.request_finished(producer(request_id=f"p-{i}"), ([1, 2, 3],))
            seen += [job.generation for job in half.take_jobs().offers]
            half.worker_output([f"p-{i}"], [])
    assert seen == sorted(set(seen))
    assert len(seen) == 100


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=30),
    st.floats(0, 1),
    st.lists(st.integers(0, 29), max_size=30),
)
def test_no_more_is_held_than_allowed(sizes: list[int], fraction: float, ended: list[int]) -> None:
    half = scheduler_half(num_blocks=40, max_held_fraction=fraction)
    held: dict[str, int] = {}
    for i, size in enumerate(sizes):
        request = producer(request_id=f"p-{i}", prompt=list(range(size * 16)))
        kept, _ = half.request_finished(request, (list(range(1, size + 1)),))
        assert kept == (sum(held.values()) + size <= fraction * 40)
        if kept:
            held[f"p-{i}"] = size
        if i < len(ended):
            done = f"p-{ended[i]}"
            half.worker_output([done], [])
            held.pop(done, None)
        assert half.statistics()["held_blocks"] == sum(held.values()) <= fraction * 40


def test_reset_cache_reaches_the_workers_once() -> None:
    half = scheduler_half()
    half.request_finished(producer(), ([1, 2, 3],))
    assert half.reset_cache() is True
    jobs = half.take_jobs()
    assert jobs.revoke_all is True
    assert len(jobs.offers) == 1
    assert half.take_jobs().revoke_all is False


def test_a_request_that_received_and_is_then_offered() -> None:
    """Chained: decode of one hop is prefill of the next."""
    half = scheduler_half()
    from tests.unit.shim.fakes import remote_params

    request = Request(request_id="x", params=remote_params(do_remote_decode=True))
    assert half.get_num_new_matched_tokens(request, 0) == (40, True)
    half.update_state_after_alloc(request, Blocks((table(1, 2, 3),)), 40)
    half.worker_output([], ["x"])
    request.finish()
    held, params = half.request_finished(request, ([1, 2, 3],))
    assert held is True
    assert params is not None
    assert params["transfer_id"] == "t-1"
