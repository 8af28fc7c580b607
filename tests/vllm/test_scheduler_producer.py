"""The producer's side of a request's life in the real scheduler."""

from __future__ import annotations

import pytest

from connector_shim.jobs import RankState
from kvd.protocol.codes import Code
from tests.vllm.kv_requests import PROMPT, MakeEngine, fetch_of, prefill

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_remote_decode(make: MakeEngine) -> None:
    engine = make()
    free = engine.free_blocks
    request = engine.add("p-1", PROMPT, {"do_remote_decode": True}, max_tokens=1)
    engine.step()
    params = engine.outputs["p-1"].kv_transfer_params
    assert params["do_remote_prefill"] is True
    assert params["remote_num_tokens"] == 40
    assert (params["remote_host"], params["remote_port"]) == ("10.0.0.1", 7000)
    assert params["kvd"]["ranks"] == [[0, 0, "10.0.0.1", 7000]]
    assert free - engine.free_blocks == 3, "held until told otherwise"

    engine.step()
    ((transfer_id, generation), offer), = engine.client.offered.items()  # fmt: skip
    assert (transfer_id, generation) == (params["transfer_id"], params["kvd"]["generation"])
    assert [offer["blocks"]] == [params["remote_block_ids"]]
    assert offer["tokens"] == 40
    assert list(offer["digests"]) == [16, 32, 40]
    engine.step()
    assert free - engine.free_blocks == 3
    engine.client.end_offer(transfer_id, generation)
    engine.step()
    assert request.request_id not in engine.scheduler.requests
    assert engine.is_empty()


def test_producer_and_consumer_agree_on_the_digest(make: MakeEngine) -> None:
    producer, consumer = make(), make()
    prefill(producer)
    params = producer.outputs["p-1"].kv_transfer_params
    producer.step()
    consumer.add("d-1", PROMPT, dict(params))
    consumer.step()
    _, fetch = fetch_of(consumer)
    (offer,) = producer.client.offered.values()
    assert fetch["digest"] == offer["digests"][fetch["end"]]
    other = make()
    other.add("d-1", [*PROMPT[:-1], 11], dict(params))
    other.step()
    assert fetch_of(other)[1]["digest"] != offer["digests"][40]


def test_chunks_without_a_new_block(make: MakeEngine) -> None:
    """Case 2: 20 tokens in chunks of 17 and 3 (which adds no block), beside a prompt of 5."""
    engine = make(max_tokens_per_step=17)
    engine.add("p-1", list(range(30, 50)), {"do_remote_decode": True}, max_tokens=1)
    engine.add("p-2", [1, 2, 3, 4, 5], {"do_remote_decode": True}, max_tokens=1)
    engine.run()
    engine.step()
    by_tokens = {offer["tokens"]: offer for offer in engine.client.offered.values()}
    assert sorted(by_tokens) == [5, 20]
    assert [len(blocks) for blocks in by_tokens[20]["blocks"]] == [2]
    assert [len(blocks) for blocks in by_tokens[5]["blocks"]] == [1]
    for transfer_id, generation in list(engine.client.offered):
        engine.client.end_offer(transfer_id, generation)
    engine.step()
    assert engine.is_empty()


def test_prefix_hit_on_the_producer_is_offered_whole(make: MakeEngine) -> None:
    engine = make()
    engine.add("p-0", PROMPT)
    engine.run()
    prefill(engine)
    engine.step()
    (offer,) = engine.client.offered.values()
    assert [len(blocks) for blocks in offer["blocks"]] == [3]


def test_more_tokens_than_the_prompt(make: MakeEngine) -> None:
    engine = make()
    engine.add("p-1", PROMPT, {"do_remote_decode": True}, max_tokens=10)
    engine.run()
    params = engine.outputs["p-1"].kv_transfer_params
    assert params["remote_num_tokens"] == 49, "the last sampled token has no KV"


def test_abort_on_the_producer_before_it_is_done(make: MakeEngine) -> None:
    engine = make(max_tokens_per_step=16)
    request = engine.add("p-1", PROMPT, {"do_remote_decode": True}, max_tokens=1)
    engine.step()
    engine.abort(request)
    engine.step()
    assert engine.client.names() == ["describe"]
    assert engine.is_empty()


def test_abort_on_the_producer_after_it_was_offered(make: MakeEngine) -> None:
    engine = make()
    request = prefill(engine)
    engine.step()
    engine.abort(request)
    engine.step()
    assert request.request_id in engine.scheduler.requests, "still held for the consumer"
    ((key, _),) = engine.client.offered.items()
    engine.client.end_offer(*key, Code.EXPIRED)
    engine.step()
    assert engine.is_empty()


def test_producer_without_a_daemon_offers_nothing(make: MakeEngine) -> None:
    engine = make()
    engine.half.update_daemons({(0, 0): RankState("down", detail="gone")})
    engine.add("p-1", PROMPT, {"do_remote_decode": True}, max_tokens=1)
    engine.step()
    assert engine.outputs["p-1"].kv_transfer_params is None
    assert not engine.scheduler.requests


def test_daemon_goes_between_finish_and_offer(make: MakeEngine) -> None:
    engine = make()
    prefill(engine)
    engine.client.state = "down"
    engine.step()
    assert engine.client.names() == ["describe"]
    assert engine.is_empty()


def test_held_fraction(make: MakeEngine) -> None:
    engine = make(num_blocks=20, max_held_fraction=0.35)
    offered = []
    for i in range(3):
        prefill(engine, f"p-{i}", [50 + i] * 40)
        offered.append(engine.outputs[f"p-{i}"].kv_transfer_params is not None)
        engine.step()
    assert offered == [True, True, False], "six of twenty blocks are held, nine would be too many"
    key = next(iter(engine.client.offered))
    engine.client.end_offer(*key)
    engine.step()
    prefill(engine, "p-9", [90] * 40)
    assert engine.outputs["p-9"].kv_transfer_params is not None


def test_reset_cache_takes_all_offers_back(make: MakeEngine) -> None:
    engine = make()
    prefill(engine)
    engine.step()
    assert engine.scheduler.connector is not None
    assert engine.scheduler.connector.reset_cache() is True
    engine.step()
    assert engine.client.names()[-1] == "revoke_all"
    engine.step()
    assert engine.is_empty()


def test_shutdown_tells_nothing_more(make: MakeEngine) -> None:
    engine = make()
    prefill(engine)
    engine.step()
    ((key, _),) = engine.client.offered.items()
    engine.worker.shutdown()
    engine.worker.shutdown()
    engine.client.end_offer(*key)
    engine.step()
    assert engine.client.closed == 1
    assert "p-1" in engine.scheduler.requests
