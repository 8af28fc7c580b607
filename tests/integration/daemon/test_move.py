"""Bytes move between engines through two daemons, each a process of its own."""

from __future__ import annotations

import random

import pytest

from kvd.protocol import local
from kvd.protocol.codes import Code
from tests.conftest import wait_for
from tests.integration.daemon.conftest import TRANSPORTS, Pair, Site
from tests.integration.daemon.engine import BLOCK_SIZE

LAYERS, BLOCK_BYTES = 4, 4096


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_daemons_and_two_engine_processes(site: Site, transport: str) -> None:
    p, d = site.daemon("p", transport=transport), site.daemon("d", transport=transport)
    producer = site.process(p.ready(), "engine-p", seed=3)
    consumer = site.process(d.ready(), "engine-d")
    at = producer.up()
    consumer.up()
    producer.ask("offer", transfer_id="t", blocks=[5, 9, 2, 40])
    done = consumer.ask(
        "fetch",
        transfer_id="t",
        blocks=[7, 8, 60, 0],
        host=at["host"],
        port=at["port"],
        engine_id="engine-p",
    )
    assert done["code"] == Code.OK, done
    assert done["transport"] == transport
    assert (done["tokens"], done["nbytes"]) == (64, 4 * LAYERS * BLOCK_BYTES)
    assert consumer.ask("wrong", seed=3, pairs={7: 5, 8: 9, 60: 2, 0: 40}) == {"wrong": 0}
    assert d.metric("kvd_fetched_bytes_total", transport=transport) == done["nbytes"]
    wait_for(
        lambda: p.metric("kvd_served_bytes_total", transport=transport) == done["nbytes"],
        what="the producer's daemon counts the same bytes",
    )


def test_auto_takes_shared_memory_on_one_host(site: Site) -> None:
    p, d = site.daemon("p"), site.daemon("d")
    producer, consumer = site.engine(p, "p", seed=1), site.engine(d, "d")
    at = producer.up()
    consumer.up()
    producer.offer("t", [1])
    assert consumer.fetch("t", [2], remote=at, engine_id="p").transport == "shm"


def test_one_daemon_serves_both_sides(site: Site) -> None:
    both = site.daemon("both")
    producer, consumer = site.engine(both, "p", seed=1), site.engine(both, "d")
    at = producer.up()
    consumer.up()
    producer.offer("t", [1, 2])
    done = consumer.fetch("t", [3, 4], remote=at, engine_id="p")
    assert done.code == Code.OK, done
    assert consumer.wrong(1, {3: 1, 4: 2}) == 0


def test_a_part_of_the_tokens_moves(pair: Pair) -> None:
    """The consumer holds a prefix, and the last block is not full."""
    producer, consumer = pair.engines(seed=2)
    producer.offer("t", [10, 11, 12, 13], tokens=3 * BLOCK_SIZE + 5)
    done = pair.fetch(consumer, "t", [20, 21], start=2 * BLOCK_SIZE, tokens=3 * BLOCK_SIZE + 5)
    assert done.code == Code.OK, done
    assert done.tokens == BLOCK_SIZE + 5
    assert consumer.wrong(2, {20: 12, 21: 13}) == 0


