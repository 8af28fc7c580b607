"""Both halves of the connector, driven by vLLM's real scheduler class through whole lives.

Runs on the installed vLLM, and again on 0.20.1 (see test_scheduler_0_20_1.py).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.request import RequestStatus

from connector_shim.errors import ClientError
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr
from tests.unit.shim.fakes import Clock, remote_params
from tests.vllm.engine import BLOCK
from tests.vllm.kv_requests import PROMPT, MakeEngine, fetch_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_remote_prefill(make: MakeEngine) -> None:
    engine = make()
    params = remote_params()
    request = engine.add("d-1", PROMPT, params)
    engine.step()

    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    fetch_id, fetch = fetch_of(engine)
    assert (fetch["start"], fetch["end"]) == (0, 40)
    assert fetch["blocks"] == [engine.blocks_of(request)[0][:3]]
    assert fetch["remote"] == PeerAddr("10.0.0.2", 7001)
    assert (fetch["transfer_id"], fetch["generation"]) == ("t-1", 77)
    assert params["do_remote_prefill"] is False

    engine.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.client.end_fetch(fetch_id)
    engine.step()
    decision = engine.step()
    assert decision.num_scheduled_tokens["d-1"] == 1, "only the last token is computed here"
    engine.run()
    assert len(request.output_token_ids) == 4
    assert engine.is_empty()
    assert engine.client.names().count("fetch") == 1


@pytest.mark.parametrize("n", [1, 2])
def test_the_producer_is_told_whether_siblings_fetch_too(make: MakeEngine, n: int) -> None:
    """vLLM gives a request with n > 1 to the scheduler as n requests, of which it tells no more."""
    engine = make()
    asked = SimpleNamespace(
        request_id="cmpl-12_7-0",
        external_req_id="cmpl-12_7-0",
        params=SamplingParams(n=n),
        sampling_params=SamplingParams(n=n),
    )
    parent = ParentRequest(cast(Any, asked))
    ids = [parent.get_child_info(i)[0] for i in range(n)] if n > 1 else [asked.request_id]
    for req_id in ids:
        engine.add(req_id, PROMPT, remote_params())
    engine.step()
    assert [fetch["sole"] for fetch in engine.client.fetched.values()] == [n == 1] * n


@pytest.mark.parametrize("held", [39, 40, 41, 48, 200])
def test_the_producer_holds_another_number_of_tokens(make: MakeEngine, held: int) -> None:
    engine = make()
    request = engine.add("d-1", PROMPT, remote_params(remote_num_tokens=held))
    engine.step()
    fetch_id, fetch = fetch_of(engine)
    assert fetch["end"] == {39: 39, 40: 40}.get(held, 32)
    engine.client.end_fetch(fetch_id)
    engine.step()
    decision = engine.step()
    assert decision.num_scheduled_tokens["d-1"] == {39: 1, 40: 1}.get(held, 8)
    engine.run()
    assert len(request.output_token_ids) == 4
    assert engine.is_empty()


def test_a_prefix_that_is_here_already_is_not_fetched(make: MakeEngine) -> None:
    engine = make()
    engine.add("d-0", [*PROMPT[:32], 1])
    engine.run()
    request = engine.add("d-1", PROMPT, remote_params())
    engine.step()
    fetch_id, fetch = fetch_of(engine)
    assert (fetch["start"], fetch["end"]) == (32, 40)
    assert fetch["blocks"] == [engine.blocks_of(request)[0][2:3]]
    engine.client.end_fetch(fetch_id)
    engine.run()
    assert engine.is_empty()


def test_nothing_to_fetch(make: MakeEngine) -> None:
    """Case 3: decode holds everything that the producer offers; no receive state is made."""
    engine = make()
    engine.add("d-0", PROMPT)
    engine.run()
    request = engine.add("d-1", PROMPT, remote_params(remote_num_tokens=32))
    engine.run()
    assert len(request.output_token_ids) == 4
    assert engine.client.names() == ["describe", "release"]
    assert engine.client.calls[1] == ("release", "t-1", PeerAddr("10.0.0.2", 7001), "engine-p", 77)
    assert engine.is_empty()


def test_nothing_to_fetch_and_the_release_cannot_be_sent(make: MakeEngine) -> None:
    """Case 3 again, with the producer's side unreachable: decode completes all the same."""
    engine = make()
    engine.client.raises["release"] = ClientError(Code.DAEMON_GONE, "gone")
    engine.add("d-0", PROMPT)
    engine.run()
    request = engine.add("d-1", PROMPT, remote_params(remote_num_tokens=32))
    engine.run()
    assert len(request.output_token_ids) == 4
    assert engine.worker._worker is not None
    assert engine.worker._worker.tally.counts["release_daemon_gone"] == 1
    assert engine.is_empty()


