"""Cases 1, 3, 4, 5, 7 and 11: ids that differ, nothing to fetch, stale references, the order of
leases, heads over ranks, and a pool that is too small."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy as np
import pytest

from connector_shim.errors import ClientError
from kvd.protocol import local
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr, Rank
from tests.conftest import wait_for
from tests.integration.daemon.conftest import Pair, Site
from tests.integration.daemon.engine import BLOCK_SIZE, Engine


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


def test_a_producer_is_free_once_the_only_fetch_has_come_through(site: Site) -> None:
    settings = {"release_linger_s": 600.0}
    p, d = site.daemon("p", **settings), site.daemon("d", **settings)
    producer, consumer = site.engine(p, "p", seed=4), site.engine(d, "d")
    how: dict[str, Any] = {"remote": producer.up(), "engine_id": "p"}
    consumer.up()
    producer.offer("shared", [1])
    producer.offer("T", [2])
    assert consumer.fetch("shared", [4], **how).code == Code.OK
    assert consumer.fetch("T", [5], sole=True, **how).code == Code.OK
    producer.wait(lambda: producer.seen(local.OfferEnded), "the end of the one")
    assert [(e.transfer_id, e.reason) for e in producer.seen(local.OfferEnded)] == [
        ("T", Code.RELEASED)
    ]
    assert producer.offers() == 1
    assert consumer.fetch("shared", [6], **how).code == Code.OK
    assert consumer.wrong(4, {4: 1, 5: 2, 6: 1}) == 0


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


def test_case_5_leases_end_in_their_own_order(pair: Pair) -> None:
    producer, consumer = pair.engines(seed=4)
    expired = pair.p.metric("kvd_offers_total", reason="expired")
    producer.offer("renewed", [1], lease_s=0.5)
    producer.offer("short", [2], lease_s=0.5)
    producer.offer("long", [3], lease_s=60.0)
    assert pair.remote is not None
    how: dict[str, Any] = {"remote": pair.remote, "engine_id": pair.producer_id}

    def answers(number: int) -> bool:
        return len(consumer.seen(local.NotifyDone)) == number

    for asked in itertools.count(1):
        consumer.client.renew("renewed", **how)
        consumer.wait(partial(answers, asked), "answer to renew")
        producer.poll()
        if producer.seen(local.OfferEnded):
            break
    assert [(e.transfer_id, e.reason) for e in producer.seen(local.OfferEnded)] == [
        ("short", Code.EXPIRED)
    ]
    assert pair.p.metric("kvd_offers_total", reason="expired") == expired + 1
    assert {e.code for e in consumer.seen(local.NotifyDone)} == {Code.OK}
    assert sorted(key[0] for key in producer.client.offers) == ["long", "renewed"]
    consumer.client.renew("unknown", **how)
    consumer.wait(
        lambda: [e for e in consumer.seen(local.NotifyDone) if e.transfer_id == "unknown"],
        "answer to renew",
    )
    assert consumer.seen(local.NotifyDone)[-1].code == Code.UNKNOWN_TRANSFER


def ranks(socket: str, name: str, tp_size: int, heads: int, seed: int = 0) -> list[Engine]:
    """All ranks of one engine, with these KV heads in total. Words differ by rank."""
    changes = {"total_kv_heads": heads, "kv_heads_per_rank": max(1, heads // tp_size)}
    return [
        Engine(
            socket,
            name,
            seed=seed and seed + rank,
            rank=Rank(tp_rank=rank, tp_size=tp_size),
            changes={**changes, "tp_size": tp_size},
        )
        for rank in range(tp_size)
    ]


@pytest.mark.parametrize(
    ("ours", "theirs", "moves"), [(2, 2, True), (1, 4, False), (4, 1, False)], ids=str
)
def test_case_7_heads_go_to_the_rank_that_has_them_or_nowhere(
    pair: Pair, ours: int, theirs: int, moves: bool
) -> None:
    producers = ranks(pair.p.socket, f"heads-p{ours}-{theirs}", ours, 2, seed=8)
    consumers = ranks(pair.d.socket, f"heads-d{ours}-{theirs}", theirs, 2)
    try:
        remotes = [producer.up() for producer in producers]
        for producer in producers:
            producer.offer("T", [3])
        for rank, consumer in enumerate(consumers):
            consumer.up()
            done = pair.fetch(
                consumer, "T", [5], remote=remotes[0], engine_id=producers[0].engine_id
            )
            if moves:
                assert done.code == Code.OK, done
                assert consumer.wrong(8 + rank, {5: 3}) == 0
            else:
                assert done.code in (Code.GEOMETRY_MISMATCH, Code.UNKNOWN_ENGINE), done
                assert "rank" in done.detail or "tp_size" in done.detail
                assert consumer.wrong(8, {}) == 0
    finally:
        for engine in [*producers, *consumers]:
            engine.close()


def test_case_11_a_request_beyond_the_pool_is_refused_and_one_that_fits_completes(
    pair: Pair,
) -> None:
    producer, _ = pair.engines(seed=4)
    small = Engine(pair.d.socket, "small-pool", num_blocks=3)
    try:
        small.up()
        producer.offer("A", [1, 2, 3, 4])
        producer.offer("B", [5])
        with pytest.raises(ClientError) as refused:
            pair.start(small, "A", [0, 1, 2, 3])
        assert refused.value.code is Code.BAD_MEMORY
        done = pair.fetch(small, "B", [2])
        assert done.code == Code.OK, done
        assert small.wrong(4, {2: 5}) == 0
        # Two that share a block: the second is refused, not queued behind the first for ever.
        producer.offer("C", [6, 7])
        held = pair.start(small, "later", [0, 1], park_s=20.0, deadline_s=60.0)
        done = pair.fetch(small, "C", [1, 2])
        assert done.code != Code.OK
        assert small.client.cancel(held)
        small.finish(held)
        assert pair.fetch(small, "C", [1, 2]).code == Code.OK
        assert small.wrong(4, {1: 6, 2: 7}) == 0
    finally:
        small.close()


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
