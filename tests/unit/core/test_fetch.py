"""Fetches from end to end: two cores, one producer and one consumer."""

from __future__ import annotations

from tests.unit.core.world import World


def test_a_finished_prefill_is_pulled_whole() -> None:
    world = World()
    producer = world.node("p").engine("P")
    consumer = world.node("d").engine("D")
    producer.offer("T", tokens=40, blocks=[[7, 3, 9]])
    blocks = consumer.fetch("f", "T", producer, end=40, blocks=[[2, 4, 6]])
    world.settle()
    done = consumer.done("f")
    assert (done.code, done.tokens, done.generation) == ("ok", 40, 1)
    assert done.bad == [b"\0"]
    assert done.nbytes == 3 * 3 * 1024
    assert consumer.tags(blocks) == {("T", 1)}