def test_a_fetch_that_comes_first_waits_and_is_streamed(pair: Pair) -> None:
    producer, consumer = pair.engines(seed=2)
    fetch = pair.start(consumer, "t", [20, 21], park_s=10.0)
    wait_for(lambda: consumer.poll() or pair.p.metric("kvd_parked") == 1, what="it is parked")
    producer.offer("t", [10, 11], sealed=False, tokens=2 * BLOCK_SIZE)
    producer.client.extend("t", 1, tokens=BLOCK_SIZE)
    producer.poll()
    first = 1 * LAYERS * BLOCK_BYTES // 8

    def half() -> bool:
        consumer.poll()
        return bool((consumer.words[:, 20] != 2**64 - 1).sum() == first)

    wait_for(half, what="the first block arrives while the second is not there")
    assert fetch not in consumer.done
    producer.client.seal("t", 1, tokens=2 * BLOCK_SIZE)
    producer.poll()
    assert consumer.finish(fetch).code == Code.OK
    assert consumer.wrong(2, {20: 10, 21: 11}) == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_many_fetches_at_once_over_several_engines(site: Site, transport: str) -> None:
    p, d = site.daemon("p", transport=transport), site.daemon("d", transport=transport)
    rng = random.Random(7)
    size = {"num_blocks": 160}
    producers = [site.engine(p, f"p{i}", seed=i + 1, **size) for i in range(2)]
    consumers = [site.engine(d, f"d{i}", **size) for i in range(2)]
    for engine in (*producers, *consumers):
        engine.up()
    at = p.address
    free = {id(e): rng.sample(range(160), 160) for e in (*producers, *consumers)}
    pairs: dict[tuple[int, int], dict[int, int]] = {}
    asked = []
    for number in range(64):
        i, j = number % 2, number // 2 % 2
        count = rng.randint(1, 5)
        src = [free[id(producers[i])].pop() for _ in range(count)]
        dst = [free[id(consumers[j])].pop() for _ in range(count)]
        producers[i].offer(f"t{number}", src)
        pairs.setdefault((i, j), {}).update(zip(dst, src, strict=True))
        fetch = consumers[j].start_fetch(f"t{number}", dst, remote=at, engine_id=f"p{i}")
        asked.append((consumers[j], fetch))
    for consumer, fetch in asked:
        done = consumer.finish(fetch)
        assert (done.code, done.transport) == (Code.OK, transport), done
    for j, consumer in enumerate(consumers):
        # Each block is from the producer that was asked, and the others are untouched.
        assert sum(consumer.wrong(i + 1, pairs[i, j]) for i in range(2)) == sum(
            len(pairs[i, j]) * LAYERS * BLOCK_BYTES // 8 for i in range(2)
        )
        for i in range(2):
            others = set(pairs[1 - i, j])
            before = consumer.words[:, sorted(others)].copy()
            consumer.words[:, sorted(others)] = 2**64 - 1
            assert consumer.wrong(i + 1, pairs[i, j]) == 0
            consumer.words[:, sorted(others)] = before
    for engine in (*producers, *consumers):
        assert engine.state() == "up"


def test_a_producer_that_takes_its_offer_back_fails_only_that_fetch(pair: Pair) -> None:
    producer, consumer = pair.engines(seed=2)
    producer.offer("gone", [1, 2], sealed=False, tokens=2 * BLOCK_SIZE)
    producer.offer("stays", [3, 4])
    gone = pair.start(consumer, "gone", [20, 21], generation=1)
    stays = pair.start(consumer, "stays", [30, 31])
    assert consumer.finish(stays).code == Code.OK
    producer.client.revoke("gone", 1)
    producer.poll()
    done = consumer.finish(gone)
    assert done.code == Code.REVOKED, done
    assert done.bad == [b"\x03"]
    assert consumer.wrong(2, {30: 3, 31: 4}) == 0
    assert [e.transfer_id for e in producer.seen(local.OfferEnded)] == ["gone"]


def test_a_prefill_that_starts_again_is_fetched_anew(pair: Pair) -> None:
    """Preempted half way: what came of the first attempt may not stay."""
    producer, consumer = pair.engines(seed=2)
    producer.offer("t", [1, 2, 3], sealed=False, tokens=3 * BLOCK_SIZE)
    fetch = pair.start(consumer, "t", [20, 21, 22], park_s=20.0, deadline_s=60.0)
    producer.client.extend("t", 1, tokens=2 * BLOCK_SIZE)
    producer.poll()

    def begun() -> bool:
        consumer.poll()
        return bool((consumer.words[:, 21] != 2**64 - 1).any())

    wait_for(begun, what="a part of the first attempt arrives")
    producer.client.revoke("t", 1)
    producer.poll()
    producer.words[:, 1:4] = 0  # the blocks are somebody else's now
    producer.offer("t", [11, 12, 13], generation=2)
    done = consumer.finish(fetch)
    assert (done.code, done.generation) == (Code.OK, 2), done
    assert consumer.wrong(2, {20: 11, 21: 12, 22: 13}) == 0
