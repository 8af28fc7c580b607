"""Producer: how grants and what they read from end: leases, last readers, deaths, drains."""

from __future__ import annotations

from kvd.core import events as ev
from kvd.core.config import CoreConfig
from kvd.protocol import local, peer
from tests.unit.core.consumer_daemon import Daemon, code_of, granted
from tests.unit.core.engine import Engine
from tests.unit.core.fetching import streamed
from tests.unit.core.world import World


def test_generations_that_are_asked_for(producer: Engine, daemon: Daemon) -> None:
    producer.offer("T", 5, tokens=32)
    assert code_of(daemon.ask("old", "T", 0, 32, generation=4, park=9)) == "stale_generation"
    assert isinstance(daemon.ask("same", "T", 0, 32, generation=5)[0], peer.Grant)
    assert daemon.ask("new", "T", 0, 32, generation=6, park=9) == []
    producer.offer("T", 6, tokens=32, slot=1)
    grant = granted(daemon)
    assert (grant.fetch_id, grant.generation) == ("new", 6)


def test_how_a_transfer_ended_is_remembered(world: World, producer: Engine, daemon: Daemon) -> None:
    producer.offer("R", 3, tokens=32)
    producer.offer("E", 3, tokens=32, slot=1, lease=1.0)
    daemon.say(peer.PeerRelease("R", None, "P"))
    daemon.heard()
    world.advance(1.1)
    assert code_of(daemon.ask("a", "R", 0, 32, park=9)) == "released"
    assert code_of(daemon.ask("b", "E", 0, 32, park=9)) == "expired"
    assert code_of(daemon.ask("c", "E", 0, 32, generation=3, park=9)) == "expired"
    assert code_of(daemon.ask("d", "E", 0, 32, generation=2, park=9)) == "stale_generation"
    assert daemon.ask("e", "E", 0, 32, generation=4, park=9) == []
    world.advance(CoreConfig().tombstone_ttl_s + 2)
    daemon.heard()
    assert code_of(daemon.ask("f", "R", 0, 32)) == "unknown_transfer"


def test_open_grants_hold_an_offer_and_then_it_lingers(
    world: World, producer: Engine, daemon: Daemon
) -> None:
    producer.offer("T", tokens=32, lease=1.0)
    daemon.ask("f", "T", 0, 32)
    daemon.ask("g", "T", 0, 32)
    world.advance(5.0)
    daemon.say(peer.FetchClose("f", "ok", 1))
    daemon.say(peer.PeerRelease("T", None, "P"))
    world.advance(5.0)
    assert producer.ended("T") == []
    daemon.say(peer.FetchClose("g", "ok", 1))
    world.advance(1.9)
    assert producer.ended("T") == []
    daemon.heard()
    assert isinstance(daemon.ask("h", "T", 0, 32)[0], peer.Grant)
    world.advance(5.0)
    daemon.say(peer.FetchClose("h", "ok", 1))
    world.advance(2.1)
    assert producer.ended("T") == [(1, "released")]


def test_what_others_may_want_is_held_for_a_while_and_not_for_its_lease(
    world: World, producer: Engine, daemon: Daemon
) -> None:
    producer.offer("T", tokens=32, lease=30.0)
    daemon.ask("f", "T", 0, 32)
    daemon.say(peer.FetchClose("f", "ok", 1))
    world.advance(CoreConfig().release_linger_s - 0.1)
    assert producer.ended("T") == []
    world.advance(0.2)
    assert producer.ended("T") == [(1, "released")]


def test_what_nobody_else_wants_is_held_until_it_was_fetched_and_no_longer(
    producer: Engine, daemon: Daemon
) -> None:
    producer.offer("T", tokens=32, lease=10.0)
    daemon.ask("f", "T", 0, 32)
    daemon.ask("g", "T", 0, 32)
    # Whatever its consumer says: it is not taken from one who reads.
    daemon.say(peer.FetchClose("f", "ok", 1, sole=True))
    assert producer.ended("T") == []
    daemon.say(peer.FetchClose("g", "ok", 1, sole=True))
    assert producer.ended("T") == [(1, "released")]
    assert code_of(daemon.ask("h", "T", 0, 32, park=9)) == "released"


def test_a_stream_may_be_fetched_whole_before_it_is_sealed(
    producer: Engine, daemon: Daemon
) -> None:
    streamed(producer, "T", 32)
    producer.say(local.Extend("T", 1, 32))
    daemon.ask("f", "T", 0, 32)
    daemon.say(peer.FetchClose("f", "ok", 1, sole=True))
    assert producer.ended("T") == [(1, "released")]
    # The shim has not heard of the end yet.
    producer.say(local.Seal("T", 1, 32))
    assert producer.ended("T") == [(1, "released")]


def test_a_fetch_that_failed_is_tried_again_though_it_was_the_only_one(
    producer: Engine, daemon: Daemon
) -> None:
    producer.offer("T", tokens=32, lease=10.0)
    daemon.ask("f", "T", 0, 32)
    daemon.say(peer.FetchClose("f", "transport_error", 5, sole=True))
    assert producer.ended("T") == []
    assert isinstance(daemon.ask("g", "T", 0, 32)[0], peer.Grant)


def test_a_failed_fetch_leaves_the_lease_to_another_try(
    world: World, producer: Engine, daemon: Daemon
) -> None:
    producer.offer("T", tokens=32, lease=10.0)
    daemon.ask("f", "T", 0, 32)
    daemon.say(peer.FetchClose("f", "transport_error", 5))
    served = producer.node.recorded("fetch_served")[-1]
    assert (served["code"], served["nbytes"]) == ("transport_error", 5)
    world.advance(9.0)
    assert producer.ended("T") == []
    world.advance(1.1)
    assert producer.ended("T") == [(1, "expired")]


