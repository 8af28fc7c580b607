"""The consumer's side of the scheduler half, with fake requests and blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector_shim.digests import PromptDigest
from connector_shim.jobs import unpack_u32
from connector_shim.readings import fetch_end
from connector_shim.scheduler import SchedulerHalf
from kvd.protocol.types import NULL_BLOCK
from tests.unit.shim.fakes import (
    DOWN,
    UP,
    Block,
    Blocks,
    Clock,
    Request,
    remote_params,
    scheduler_half,
    table,
)


def consumer(**changes: Any) -> Request:
    return Request(request_id="d-1", params=remote_params(**changes))


@given(st.integers(1, 300), st.none() | st.integers(0, 400), st.sampled_from([1, 16, 32]))
def test_a_fetch_ends_at_a_boundary_or_at_the_offers_end(
    prompt: int, remote: int | None, block_size: int
) -> None:
    end = fetch_end(prompt, remote, block_size)
    assert 0 <= end <= prompt
    assert remote is None or end <= remote
    assert end % block_size == 0 or end in (remote, prompt)
    if remote is not None and end % block_size:
        assert end == remote
    assert end > prompt - block_size or end == remote, "no whole block is left out"


@pytest.mark.parametrize(
    ("computed", "remote", "answer"),
    [
        (0, 40, (40, True)),
        (16, 40, (24, True)),
        (32, 40, (8, True)),
        (0, 39, (39, True)),
        (32, 33, (1, True)),
        (0, 41, (32, True)),
        (32, 41, (0, False)),
        (32, 32, (0, False)),
        (32, 16, (0, False)),
        (0, 0, (0, False)),
        (0, None, (40, True)),
        (20, 40, (0, False)),
    ],
)
def test_how_many_tokens(computed: int, remote: int | None, answer: tuple[int, bool]) -> None:
    half = scheduler_half()
    request = consumer(remote_num_tokens=remote)
    for _ in range(3):
        assert half.get_num_new_matched_tokens(request, computed) == answer, "asked each step"
    assert request.params["do_remote_prefill"] is True
    assert half.take_jobs().fetches == ()


def test_the_fetch_by_position() -> None:
    half = scheduler_half()
    request = consumer()
    assert half.get_num_new_matched_tokens(request, 16) == (24, True)
    # One block more than needed, as with lookahead slots.
    half.update_state_after_alloc(request, Blocks((table(5, 6, 7, 8, hashed=1),)), 24)
    assert request.params["do_remote_prefill"] is False
    (job,) = half.take_jobs().fetches
    assert (job.start, job.end, job.doomed) == (16, 40, "")
    assert unpack_u32(job.blocks[0]) == [6, 7]
    assert job.digest == PromptDigest(request.prompt).at([40])[0]
    assert (job.transfer_id, job.generation, job.engine_id) == ("t-1", 77, "engine-p")
    assert job.ranks == (((0, 0), ("10.0.0.2", 7001)),)
    half.update_state_after_alloc(request, Blocks((table(5, 6, 7, hashed=3),)), 0)
    jobs = half.take_jobs()
    assert not jobs.fetches
    assert not jobs.releases
    assert half.get_num_new_matched_tokens(request, 0) == (0, False), "asked for once only"


@pytest.mark.parametrize(
    ("req_id", "sole"),
    [
        ("cmpl-5f1e-0", True),
        ("cmpl-1_2-0", True),
        ("resp_1", True),
        ("_1", True),
        ("7", True),
        ("0_cmpl-5f1e-0", False),
        ("12_chatcmpl-5f1e", False),
    ],
)
def test_a_request_that_has_siblings_leaves_the_transfer_to_them(req_id: str, sole: bool) -> None:
    half = scheduler_half()
    request = Request(request_id=req_id, params=remote_params())
    assert half.get_num_new_matched_tokens(request, 16) == (24, True)
    half.update_state_after_alloc(request, Blocks((table(5, 6, 7, hashed=1),)), 24)
    (job,) = half.take_jobs().fetches
    assert job.sole is sole


def test_everything_that_changes_kv_is_in_the_digest() -> None:
    half = scheduler_half()
    digests = set()
    image = SimpleNamespace(identifier="i", mm_position=SimpleNamespace(offset=3))
    changes: list[dict[str, Any]] = [
        {},
        {"lora_request": SimpleNamespace(lora_name="l")},
        {"cache_salt": "s"},
        {"mm_features": [image]},
        {"prompt": [*range(39), 0]},
    ]
    for i, change in enumerate(changes):
        request = Request(request_id=f"d-{i}", params=remote_params(), **change)
        count, _ = half.get_num_new_matched_tokens(request, 0)
        half.update_state_after_alloc(request, Blocks((table(1, 2, 3),)), count or 0)
        (job,) = half.take_jobs().fetches
        digests.add(job.digest)
    assert len(digests) == 5


def test_sliding_window_blocks_by_position() -> None:
    half = scheduler_half(block_sizes=(16, 16))
    request = consumer()
    assert half.get_num_new_matched_tokens(request, 0) == (40, True)
    half.update_state_after_alloc(request, Blocks((table(1, 2, 3), table(0, 0, 4))), 40)
    (job,) = half.take_jobs().fetches
    assert [unpack_u32(t) for t in job.blocks] == [[1, 2, 3], [NULL_BLOCK, NULL_BLOCK, 4]]


def test_groups_with_other_block_sizes() -> None:
    half = scheduler_half(block_sizes=(16, 32))
    request = consumer(remote_num_tokens=None)
    assert half.get_num_new_matched_tokens(request, 32) == (8, True)
    half.update_state_after_alloc(request, Blocks((table(1, 2, 3), table(4, 5))), 8)
    (job,) = half.take_jobs().fetches
    assert [unpack_u32(t) for t in job.blocks] == [[3], [5]]


def test_fetch_ids_are_new_in_every_life() -> None:
    ids = set()
    for started in (1, 2):
        like = scheduler_half()
        half = SchedulerHalf(like.shape, like.settings, started_ns=started * 10**9)
        half.update_daemons({(0, 0): UP})
        for i in range(3):
            request = Request(request_id=f"d-{i}", params=remote_params())
            half.get_num_new_matched_tokens(request, 0)
            half.update_state_after_alloc(request, Blocks((table(1, 2, 3),)), 40)
            ids |= {job.fetch_id for job in half.take_jobs().fetches}
    assert len(ids) == 6


def test_every_rank_must_have_its_counterpart() -> None:
    half = scheduler_half(tp_size=2)
    assert half.get_num_new_matched_tokens(consumer(), 0) == (0, False)
    ours = {"v": 1, "transfer_id": "t", "ranks": [[0, 1, "b", 2], [0, 0, "a", 1]]}
    assert half.get_num_new_matched_tokens(consumer(kvd=ours), 0) == (40, True)


@pytest.mark.parametrize("num_down", [1, 2])
def test_any_daemon_down_means_prefill_here(num_down: int) -> None:
    half = scheduler_half(tp_size=2)
    ours = {"v": 1, "transfer_id": "t", "ranks": [[0, 0, "a", 1], [0, 1, "b", 2]]}
    half.update_daemons({(0, rank): DOWN for rank in range(num_down)})
    request = consumer(kvd=ours)
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    half.update_state_after_alloc(request, Blocks((table(1, 2, 3),)), 0)
    assert len(half.take_jobs().releases) == 1
    assert half.tally.counts["daemon_down"] == 1
    half.update_daemons({(0, 0): UP, (0, 1): UP})
    assert half.get_num_new_matched_tokens(consumer(kvd=ours), 0) == (40, True)


def test_nothing_is_known_of_the_daemons_yet() -> None:
    clock = Clock()
    half = scheduler_half(up=False, clock=clock)
    request = consumer()
    assert half.get_num_new_matched_tokens(request, 0) == (None, False)
    clock.now += half.settings.daemon_wait_s + 0.1
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    local = Request(request_id="local")
    assert half.get_num_new_matched_tokens(local, 0) == (0, False), "not ours, never waits"


@pytest.mark.parametrize(
    "change",
    [
        {"sampling_params": SimpleNamespace(prompt_logprobs=5)},
        {"sampling_params": None},
        {"prompt_embeds": object()},
    ],
)
def test_requests_that_need_their_prompt_computed(change: dict[str, Any]) -> None:
    half = scheduler_half()
    request = Request(params=remote_params(), **change)
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    half.update_state_after_alloc(request, Blocks((table(1, 2, 3),)), 0)
    jobs = half.take_jobs()
    assert len(jobs.releases) == 1
    assert not jobs.fetches


def test_the_engine_takes_nothing_although_it_was_promised() -> None:
    """vLLM 0.32 does so for requests that must not read a prefix cache."""
    half = scheduler_half()
    request = consumer()
    assert half.get_num_new_matched_tokens(request, 0) == (40, True)
    half.update_state_after_alloc(request, Blocks((table(1, 2, 3),)), 0)
    jobs = half.take_jobs()
    assert not jobs.fetches
    assert [(r.transfer_id, r.generation) for r in jobs.releases] == [("t-1", 77)]
    assert half.statistics()["planned"] == 0


def test_the_engine_takes_less_than_was_promised() -> None:
    half = scheduler_half()
    request = consumer()
    assert half.get_num_new_matched_tokens(request, 0) == (40, True)
    half.update_state_after_alloc(request, Blocks((table(1, 2, 3),)), 32)
    (job,) = half.take_jobs().fetches
    assert (job.start, job.end, job.doomed) == (0, 32, "")
    assert unpack_u32(job.blocks[0]) == [1, 2]
    assert job.digest == PromptDigest(request.prompt).at([32])[0]


@pytest.mark.parametrize(
    ("num_external", "blocks", "planned"),
    [
        (30, table(1, 2, 3), True),  # not at a boundary
        (56, table(1, 2, 3, 4), True),  # more than promised
        (40, table(1, 2), True),  # too few blocks
        (40, [Block(1, b"shared"), Block(2), Block(3)], True),  # a shared block would be written
        (40, table(1, 2, 3), False),  # never promised
    ],
)
def test_what_cannot_work_fails_by_the_rules(
    num_external: int, blocks: list[Block], planned: bool
) -> None:
    """The scheduler waits for the load now: it must be told, and told of bad blocks."""
    half = scheduler_half()
    request = consumer()
    if planned:
        half.get_num_new_matched_tokens(request, 0)
    half.update_state_after_alloc(request, Blocks((blocks,)), num_external)
    (job,) = half.take_jobs().fetches
    assert job.doomed
    fresh = [b.block_id for b in blocks if b.block_hash is None]
    assert unpack_u32(job.blocks[0]) == fresh
    assert request.params["do_remote_prefill"] is False


def test_all_blocks_shared_still_fails_by_the_rules() -> None:
    half = scheduler_half()
    half.update_state_after_alloc(consumer(), Blocks((table(1, 2, 3, hashed=3),)), 40)
    (job,) = half.take_jobs().fetches
    assert unpack_u32(job.blocks[0]) == [1, 2, 3]


def test_finished_before_it_had_blocks() -> None:
    half = scheduler_half()
    request = consumer()
    half.get_num_new_matched_tokens(request, 0)
    request.finish("FINISHED_ABORTED")
    assert half.request_finished(request, ([],)) == (False, None)
    jobs = half.take_jobs()
    assert (len(jobs.releases), jobs.cancels, jobs.fetches) == (1, (), ())
    assert half.statistics()["planned"] == 0
    assert half.request_finished(request, ([],)) == (False, None)
    assert half.take_jobs().releases == ()


def test_finished_while_its_fetch_runs() -> None:
    half = scheduler_half()
    request = consumer(do_remote_decode=True)
    half.get_num_new_matched_tokens(request, 0)
    half.update_state_after_alloc(request, Blocks((table(1, 2, 3),)), 40)
    half.take_jobs()
    request.finish("FINISHED_STOPPED")
    assert half.request_finished(request, ([1, 2, 3],)) == (False, None), "never held as well"
    assert half.take_jobs().cancels == ("d-1",)
    half.worker_output([], ["d-1"])
    assert half.statistics()["receiving"] == 0


def test_a_fetch_that_ended_meanwhile_is_not_cancelled() -> None:
    half = scheduler_half()
    request = consumer()
    half.get_num_new_matched_tokens(request, 0)
    half.update_state_after_alloc(request, Blocks((table(1, 2, 3),)), 40)
    half.take_jobs()
    request.finish("FINISHED_ERROR")
    half.request_finished(request, ([1, 2, 3],))
    half.worker_output([], ["d-1"])
    assert half.take_jobs().cancels == ()


def test_a_step_without_anything_has_its_own_number() -> None:
    half = scheduler_half()
    first, second = half.take_jobs(), half.take_jobs()
    assert second.seq == first.seq + 1
    assert (second.fetches, second.offers, second.cancels, second.releases) == ((), (), (), ())
    assert second.revoke_all is False


def test_reasons_are_counted_once_a_request(caplog: pytest.LogCaptureFixture) -> None:
    half = scheduler_half()
    for i in range(3):
        request = Request(request_id=f"d-{i}", params=remote_params(remote_engine_id=5))
        for _ in range(4):
            assert half.get_num_new_matched_tokens(request, 0) == (0, False)
        half.update_state_after_alloc(request, Blocks((table(1, 2, 3),)), 0)
        assert half.request_finished(request, ([1, 2, 3],)) == (False, None)
    assert dict(half.tally.counts) == {"params_bad_value": 3}
    assert sum("params_bad_value" in record.message for record in caplog.records) == 1
