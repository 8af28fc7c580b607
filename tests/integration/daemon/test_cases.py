"""Cases 1, 3 and 4: ids that differ, nothing to fetch, and references that are stale."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from kvd.protocol import local
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr
from tests.conftest import wait_for
from tests.integration.daemon.conftest import Pair
from tests.integration.daemon.engine import BLOCK_SIZE


def test_a_transfer_is_found_whatever_either_engine_calls_the_request(pair: Pair) -> None:
    producer, consumer = pair.engines(seed=4)
    before = pair.p.metric("kvd_served_fetches_total", code="ok")
    producer.offer("T", [1, 2, 3])
    done = pair.fetch(consumer, "T", [4, 5, 6])
    assert done.code == Code.OK, done
    assert consumer.wrong(4, {4: 1, 5: 2, 6: 3}) == 0
    wait_for(
        lambda: pair.p.metric("kvd_served_fetches_total", code="ok") == before + 1,
        what="one completion at the producer",
    )
    assert len(consumer.done) == 1


def test_an_unknown_transfer_is_answered_at_once(pair: Pair) -> None:
    producer, consumer = pair.engines(seed=4)
    producer.offer("T", [1])
    gauges = {"kvd_open_offers": 1, "kvd_parked": 0}

    def as_before() -> bool:
        return all(pair.p.metric(name) == value for name, value in gauges.items())

    wait_for(as_before, what="one offer is held")
    # The answer may not be the end of any wait: all of these are far longer than the test's.
    fetch = pair.start(consumer, "T-prime", [4], park_s=0.0, deadline_s=600.0)
    done = consumer.finish(fetch, timeout=20.0)
    assert done.code == Code.UNKNOWN_TRANSFER, done
    assert done.bad == [b"\x01"]
    assert consumer.wrong(4, {}) == 0
    assert producer.offers() == 1
    wait_for(as_before, what="and no more is")


def test_nothing_to_fetch_frees_the_producer_and_is_told_once(pair: Pair) -> None:
    producer, consumer = pair.engines(seed=4)
    producer.offer("T", [1, 2])
    assert pair.remote is not None
    answer = consumer.release("T", remote=pair.remote, engine_id=pair.producer_id)
    assert (answer.code, answer.what, answer.transfer_id) == (Code.OK, "release", "T")
    producer.wait(lambda: producer.seen(local.OfferEnded), "the offer ends")
    (ended,) = producer.seen(local.OfferEnded)
    assert ended.reason == Code.RELEASED
    assert producer.offers() == 0
    assert not consumer.done
    assert consumer.wrong(4, {}) == 0


def test_nothing_to_fetch_from_a_dead_producer_still_ends(pair: Pair) -> None:
    _, consumer = pair.engines(seed=4)
    before = pair.d.metric("kvd_refused_total")
    # Nobody listens on port 1.
    answer = consumer.release("T", remote=PeerAddr("127.0.0.1", 1), engine_id="p")
    assert answer.code == Code.PEER_UNREACHABLE
    assert len(consumer.seen(local.NotifyDone)) == 1
    assert pair.d.metric("kvd_refused_total") > before
    assert consumer.state() == "up"


def test_stale_references_write_nothing(pair: Pair) -> None:
    """The same blocks hold another prompt now: each stale fetch has an error of its own."""
    producer, consumer = pair.engines(seed=4)
    producer.offer("T", [1, 2])
    assert pair.fetch(consumer, "T", [8, 9]).code == Code.OK
    producer.client.revoke("T", 1)
    producer.poll()
    producer.offer("T2", [1, 2], generation=2)
    held = consumer.words.copy()

    replay = pair.fetch(consumer, "T", [20, 21], generation=1)
    beyond = pair.fetch(consumer, "T2", [20, 21, 22, 23])
    stale = pair.fetch(consumer, "T2", [20, 21], generation=1)
    other_prompt = pair.fetch(consumer, "T2", [20, 21], prompt="T")
    errors = [done.code for done in (replay, beyond, stale, other_prompt)]
    assert Code.OK not in errors
    assert errors[0] in (Code.REVOKED, Code.RELEASED, Code.STALE_GENERATION)
    assert errors[1] == Code.RANGE_NOT_HELD
    assert errors[2] == Code.STALE_GENERATION
    assert errors[3] == Code.PROMPT_MISMATCH
    assert all(done.nbytes == 0 for done in (replay, beyond, stale, other_prompt))
    assert np.array_equal(consumer.words, held)


def test_a_transfer_may_be_fetched_twice_but_not_into_the_same_blocks_at_once(pair: Pair) -> None:
    producer, consumer = pair.engines(seed=4)
    producer.offer("T", [1, 2])
    first = pair.fetch(consumer, "T", [8, 9])
    second = pair.fetch(consumer, "T", [10, 11])
    assert (first.code, second.code) == (Code.OK, Code.OK)
    assert consumer.wrong(4, {8: 1, 9: 2, 10: 1, 11: 2}) == 0


def test_an_offer_ends_by_its_lease(pair: Pair) -> None:
    producer, consumer = pair.engines(seed=4)
    producer.offer("short", [1], lease_s=0.3)
    producer.offer("renewed", [2], lease_s=1.0)
    producer.offer("long", [3], lease_s=60.0)
    assert pair.remote is not None
    how: dict[str, Any] = {"remote": pair.remote, "engine_id": pair.producer_id}
    before = time.monotonic()
    producer.wait(lambda: producer.seen(local.OfferEnded), "the short one ends")
    assert time.monotonic() - before < 10.0
    assert [(e.transfer_id, e.reason) for e in producer.seen(local.OfferEnded)] == [
        ("short", Code.EXPIRED)
    ]
    consumer.client.renew("unknown", **how)
    consumer.wait(lambda: consumer.seen(local.NotifyDone), "answer to renew")
    assert consumer.seen(local.NotifyDone)[-1].code == Code.UNKNOWN_TRANSFER
    assert producer.offers() >= 1


def test_cancel_is_answered_once_when_nothing_can_land(pair: Pair) -> None:
    _, consumer = pair.engines(seed=4)
    fetch = pair.start(consumer, "never", [1, 2, 3], park_s=20.0, deadline_s=60.0)
    wait_for(lambda: consumer.poll() or pair.p.metric("kvd_parked") == 1, what="parked")
    assert consumer.client.cancel(fetch)
    done = consumer.finish(fetch)
    assert done.code == Code.CANCELLED
    assert done.bad == [b"\x07"]
    wait_for(lambda: pair.p.metric("kvd_parked") == 0, what="the producer forgets it")


def test_a_partial_last_block_cannot_be_asked_beyond_its_tokens(pair: Pair) -> None:
    producer, consumer = pair.engines(seed=4)
    producer.offer("T", [1, 2], tokens=BLOCK_SIZE + 3)
    done = pair.fetch(consumer, "T", [5, 6], tokens=BLOCK_SIZE + 9)
    assert done.code in (Code.RANGE_NOT_HELD, Code.UNALIGNED_RANGE), done
    assert consumer.wrong(4, {}) == 0
