"""Fetches whose producer answers what it may not."""

from __future__ import annotations

import pytest

from kvd.core import events as ev
from kvd.core.packed import NULL, pack
from kvd.protocol import local, peer
from kvd.protocol.types import PeerAddr, Watermark
from tests.unit.core.engine import NBYTES, Engine, digest
from tests.unit.core.world import World


def asked(world: World, producer: Engine, consumer: Engine) -> PeerAddr:
    consumer.fetch("f", "T", producer, end=48, park=30.0, generation=None)
    world.settle()
    return producer.node.addr


def grant(**changes: object) -> peer.Grant:
    fields: dict[str, object] = {
        "fetch_id": "f",
        "generation": 1,
        "ticket": bytes(16),
        "fence_slot": 0,
        "fence_word": 9,
        "blocks": [pack([1, 2, 3])],
        "valid": [Watermark(0, 3, 48)],
        "sealed": True,
    }
    return peer.Grant(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"blocks": [pack([1, 2, 64])]},
        {"blocks": [pack([1, 2, 3, 4])]},
        {"blocks": [b"abc"]},
        {"blocks": []},
        {"blocks": [pack([1]), pack([1])]},
        {"valid": [Watermark(2, 2, 48)]},
        {"valid": [Watermark(2**32 - 1, 2**32 - 1, 48)]},
        {"fence_slot": 64},
        {"fence_word": 0},
    ],
)
def test_a_grant_that_cannot_be_fails_the_fetch(
    world: World, producer: Engine, consumer: Engine, wrong: dict[str, object]
) -> None:
    addr = asked(world, producer, consumer)
    consumer.node.run(ev.PeerMessage(addr, grant(**wrong)))
    assert consumer.done("f").code == "bad_message"
    assert consumer.node.started == []


def test_marks_without_blocks_move_nothing(
    world: World, producer: Engine, consumer: Engine
) -> None:
    addr = asked(world, producer, consumer)
    consumer.node.run(ev.PeerMessage(addr, grant(blocks=[b""])))
    assert consumer.node.started == []
    news = peer.Progress("f", 1, [pack([1])], [], False)
    consumer.node.run(ev.PeerMessage(addr, news))
    assert [pull.nbytes for pull in consumer.node.started] == [3 * NBYTES]
    consumer.node.run(ev.PeerMessage(addr, peer.Progress("f", 1, [pack([NULL])], [], False)))
    assert consumer.node.stopped == ["f"]


def test_words_about_fetches_that_are_not_asked_are_late(
    world: World, producer: Engine, consumer: Engine
) -> None:
    addr = asked(world, producer, consumer)
    stranger = PeerAddr("x", 1)
    node = consumer.node
    for message in (
        peer.Progress("f", 1, [b""], [], False),
        peer.FetchRevoked("f", 1, "revoked", True),
        peer.FetchRevoked("g", 1, "revoked", True),
        grant(fetch_id="g"),
        peer.FetchRefused("g", "released", ""),
    ):
        node.run(ev.PeerMessage(addr, message))
    node.run(ev.PeerMessage(stranger, grant()))
    assert len(node.recorded("late")) == 6
    assert consumer.took(local.FetchDone) == []
    node.run(ev.PeerMessage(addr, grant()))
    node.run(ev.PeerMessage(addr, grant(generation=2)))
    node.run(ev.PeerMessage(addr, peer.Progress("f", 2, [b""], [], False)))
    node.run(ev.PeerMessage(addr, peer.FetchRevoked("f", 2, "revoked", False)))
    assert len(node.recorded("late")) == 9
    assert consumer.took(local.FetchDone) == []


def test_a_grant_of_another_generation_than_named(
    world: World, producer: Engine, consumer: Engine
) -> None:
    consumer.fetch("f", "T", producer, end=48, generation=4, park=30.0)
    world.settle()
    consumer.node.run(ev.PeerMessage(producer.node.addr, grant(generation=5)))
    assert consumer.done("f").code == "stale_generation"


def test_a_refusal_is_never_a_success(world: World, producer: Engine, consumer: Engine) -> None:
    addr = asked(world, producer, consumer)
    consumer.node.run(ev.PeerMessage(addr, peer.FetchRefused("f", "ok", "")))
    assert consumer.done("f").code == "internal"


def test_another_prompt_moves_nothing(world: World, producer: Engine, consumer: Engine) -> None:
    producer.offer("T", tokens=48, prompt="a")
    assert digest("a", 48) != digest("b", 48)
    consumer.fetch("f", "T", producer, end=48, prompt="b")
    world.settle()
    assert consumer.done("f").code == "prompt_mismatch"
    assert consumer.memory == {}
