"""Fetches whose offer is taken back, or offered again as another generation."""

from __future__ import annotations

from kvd.protocol import local
from tests.unit.core.engine import Engine
from tests.unit.core.fetching import SMALL, closes, pulling, streamed
from tests.unit.core.world import World


def test_nothing_of_a_generation_that_is_gone_counts(
    world: World, producer: Engine, consumer: Engine
) -> None:
    world.auto_pull = False
    source = streamed(producer, "T", 48)
    producer.compute("T", 1, [source[0][:2]])
    producer.say(local.Extend("T", 1, 32))
    blocks = consumer.fetch("f", "T", producer, end=48)
    world.settle()
    (job,) = consumer.node.pulls
    world.post(world.answer_later(consumer.node, job))
    # The producer's word comes first, and the answer of a copy that was still valid after it.
    producer.fence[1] = 0
    producer.say(local.Revoke("T", 1))
    world.queue.rotate(-1)
    world.settle()
    assert consumer.took(local.FetchDone) == []
    producer.offer("T", 2, tokens=48, blocks=[[5, 6, 7]], slot=3)
    world.settle()
    for job in list(consumer.node.pulls):
        world.finish_pull(consumer.node, job)
    world.settle()
    done = consumer.done("f")
    assert (done.code, done.generation) == ("ok", 2)
    assert consumer.tags(blocks) == {("T", 2)}
    assert closes(consumer) == [("f", "ok")]


def test_a_new_grant_waits_for_the_jobs_of_the_old(world: World, producer: Engine) -> None:
    """A late byte of the old generation would land on the new one."""
    world.auto_stop = False
    consumer, blocks = pulling(world, producer)
    old = sorted(consumer.node.pulls)
    assert len(old) == 3
    producer.offer("T", 2, tokens=48, slot=2)
    world.settle()
    assert consumer.node.stopped == ["f"]
    for job in old[:2]:
        world.fail_pull(consumer.node, job, "cancelled", 1.0)
        assert sorted(consumer.node.pulls) == [other for other in old if other > job]
    world.auto_pull = True
    world.fail_pull(consumer.node, old[2], "cancelled", 1.0)
    world.settle()
    done = consumer.done("f")
    assert (done.code, done.generation) == ("ok", 2)
    assert consumer.tags(blocks) == {("T", 2)}


def test_a_late_success_of_the_old_generation_is_none_of_the_new(
    world: World, producer: Engine
) -> None:
    world.auto_stop = False
    consumer, blocks = pulling(world, producer)
    first, second, third = sorted(consumer.node.pulls)
    answers = [world.answer_later(consumer.node, job) for job in (first, second)]
    producer.offer("T", 2, tokens=48, slot=2)
    world.settle()
    for answer in answers:
        answer()
    assert sorted(consumer.node.pulls) == [third]
    world.auto_pull = True
    world.fail_pull(consumer.node, third, "fenced", 1.0)
    world.settle()
    done = consumer.done("f")
    assert (done.code, done.generation) == ("ok", 2)
    assert consumer.tags(blocks) == {("T", 2)}


def test_a_dead_word_waits_for_the_reason(world: World, producer: Engine) -> None:
    consumer, blocks = pulling(world, producer)
    producer.fence[1] = 0
    world.finish_pull(consumer.node, min(consumer.node.pulls))
    world.settle()
    assert consumer.node.pulls == {}
    assert consumer.took(local.FetchDone) == []
    producer.offer("T", 2, tokens=48, slot=2)
    world.auto_pull = True
    for job in list(consumer.node.pulls):
        world.finish_pull(consumer.node, job)
    world.settle()
    assert consumer.done("f").code == "ok"
    assert consumer.tags(blocks) == {("T", 2)}


def test_a_dead_word_without_a_reason_fails_all_blocks(world: World, producer: Engine) -> None:
    world.auto_pull = False
    consumer = world.node("d", SMALL).engine("D")
    producer.offer("T", tokens=48)
    consumer.fetch("f", "T", producer, end=48)
    world.settle()
    first, second, third = sorted(consumer.node.pulls)
    world.finish_pull(consumer.node, first)
    producer.fence[0] = 0
    world.finish_pull(consumer.node, second)
    world.settle()
    assert third not in consumer.node.pulls
    world.advance(0.9)
    assert consumer.took(local.FetchDone) == []
    world.advance(0.2)
    done = consumer.done("f")
    assert (done.code, done.bad, done.tokens) == ("fenced", [b"\7"], 0)


def test_a_sealed_offer_that_is_revoked_fails_the_fetch(
    world: World, producer: Engine, consumer: Engine
) -> None:
    world.auto_pull = False
    producer.offer("T", tokens=48)
    consumer.fetch("f", "T", producer, end=48)
    world.settle()
    producer.fence[0] = 0
    producer.say(local.Revoke("T", 1))
    world.settle()
    done = consumer.done("f")
    assert (done.code, done.bad) == ("revoked", [b"\7"])
    assert closes(consumer) == [("f", "revoked")]