def test_a_streamed_generation_is_waited_for_again(producer: Engine, daemon: Daemon) -> None:
    producer.open_offer("T", 1)
    producer.give_digests("T", 1, [32])
    first = daemon.ask("any", "T", 0, 32)[0]
    daemon.ask("one", "T", 0, 32, generation=1)
    assert isinstance(first, peer.Grant)
    producer.say(local.Revoke("T", 1))
    revoked = {m.fetch_id: m.again for m in daemon.heard() if isinstance(m, peer.FetchRevoked)}
    assert revoked == {"any": True, "one": False}
    assert producer.node.tickets == {}
    producer.offer("T", 2, tokens=32, slot=1)
    second = granted(daemon)
    assert (second.fetch_id, second.generation) == ("any", 2)
    assert second.ticket != first.ticket


def test_a_sealed_offer_that_is_revoked_is_not_waited_for(producer: Engine, daemon: Daemon) -> None:
    producer.offer("T", tokens=32)
    daemon.ask("f", "T", 0, 32)
    producer.say(local.Revoke("T", 1))
    revoked = daemon.hears(peer.FetchRevoked)
    assert (revoked.code, revoked.again) == ("revoked", False)
    daemon.say(peer.FetchClose("f", "revoked", 0))
    assert daemon.heard() == []


def test_a_client_that_left_holds_nothing(world: World, producer: Engine, daemon: Daemon) -> None:
    producer.offer("T", tokens=32, lease=1.0)
    daemon.ask("f", "T", 0, 32)
    daemon.ask("g", "U", 0, 32, park=20.0)
    producer.node.run(ev.ClientLeft(daemon.number, "peer_lost"))
    assert producer.node.tickets == {}
    seen = producer.node.core.statistics()
    assert (seen.requests, seen.parked, seen.client_attachments, seen.clients) == (0, 0, 0, 0)
    world.advance(CoreConfig().release_linger_s + 0.1)
    assert producer.ended("T") == [(1, "expired")]


def test_a_consumer_that_never_closes_is_not_waited_for_forever(world: World) -> None:
    config = CoreConfig(fetch_max_s=10.0, attach_timeout_s=5.0)
    producer = world.node("p", config).engine("P")
    daemon = Daemon(producer)
    producer.offer("T", tokens=32, lease=1.0)
    daemon.ask("f", "T", 0, 32)
    world.advance(14.9)
    assert producer.ended("T") == []
    world.advance(0.2)
    assert daemon.hears(peer.FetchRevoked).code == "deadline"
    world.advance(2.1)
    assert producer.ended("T") == [(1, "expired")]


def test_detach_ends_what_rides_on_it(producer: Engine, daemon: Daemon) -> None:
    producer.offer("T", tokens=32)
    daemon.ask("f", "T", 0, 32)
    daemon.say(peer.Detach("a"))
    assert producer.node.tickets == {}
    assert code_of(daemon.ask("g", "T", 0, 32)) == "stale_epoch"


def test_a_dead_engine_ends_everything_of_it(producer: Engine, daemon: Daemon) -> None:
    producer.offer("T", tokens=32)
    daemon.ask("f", "T", 0, 32)
    daemon.ask("g", "U", 0, 32, park=20.0)
    producer.close()
    heard = daemon.heard()
    assert [type(m) for m in heard] == [peer.FetchRevoked, peer.FetchRefused, peer.EngineGone]
    assert isinstance(heard[2], peer.EngineGone)
    assert (heard[2].engine_id, heard[2].engine_epoch) == ("P", 1)
    assert producer.released
    assert producer.node.core.idle
    assert code_of(daemon.ask("h", "T", 0, 32)) == "stale_epoch"


def test_a_second_request_with_a_live_id_is_ignored(producer: Engine, daemon: Daemon) -> None:
    producer.offer("T", tokens=32)
    daemon.ask("f", "T", 0, 32)
    assert daemon.ask("f", "T", 0, 16) == []
    assert producer.node.recorded("refused")[-1]["code"] == "duplicate"


def test_drain_refuses_what_would_wait_and_serves_what_is_offered(
    producer: Engine, daemon: Daemon
) -> None:
    producer.offer("T", tokens=32)
    daemon.ask("parked", "U", 0, 32, park=20.0)
    producer.node.run(ev.DrainStarted())
    assert daemon.hears(peer.FetchRefused).code == "draining"
    assert code_of(daemon.ask("late", "U", 0, 32, park=20.0)) == "draining"
    assert producer.node.core.idle
    assert isinstance(daemon.ask("f", "T", 0, 32)[0], peer.Grant)
    assert not producer.node.core.idle
    daemon.say(peer.FetchClose("f", "ok", 0))
    assert producer.node.core.idle


def test_a_draining_daemon_promises_no_next_generation(producer: Engine, daemon: Daemon) -> None:
    producer.open_offer("T", 1)
    producer.give_digests("T", 1, [32])
    daemon.ask("f", "T", 0, 32)
    producer.node.run(ev.DrainStarted())
    producer.say(local.Revoke("T", 1))
    revoked = daemon.hears(peer.FetchRevoked)
    assert (revoked.code, revoked.again) == ("revoked", False)
    assert producer.node.core.idle
