"""Engines that die, are replaced, or are too many."""

from __future__ import annotations

from kvd.core import events as ev
from kvd.core import instructions as ins
from kvd.core.config import CoreConfig
from kvd.protocol import local
from tests.unit.core.engine import Engine, geometry, layouts
from tests.unit.core.world import World


def test_memory_is_given_back_when_the_last_job_has_ended(
    world: World, producer: Engine, consumer: Engine
) -> None:
    world.auto_pull = world.auto_stop = False
    producer.offer("T", tokens=32)
    consumer.fetch("f", "T", producer, end=32)
    consumer.fetch("g", "U", producer, end=32, blocks=[[5, 6]], park=30.0)
    world.settle()
    (job,) = consumer.node.pulls
    consumer.close()
    assert not consumer.released
    assert consumer.node.stopped == ["f"]
    assert not consumer.node.core.idle
    world.fail_pull(consumer.node, job, "cancelled", 0.5)
    assert consumer.released
    assert consumer.node.core.idle
    world.settle()
    assert producer.node.core.statistics().requests == 0
    assert [one for one in consumer.node.log if isinstance(one, ins.ReleaseSession)] == [
        ins.ReleaseSession(consumer.session)
    ]


def test_a_quiet_session_is_released_at_once_and_once(world: World, producer: Engine) -> None:
    producer.offer("T", tokens=32)
    producer.close()
    assert producer.released
    producer.node.run(ev.SessionClosed(producer.session))
    assert producer.node.recorded("late")
    assert producer.node.core.statistics().sessions == 0
    assert producer.node.core.statistics().held == 0


def test_a_reader_never_holds_up_the_end_of_a_producer(
    world: World, producer: Engine, consumer: Engine
) -> None:
    world.auto_pull = world.auto_stop = False
    producer.offer("T", tokens=32)
    consumer.fetch("f", "T", producer, end=32)
    world.settle()
    producer.close()
    assert producer.released
    assert producer.node.tickets == {}


def test_an_engine_reads_from_another_of_the_same_daemon(world: World) -> None:
    node = world.node("x")
    producer, consumer = node.engine("P"), node.engine("D")
    producer.offer("T", tokens=32)
    blocks = consumer.fetch("f", "T", producer, end=32)
    world.settle()
    assert consumer.done("f").code == "ok"
    assert consumer.tags(blocks) == {("T", 1)}
    consumer.fetch("g", "U", producer, end=32, park=30.0)
    world.settle()
    producer.close()
    world.settle()
    assert consumer.done("g").code == "engine_gone"


def test_a_newer_session_of_a_rank_replaces_the_older(
    world: World, producer: Engine, consumer: Engine
) -> None:
    world.auto_pull = world.auto_stop = False
    producer.offer("T", tokens=32)
    consumer.fetch("f", "T", producer, end=32)
    world.settle()
    (job,) = consumer.node.pulls
    consumer.node.engine("D", epoch=1)
    assert not consumer.released
    consumer.say(local.Ping(1))
    assert consumer.took(local.Pong) == []
    world.fail_pull(consumer.node, job, "cancelled")
    assert consumer.released


def test_an_older_epoch_of_a_rank_is_turned_away(world: World) -> None:
    node = world.node("p")
    now = node.engine("P", epoch=2)
    before = node.engine("P", epoch=1, register=False)
    assert [m.code for m in before.took(local.Refused)] == ["stale_epoch"]
    assert before.released
    assert not now.released
    now.open_offer("T")
    assert now.ended("T") == []


def test_sessions_are_bounded(world: World) -> None:
    node = world.node("p", CoreConfig(max_sessions=2))
    node.engine("A")
    node.engine("B")
    third = node.engine("C", register=False)
    assert [m.code for m in third.took(local.Refused)] == ["overloaded"]
    assert third.released
    again = node.engine("A", epoch=2)
    assert again.took(local.Refused) == []


def test_registration_happens_once_and_needs_sense(world: World) -> None:
    node = world.node("p")
    engine = node.engine("P", register=False)
    wild = tuple(layouts((0, 7)))
    node.run(ev.SessionRegistered(engine.session, geometry((0, 7)), 8, (), wild, 8))
    assert [m.code for m in engine.took(local.Refused)] == ["bad_memory"]
    good = ev.SessionRegistered(engine.session, geometry((0,)), 8, (), layouts((0,)), 8)
    node.run(good)
    node.run(good)
    node.run(ev.SessionRegistered(99, geometry((0,)), 8, (), layouts((0,)), 8))
    assert [fields["code"] for fields in node.recorded("refused")] == [
        "bad_memory",
        "duplicate",
        "not_registered",
    ]
    assert node.core.statistics().registered == 1


def test_a_session_that_opens_while_the_daemon_drains_is_told(world: World) -> None:
    node = world.node("p")
    node.run(ev.DrainStarted())
    assert node.engine("P").took(local.State) == [local.State(draining=True)]


def test_numbers_and_lists_for_people(world: World, producer: Engine, consumer: Engine) -> None:
    world.auto_pull = False
    producer.offer("T", tokens=40, lease=30.0)
    producer.offer("V", tokens=40, lease=30.0, slot=1)
    consumer.fetch("f", "T", producer, end=40)
    consumer.fetch("g", "U", producer, end=32, blocks=[[5, 6]], park=30.0)
    world.settle()
    made = producer.node.core.statistics()
    assert made.offers == {"leased": 1, "serving": 1, "lingering": 0}
    assert (made.held, made.requests, made.parked, made.offered_blocks) == (2, 2, 1, 6)
    assert (made.clients, made.client_attachments, made.idle) == (1, 1, False)
    used = consumer.node.core.statistics()
    assert used.fetches["moving"] == 1
    assert used.fetches["asked"] == 1
    assert used.attachments["open"] == 1
    assert used.peers == {"up": 1, "down": 0}
    assert used.jobs == 1
    shown = producer.node.core.snapshot()
    assert [(o.transfer_id, o.sealed, o.grants, o.ends_in) for o in shown.offers] == [
        ("T", 40, 1, None),
        ("V", 40, 0, 30.0),
    ]
    shown = consumer.node.core.snapshot()
    assert [(f.fetch_id, f.state, f.transport) for f in shown.fetches] == [
        ("f", "moving", "shm"),
        ("g", "asked", "shm"),
    ]
    assert [(a.peer, a.remote_engine_id, a.jobs) for a in shown.attachments] == [("p:7000", "P", 1)]
    assert [(s.engine_id, s.registered, s.jobs) for s in shown.sessions] == [("D", True, 1)]