@pytest.mark.parametrize("bad", [[0], [1], [2], [0, 1, 2]])
def test_failed_fetch_is_recomputed(make: MakeEngine, bad: list[int]) -> None:
    engine = make(policy="recompute")
    request = engine.add("d-1", PROMPT, remote_params())
    engine.step()
    fetch_id, _ = fetch_of(engine)
    engine.client.end_fetch(fetch_id, Code.PEER_LOST, [bad])
    engine.step()
    decision = engine.step()
    assert decision.num_scheduled_tokens["d-1"] == 40 - bad[0] * BLOCK
    engine.run()
    assert len(request.output_token_ids) == 4
    assert engine.client.names().count("fetch") == 1, "the connector is not asked a second time"
    assert engine.is_empty()


def test_failed_fetch_with_policy_fail(make: MakeEngine) -> None:
    engine = make(policy="fail")
    request = engine.add("d-1", PROMPT, remote_params())
    other = engine.add("d-2", [5] * 20)
    engine.step()
    fetch_id, _ = fetch_of(engine)
    engine.client.end_fetch(fetch_id, Code.PEER_LOST)
    engine.run()
    assert request.status == RequestStatus.FINISHED_ERROR
    assert len(other.output_token_ids) == 4, "only the request in flight ends in an error"
    engine.step()
    assert engine.is_empty()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_no_daemon_when_the_fetch_is_to_be_made(make: MakeEngine, policy: str) -> None:
    """The daemon goes between the scheduler's decision and the worker's turn."""
    engine = make(policy=policy)
    request = engine.add("d-1", PROMPT, remote_params())
    engine.client.state = "down"
    engine.run()
    engine.step()
    if policy == "fail":
        assert request.status == RequestStatus.FINISHED_ERROR
    else:
        assert len(request.output_token_ids) == 4
    assert engine.client.names() == ["describe"]
    assert engine.is_empty()


def test_daemon_down_means_local_prefill_and_up_again_means_fetch(make: MakeEngine) -> None:
    engine = make(recheck_s=0.0)
    engine.client.state = "down"
    first = engine.add("d-1", PROMPT, remote_params())
    decision = engine.step()
    assert not decision.num_scheduled_tokens, "old news are refreshed first: one empty step"
    engine.run()
    assert len(first.output_token_ids) == 4
    assert engine.client.names() == ["describe"]

    engine.client.come_up()
    second = engine.add("d-2", [3] * 40, remote_params())
    engine.step()
    engine.half.daemons.recheck_s = 3600.0
    engine.step()
    assert second.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.client.end_fetch(fetch_of(engine)[0])
    engine.run()
    assert engine.is_empty()


def test_abort_before_it_was_scheduled(make: MakeEngine) -> None:
    engine = make()
    request = engine.add("d-1", PROMPT, remote_params())
    engine.abort(request)
    engine.step()
    assert engine.client.names() == ["describe", "release"]
    assert engine.is_empty()


def test_abort_while_the_fetch_runs(make: MakeEngine) -> None:
    engine = make()
    request = engine.add("d-1", PROMPT, remote_params())
    engine.step()
    fetch_id, _ = fetch_of(engine)
    free = engine.free_blocks
    engine.abort(request)
    engine.step()
    assert engine.client.calls[-1] == ("cancel", fetch_id)
    assert engine.free_blocks == free, "blocks stay until no byte can land"
    engine.client.end_fetch(fetch_id, Code.CANCELLED)
    engine.step()
    assert engine.is_empty()


def test_abort_after_the_fetch_ended_but_before_it_was_told(make: MakeEngine) -> None:
    engine = make()
    request = engine.add("d-1", PROMPT, remote_params())
    engine.step()
    fetch_id, _ = fetch_of(engine)
    engine.client.end_fetch(fetch_id)
    engine.abort(request)
    engine.step()
    engine.step()
    assert engine.is_empty()


