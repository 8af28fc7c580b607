"""Requests that wait in decode's queue keep prefill's leases; nothing else does."""

from __future__ import annotations

from typing import Any

import pytest

from connector_shim import renewals
from connector_shim.jobs import RenewJob
from tests.unit.shim.fakes import Blocks, Clock, Request, remote_params, scheduler_half, table
from tests.unit.shim.test_worker import Bench


def waiting(req_id: str = "d-1", lease_s: Any = 9.0, **changes: Any) -> Request:
    params = remote_params(**changes)
    if "kvd" in params and lease_s is not None:
        params["kvd"] = {**params["kvd"], "lease_s": lease_s}
    return Request(request_id=req_id, params=params)


def renewed(half: Any) -> list[str]:
    return [job.transfer_id for job in half.take_jobs().renews]


def test_a_request_that_waits_is_renewed_three_times_a_lease() -> None:
    clock = Clock()
    half = scheduler_half(clock=clock)
    half.on_new_request(waiting())
    assert renewed(half) == [], "its lease has only begun"
    counts = []
    for _ in range(9):
        clock.now += 1.0
        counts.append(len(renewed(half)))
    assert counts == [0, 0, 1, 0, 0, 1, 0, 0, 1]
    clock.now += 100.0
    assert renewed(half) == ["t-1"], "what was missed is not made up for"


def test_the_job_says_whom_to_tell_what() -> None:
    clock = Clock()
    half = scheduler_half(clock=clock)
    half.on_new_request(waiting())
    clock.now += 3.0
    (job,) = half.take_jobs().renews
    assert job == RenewJob("t-1", 77, "engine-p", (((0, 0), ("10.0.0.2", 7001)),), None)


def test_a_transfer_for_which_others_wait_is_left_to_them() -> None:
    half = scheduler_half()
    requests = [waiting(f"cmpl-x-{i}") for i in range(3)]
    for request in requests:
        half.on_new_request(request)
    soles = []
    for request in requests:
        assert half.get_num_new_matched_tokens(request, 0) == (40, True)
        half.update_state_after_alloc(request, Blocks((table(5, 6, 7),)), 40)
        (job,) = half.take_jobs().fetches
        soles.append(job.sole)
    assert soles == [False, False, True]
    # Of another transfer, or another engine's, they may be as many as they like.
    half.on_new_request(waiting("other", remote_engine_id="engine-q"))
    half.on_new_request(waiting("late"))
    last = waiting("last")
    half.on_new_request(last)
    half.request_finished(Request(request_id="late", params={}), ())
    half.get_num_new_matched_tokens(last, 0)
    half.update_state_after_alloc(last, Blocks((table(5, 6, 7),)), 40)
    (job,) = half.take_jobs().fetches
    assert job.sole


def test_a_producer_that_names_no_lease_has_ours() -> None:
    clock = Clock()
    half = scheduler_half(clock=clock, lease_s=6.0)
    half.on_new_request(waiting(lease_s=None))
    clock.now += 1.9
    assert renewed(half) == []
    clock.now += 0.1
    assert renewed(half) == ["t-1"]


@pytest.mark.parametrize("end", ["blocks", "nothing to load", "abort"])
def test_it_ends_with_the_waiting(end: str) -> None:
    clock = Clock()
    half = scheduler_half(clock=clock)
    request = waiting()
    half.on_new_request(request)
    if end == "abort":
        request.finish("FINISHED_ABORTED")
        half.request_finished(request, ([],))
    else:
        assert half.get_num_new_matched_tokens(request, 0) == (40, True)
        half.update_state_after_alloc(
            request, Blocks((table(1, 2, 3),)), 40 if end == "blocks" else 0
        )
    clock.now += 100.0
    assert renewed(half) == []
    assert half.statistics()["renewed"] == 0


def test_a_vllm_that_tells_of_no_arrival_is_enough_once_it_asks() -> None:
    clock = Clock()
    half = scheduler_half(clock=clock)
    request = waiting()
    for _ in range(3):  # no blocks to be had, so it asks again
        half.get_num_new_matched_tokens(request, 0)
    clock.now += 3.0
    assert renewed(half) == ["t-1"]


@pytest.mark.parametrize(
    "params",
    [None, {}, "text", {"do_remote_prefill": "yes"}, {"do_remote_prefill": True},
     {"do_remote_decode": True},
     remote_params(kvd={"v": 1, "transfer_id": "t", "ranks": [], "lease_s": "long"})],
)  # fmt: skip
def test_what_is_no_fetch_is_not_renewed(params: Any) -> None:
    clock = Clock()
    half = scheduler_half(clock=clock)
    half.on_new_request(Request(params=params))
    clock.now += 1000.0
    assert renewed(half) == []


def test_a_request_that_breaks_is_served_without(monkeypatch: pytest.MonkeyPatch) -> None:
    half = scheduler_half()
    half.on_new_request(object())
    assert half.statistics()["noted_internal"] == 1


@pytest.mark.parametrize("lease", [1e-300, 0.2])
def test_a_lease_of_no_time_does_not_fill_a_step(lease: float) -> None:
    clock = Clock()
    half = scheduler_half(clock=clock)
    half.on_new_request(waiting(lease_s=lease))
    clock.now += 0.1
    assert renewed(half) == ["t-1"]
    assert renewed(half) == []


def test_a_long_queue_is_renewed_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewals, "MAX_AT_ONCE", 10)
    clock = Clock()
    half = scheduler_half(clock=clock)
    for i in range(25):
        half.on_new_request(waiting(f"d-{i}"))
    clock.now += 3.0
    assert [len(renewed(half)) for _ in range(4)] == [10, 10, 5, 0]


def test_a_worker_tells_its_own_ranks_daemon() -> None:
    bench = Bench().start()
    job = RenewJob("t", 7, "e", (((0, 0), ("10.0.0.2", 7001)), ((0, 1), ("10.0.0.3", 7002))))
    bench.step(renews=(job,))
    ((name, transfer, remote, engine, generation),) = bench.client.calls[1:]
    assert (name, transfer, engine, generation) == ("renew", "t", "e", 7)
    assert (remote.host, remote.port) == ("10.0.0.2", 7001)
    bench.client.state = "down"
    bench.step(renews=(job,))
    assert bench.worker.tally.counts == {"renew_not_sent": 1}
