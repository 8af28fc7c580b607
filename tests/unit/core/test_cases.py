"""The cases that every release must get right, as far as the core decides them."""

from __future__ import annotations

import pytest

from kvd.core.packed import NULL
from kvd.protocol import local
from kvd.protocol.types import PeerAddr
from tests.unit.core.engine import Engine
from tests.unit.core.world import World


def test_case_1_ids_are_the_transfers(world: World, producer: Engine, consumer: Engine) -> None:
    """Local request ids differ on both sides; only the transfer id is shared."""
    producer.offer("T", tokens=40)
    blocks = consumer.fetch("r-bbbb", "T", producer, end=40)
    world.settle()
    assert consumer.done("r-bbbb").code == "ok"
    assert consumer.tags(blocks) == {("T", 1)}
    world.advance(3.0)
    assert producer.ended("T") == [(1, "released")]
    held = producer.node.core.statistics().held
    began = world.now
    consumer.fetch("r-cccc", "T'", producer, end=40, park=0.0)
    world.settle()
    assert consumer.done("r-cccc").code == "unknown_transfer"
    assert world.now == began
    assert producer.node.core.statistics().held == held
    assert producer.node.core.statistics().parked == 0


@pytest.mark.parametrize("how", ["release", "empty fetch"])
def test_case_3_nothing_to_fetch(world: World, how: str) -> None:
    producer = world.node("p").engine("P")
    consumer = world.node("d").engine("D")

    def finish(fetch_id: str) -> None:
        if how == "release":
            consumer.say(local.Release("T", None, producer.node.addr, "P"))
        else:
            consumer.fetch(fetch_id, "T", producer, start=48, end=48)
            assert consumer.done(fetch_id).code == "ok"
        world.settle()

    producer.offer("T", tokens=48)
    finish("f")
    assert producer.ended("T") == [(1, "released")]
    assert consumer.node.core.statistics().fetches["moving"] == 0
    assert consumer.node.started == []
    # And again, with nobody there.
    producer.node.world.cut(consumer.node, producer.node)
    del world.nodes[producer.node.addr]
    world.advance(2.0)
    finish("g")
    world.advance(20.0)
    answers = [m.code for m in consumer.took(local.NotifyDone)]
    assert answers == (["ok", "peer_unreachable"] if how == "release" else [])
    failed = [f for f in consumer.node.recorded("refused") if f["what"] == "release"]
    assert [f["code"] for f in failed] == ["peer_unreachable"]
    assert consumer.node.core.idle


def test_case_4_stale_references(world: World, producer: Engine, consumer: Engine) -> None:
    producer.offer("T", 1, tokens=48, blocks=[[1, 2, 3]])
    consumer.fetch("f", "T", producer, end=48)
    world.settle()
    assert consumer.done("f").code == "ok"
    world.advance(3.0)
    assert producer.ended("T") == [(1, "released")]
    producer.offer("T2", 1, tokens=48, blocks=[[1, 2, 3]])
    before = dict(consumer.memory)
    consumer.fetch("replay", "T", producer, end=48, generation=1, blocks=[[8, 9, 10]])
    consumer.fetch("range", "T2", producer, end=64, blocks=[[11, 12, 13, 14]])
    consumer.fetch("index", "T2", producer, end=48, blocks=[[15, 16, 64]])
    consumer.fetch("prompt", "T2", producer, end=48, blocks=[[17, 18, 19]], prompt="T")
    world.settle()
    codes = {name: consumer.done(name).code for name in ("replay", "range", "index", "prompt")}
    assert codes == {
        "replay": "released",
        "range": "range_not_held",
        "index": "bad_message",
        "prompt": "prompt_mismatch",
    }
    assert consumer.memory == before
    assert len(consumer.node.started) == 1
    # Twice at once: the second may not write where the first still does.
    world.auto_pull = False
    consumer.fetch("one", "T2", producer, end=48)
    consumer.fetch("two", "T2", producer, end=48)
    world.settle()
    assert consumer.done("two").code == "bad_message"
    assert [pull.fetch_id for pull in consumer.node.started] == ["f", "one"]


def test_case_5_lease_order(world: World, producer: Engine, consumer: Engine) -> None:
    producer.offer("A", tokens=16, lease=0.2)
    producer.offer("B", tokens=16, lease=0.2, slot=1)
    producer.offer("C", tokens=16, lease=60.0, slot=2)
    for _ in range(20):
        consumer.say(local.Renew("A", None, producer.node.addr, "P"))
        world.settle()
        world.advance(0.1)
        if world.now >= 100.2:
            assert producer.ended("B") == [(1, "expired")]
    assert producer.ended("A") == []
    assert producer.ended("C") == []
    assert [m.code for m in consumer.took(local.NotifyDone)] == ["ok"] * 20
    ended = producer.node.recorded("offer_ended")
    assert [fields["reason"] for fields in ended] == ["expired"]
    consumer.say(local.Renew("B", None, producer.node.addr, "P"))
    world.settle()
    assert [m.code for m in consumer.took(local.NotifyDone)] == ["unknown_transfer"]


FINGERPRINT = {
    "model": "another",
    "revision": "r2",
    "kv_dtype": "fp8",
    "scale_mode": "per_head",
    "layers": [("l0", 0, [1024]), ("l1", 0, [1024])],
    "total_kv_heads": 4,
    "kv_heads_per_rank": 1,
    "head_size": 16,
    "block_size": 32,
    "layout": "HND",
    "isa": "avx512",
    "draft_model": "d",
    "mode": "push",
    "tp_size": 2,
}


@pytest.mark.parametrize("field", FINGERPRINT)
def test_case_8_each_field_of_the_geometry(world: World, field: str) -> None:
    producer = world.node("p").engine("P")
    consumer = world.node("d").engine("D", geometry_changes={field: FINGERPRINT[field]})
    producer.offer("T", tokens=32)
    consumer.fetch("f", "T", producer, end=32, blocks=[[1] if field == "block_size" else [1, 2]])
    world.settle()
    done = consumer.done("f")
    assert done.code == "geometry_mismatch"
    assert done.detail.startswith(field)
    assert "ours" in done.detail
    assert "theirs" in done.detail
    assert consumer.node.transports == {}
    assert consumer.memory == {}
    failed = consumer.node.recorded("attach_failed")
    assert [fields["code"] for fields in failed] == ["geometry_mismatch"]


def test_a_window_of_the_past_is_not_fetched(world: World) -> None:
    """Null blocks keep positions apart: nothing is matched by count from the end."""
    producer = world.node("p").engine("P", groups=(0, 1))
    consumer = world.node("d").engine("D", groups=(0, 1))
    producer.offer("T", tokens=64, blocks=[[1, 2, 3, 4], [NULL, NULL, 5, 6]])
    blocks = [[2, 3], [NULL, 9]]
    consumer.fetch("f", "T", producer, start=32, end=64, blocks=blocks)
    world.settle()
    assert consumer.done("f").code == "ok"
    assert consumer.memory[1, 1, 9] == ("T", 1, 3)
    assert PeerAddr("::1", 7) not in consumer.node.connected
