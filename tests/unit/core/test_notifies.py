"""Releases and renewals that a consumer asks for."""

from __future__ import annotations

from kvd.core.config import CoreConfig
from kvd.protocol import local
from kvd.protocol.types import PeerAddr
from tests.unit.core.engine import Engine
from tests.unit.core.world import World


def test_release_and_renew_are_answered(world: World, producer: Engine, consumer: Engine) -> None:
    producer.offer("T", tokens=48, lease=2.0)
    consumer.say(local.Renew("T", 1, producer.node.addr, "P"))
    consumer.say(local.Renew("U", None, producer.node.addr, "P"))
    consumer.say(local.Release("T", None, producer.node.addr, "P"))
    world.settle()
    assert [(m.transfer_id, m.what, m.code) for m in consumer.took(local.NotifyDone)] == [
        ("T", "renew", "ok"),
        ("U", "renew", "unknown_transfer"),
        ("T", "release", "ok"),
    ]
    assert producer.ended("T") == [(1, "released")]


def test_a_release_to_a_dead_peer_is_answered_too(world: World, consumer: Engine) -> None:
    nobody = PeerAddr("nobody", 1)
    consumer.say(local.Release("T", None, nobody, "P"))
    world.settle()
    assert [m.code for m in consumer.took(local.NotifyDone)] == ["peer_unreachable"]
    world.auto_connect = False
    consumer.say(local.Release("U", None, PeerAddr("silent", 1), "P"))
    world.advance(CoreConfig().attach_timeout_s + 0.1)
    assert [m.code for m in consumer.took(local.NotifyDone)] == ["peer_unreachable"]


def test_notifies_are_bounded(world: World) -> None:
    world.auto_connect = False
    consumer = world.node("d", CoreConfig(max_notifies=2)).engine("D")
    for i in range(3):
        consumer.say(local.Release(f"T{i}", None, PeerAddr("p", 1), "P"))
    assert [m.code for m in consumer.took(local.NotifyDone)] == ["overloaded"]
