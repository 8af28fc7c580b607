"""Requests of engines with two KV cache groups, in the real scheduler."""

from __future__ import annotations

import pytest
from vllm.v1.request import RequestStatus

from connector_shim.connector import TransferResults
from kvd.protocol.codes import Code
from kvd.protocol.types import NULL_BLOCK
from tests.unit.shim.fakes import remote_params
from tests.vllm.kv_requests import PROMPT, MakeEngine, fetch_of, prefill

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


hybrid = pytest.mark.skipif(
    TransferResults is None, reason="this vLLM cannot be told of failures with several groups"
)


@pytest.mark.skipif(TransferResults is not None, reason="only of vLLM before 0.30")
def test_several_groups_are_refused_by_an_old_vllm(make: MakeEngine) -> None:
    with pytest.raises(ValueError, match="no-disable-hybrid-kv-cache-manager"):
        make(window=32)


@hybrid
@pytest.mark.parametrize("length", [40, 64, 100, 129])
def test_two_groups_end_to_end(make: MakeEngine, length: int) -> None:
    """What decode wants of a sliding window, prefill still has, at every length."""
    prompt = list(range(200, 200 + length))
    producer, consumer = make(window=32), make(window=32)
    prefill(producer, "p-1", prompt)
    params = producer.outputs["p-1"].kv_transfer_params
    producer.step()
    (offer,) = producer.client.offered.values()
    request = consumer.add("d-1", prompt, dict(params))
    consumer.step()
    fetch_id, fetch = fetch_of(consumer)
    assert len(fetch["blocks"]) == len(offer["blocks"]) == 2
    assert NULL_BLOCK not in fetch["blocks"][0]
    for group in range(2):
        assert len(fetch["blocks"][group]) == len(offer["blocks"][group])
        for src, dst in zip(offer["blocks"][group], fetch["blocks"][group], strict=True):
            assert src != NULL_BLOCK or dst == NULL_BLOCK
    if length >= 100:
        assert NULL_BLOCK in fetch["blocks"][1]
    consumer.client.end_fetch(fetch_id)
    consumer.run()
    assert len(request.output_token_ids) == 4
    assert consumer.is_empty()
    ((key, _),) = producer.client.offered.items()
    producer.client.end_offer(*key)
    producer.step()
    assert producer.is_empty()


@hybrid
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_two_groups_failure(make: MakeEngine, policy: str) -> None:
    engine = make(window=32, policy=policy)
    request = engine.add("d-1", PROMPT, remote_params())
    engine.step()
    fetch_id, _ = fetch_of(engine)
    engine.client.end_fetch(fetch_id, Code.PEER_LOST, [[], [1]])
    engine.run()
    engine.step()
    if policy == "fail":
        assert request.status == RequestStatus.FINISHED_ERROR
    else:
        assert len(request.output_token_ids) == 4
    assert engine.is_empty()
