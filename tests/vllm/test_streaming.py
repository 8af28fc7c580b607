"""Offers that grow while prefill computes, driven by vLLM's real scheduler class.

Runs on the installed vLLM, and again on 0.20.1 (see test_scheduler_0_20_1.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr
from tests.vllm.engine import Engine
from tests.vllm.kv_requests import MakeEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

PROMPT = [10 + i for i in range(40)]
WANTED = {"do_remote_decode": True, "transfer_id": "xfer-1"}


@pytest.fixture
def make(model: Path) -> MakeEngine:
    return lambda **options: Engine(model, **{"max_tokens_per_step": 16, **options})


def told(engine: Engine, *names: str) -> list[tuple[Any, ...]]:
    """Calls of these names, without the transfer and generation."""
    return [(call[0], *call[3:]) for call in engine.client.calls if call[0] in names]


def the_offer(engine: Engine) -> tuple[tuple[str, int], dict[str, Any]]:
    ((key, offer),) = engine.client.offered.items()
    return key, offer


def test_each_chunk_is_told_after_its_forward(make: MakeEngine) -> None:
    engine = make()
    free = engine.free_blocks
    request = engine.add("p-1", PROMPT, dict(WANTED), max_tokens=1)
    engine.step()
    (transfer_id, generation), offer = the_offer(engine)
    assert transfer_id == "xfer-1"
    assert list(offer["digests"]) == [16, 32, 40], "the whole prompt is bound from the start"
    assert told(engine, "extend") == [("extend", 16, 0, 0)]
    engine.step()
    assert told(engine, "extend")[1:] == [("extend", 32, 0, 0)]
    engine.step()
    assert told(engine, "extend")[2:] == [("extend", 40, 0, 0)]
    assert offer["tokens"] is None, "sealed only once the request has ended"

    params = engine.outputs["p-1"].kv_transfer_params
    assert params["kvd"]["generation"] == generation
    assert params["remote_num_tokens"] == 40
    assert [offer["blocks"]] == [params["remote_block_ids"]]
    engine.step()
    assert offer["tokens"] == 40
    assert free - engine.free_blocks == 3, "held until told otherwise"
    engine.client.end_offer(transfer_id, generation)
    engine.step()
    assert request.request_id not in engine.scheduler.requests
    assert engine.is_empty()


def test_nothing_is_told_before_the_forward(make: MakeEngine) -> None:
    engine = make()
    engine.add("p-1", PROMPT, dict(WANTED), max_tokens=1)
    metadata = engine.scheduler.schedule().kv_connector_metadata
    engine.worker.handle_preemptions(metadata)
    assert told(engine, "extend", "seal") == []
    assert engine.client.names().count("offer") == 1


def test_a_tail_goes_when_its_block_is_whole(make: MakeEngine) -> None:
    """17 tokens are one block and one token of the next; 20 are the end."""
    engine = make(max_tokens_per_step=17)
    engine.add("p-1", PROMPT[:20], dict(WANTED), max_tokens=1)
    engine.run()
    assert told(engine, "extend") == [("extend", 16, 0, 0), ("extend", 20, 0, 0)]


def test_layer_by_layer(make: MakeEngine) -> None:
    engine = make(stream_unit="layer")
    engine.add("p-1", PROMPT, dict(WANTED), max_tokens=1)
    metadata = engine.scheduler.schedule().kv_connector_metadata
    engine.worker.handle_preemptions(metadata)
    engine.worker.save_kv_layer("layer.0", None, None)
    assert told(engine, "extend") == [("extend", 16, 0, 1)]
    engine.worker.save_kv_layer("not one of ours", None, None)
    engine.worker.wait_for_save()
    assert told(engine, "extend")[1:] == [("extend", 16, 0, 0)]


def test_a_prefix_hit_goes_with_the_first_chunk(make: MakeEngine) -> None:
    engine = make()
    engine.add("p-0", PROMPT)
    engine.run()
    engine.add("p-1", PROMPT, dict(WANTED), max_tokens=1)
    engine.step()
    assert told(engine, "extend") == [("extend", 40, 0, 0)]
    assert [len(table) for table in the_offer(engine)[1]["blocks"]] == [3]


@pytest.mark.parametrize("steps", [1, 2])
def test_an_abort_takes_the_offer_back_and_then_frees(make: MakeEngine, steps: int) -> None:
    engine = make()
    request = engine.add("p-1", PROMPT, dict(WANTED), max_tokens=1)
    for _ in range(steps):
        engine.step()
    engine.abort(request)
    assert request.request_id in engine.scheduler.requests, "held until the word is flipped"
    engine.step()
    assert told(engine, "revoke") == [("revoke",)]
    engine.step()
    assert request.request_id not in engine.scheduler.requests
    assert engine.is_empty()


def test_an_offer_that_ended_early_holds_nothing(make: MakeEngine) -> None:
    engine = make()
    engine.add("p-1", PROMPT, dict(WANTED), max_tokens=1)
    engine.step()
    engine.client.end_offer(*the_offer(engine)[0], Code.DAEMON_GONE)
    engine.run()
    engine.step()
    assert "seal" not in engine.client.names()
    assert engine.is_empty()


def test_an_offer_that_was_fetched_before_its_request_ended_holds_nothing(
    make: MakeEngine,
) -> None:
    engine = make(max_tokens_per_step=4096)
    engine.add("p-1", PROMPT, dict(WANTED), max_tokens=1)
    engine.step()
    engine.client.end_offer(*the_offer(engine)[0], Code.RELEASED)
    engine.run()
    for _ in range(4):
        engine.step()
    assert engine.is_empty()


def test_preemption_revokes_first_and_resumes_as_a_new_generation(make: MakeEngine) -> None:
    engine = make(num_blocks=8, max_num_seqs=2, max_held_fraction=1)
    first = engine.add("p-1", PROMPT[:30], None, max_tokens=40)
    engine.step()
    engine.step()
    second = engine.add("p-2", [7] * 45, dict(WANTED), max_tokens=30)
    for _ in range(200):
        before = len(engine.client.calls)
        decision = engine.step()
        if "p-2" in (decision.preempted_req_ids or ()):
            names = [call[0] for call in engine.client.calls[before:]]
            assert names[0] == "revoke", "before anything else in that step"
            break
        if not engine.scheduler.has_unfinished_requests():
            break
    if second.num_preemptions == 0:
        pytest.fail("the second request was never preempted: the case needs fewer blocks")
    engine.run(300)
    generations = [call[2] for call in engine.client.calls if call[0] == "offer"]
    assert len(generations) == 1 + second.num_preemptions
    assert generations == sorted(set(generations))
    assert engine.outputs["p-2"].kv_transfer_params["kvd"]["generation"] == generations[-1]
    assert len(first.output_token_ids) == 40


def test_both_legs_at_once(make: MakeEngine) -> None:
    """Mooncake's schema: decode knows a name and whom to ask, and waits for prefill."""
    engine = make()
    request = engine.add(
        "d-1",
        PROMPT,
        {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": "http://[fd00::1]:8998",
            "remote_engine_id": "engine-p",
            "transfer_id": "xfer-1",
        },
    )
    engine.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    ((fetch_id, fetch),) = engine.client.fetched.items()
    assert fetch["remote"] == PeerAddr("fd00::1", 8998, (0, 0))
    assert (fetch["transfer_id"], fetch["generation"]) == ("xfer-1", None)
    assert (fetch["start"], fetch["end"]) == (0, 40)
    assert fetch["park_s"] == engine.half.settings.fetch_deadline_s
    engine.client.end_fetch(fetch_id)
    engine.run()
    assert engine.is_empty()