def test_late_and_double_completions(make: MakeEngine) -> None:
    """Case 6: done twice, done after abort, failed after done: each id is told once, at most."""
    engine = make()
    request = engine.add("d-1", PROMPT, remote_params())
    engine.step()
    fetch_id, _ = fetch_of(engine)
    engine.client.end_fetch(fetch_id)
    engine.client.end_fetch(fetch_id)
    engine.client.end_fetch(fetch_id, Code.PEER_LOST)
    engine.step()
    engine.client.end_fetch(fetch_id, Code.PEER_LOST)
    engine.run()
    assert len(request.output_token_ids) == 4
    aborted = engine.add("d-2", [6] * 40, remote_params())
    engine.step()
    second = next(f for f in engine.client.fetched if f != fetch_id)
    engine.abort(aborted)
    engine.step()
    engine.client.end_fetch(second, Code.CANCELLED)
    engine.step()
    engine.client.end_fetch(second)
    engine.step()
    assert engine.is_empty()


def test_no_room_for_the_fetch_yet(make: MakeEngine) -> None:
    engine = make(num_blocks=6)
    running = engine.add("d-1", [4] * 40, max_tokens=2)
    engine.step()
    waiting = engine.add("d-2", PROMPT, remote_params())
    engine.step()
    assert waiting.status == RequestStatus.WAITING
    assert "fetch" not in engine.client.names()
    while running.request_id in engine.scheduler.requests:
        engine.step()
    engine.step()
    engine.client.end_fetch(fetch_of(engine)[0])
    engine.run()
    assert len(waiting.output_token_ids) == 4
    assert engine.is_empty()


def test_preempted_after_its_fetch(make: MakeEngine) -> None:
    """Preemption frees what was fetched; the prompt is then computed here, not asked for again."""
    engine = make(num_blocks=9)
    fetched = engine.add("d-1", [3] * 60, remote_params(remote_num_tokens=60), max_tokens=40)
    engine.step()
    engine.client.end_fetch(fetch_of(engine)[0])
    engine.step()
    other = engine.add("d-2", [4] * 60, max_tokens=40)
    engine.run(400)
    assert len(fetched.output_token_ids) == len(other.output_token_ids) == 40
    assert fetched.num_preemptions + other.num_preemptions > 0
    assert engine.client.names().count("fetch") == 1
    assert engine.is_empty()


def test_prompt_logprobs_are_computed_here(make: MakeEngine) -> None:
    engine = make()
    request = engine.add("d-1", PROMPT, remote_params(), prompt_logprobs=1)
    engine.run()
    assert len(request.output_token_ids) == 4
    assert engine.client.names() == ["describe", "release"]
    assert engine.is_empty()


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": 1},
        {"do_remote_prefill": True, "kvd": []},
        remote_params(kvd={"v": 2}),
        remote_params(remote_engine_id=5),
        remote_params(kvd=None, remote_port=99999),
        remote_params(remote_num_tokens=-1),
        remote_params(remote_num_tokens="40"),
        remote_params(kvd={"v": 1, "transfer_id": "x" * 600, "ranks": []}),
    ],
)
def test_params_that_make_no_sense(make: MakeEngine, params: dict[str, Any]) -> None:
    engine = make()
    request = engine.add("d-1", PROMPT, params)
    engine.run()
    assert len(request.output_token_ids) == 4
    assert engine.client.names() == ["describe"]
    assert sum(engine.half.tally.counts.values()) == 1
    assert engine.is_empty()


# --- two KV cache groups ------------------------------------------------------------------------


# --- waiting in the queue -----------------------------------------------------------------------


def test_a_request_far_back_in_the_queue_keeps_its_lease(make: MakeEngine) -> None:
    """vLLM asks about a request when its turn comes; of its arrival it tells from 0.22 on."""
    engine = make(max_num_seqs=1)
    clock = Clock()
    engine.half._renewals._clock = clock
    engine.add("busy", [7] * 20, None, max_tokens=30)
    engine.step()
    request = engine.add("d-1", PROMPT, remote_params())
    for _ in range(3):
        clock.now += engine.half.settings.lease_s / 2
        engine.step()
    assert request.status == RequestStatus.WAITING
    told = hasattr(KVConnectorBase_V1, "on_new_request")
    assert engine.client.names().count("renew") == (3 if told else 0)
    for _ in range(40):
        engine.step()
        if engine.client.fetched:
            break
    fetch_id, _ = fetch_of(engine)
    engine.client.end_fetch(fetch_id)
    engine.run()
    clock.now += 1000.0
    before = engine.client.names().count("renew")
    engine.step()
    assert engine.client.names().count("renew") == before, "what was fetched is renewed no more"
    assert engine.is_empty()
