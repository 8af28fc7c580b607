"""Producer: offers, leases, endings."""

from __future__ import annotations

import pytest

from kvd.core import events as ev
from kvd.core.config import CoreConfig
from kvd.core.packed import pack
from kvd.protocol import local, peer
from tests.unit.core.engine import BLOCK, Engine
from tests.unit.core.world import World


def client_of(producer: Engine, number: int = 900) -> int:
    """A consumer's daemon that only says what the test says."""
    producer.node.run(ev.ClientJoined(number, "c", 1, True))
    return number


def answers(producer: Engine, kind: type) -> list[object]:
    return [message for _, message in producer.node.answered if isinstance(message, kind)]


def release(producer: Engine, client: int, transfer: str, generation: int | None = None) -> str:
    message = peer.PeerRelease(transfer, generation, producer.engine_id)
    producer.node.run(ev.ClientMessage(client, message))
    result = answers(producer, peer.NotifyResult)[-1]
    assert isinstance(result, peer.NotifyResult)
    assert result.what == "release"
    return result.code


def renew(producer: Engine, client: int, transfer: str, generation: int | None = None) -> str:
    message = peer.PeerRenew(transfer, generation, producer.engine_id)
    producer.node.run(ev.ClientMessage(client, message))
    result = answers(producer, peer.NotifyResult)[-1]
    assert isinstance(result, peer.NotifyResult)
    return result.code


def test_a_lease_passes_once_and_only_then(world: World, producer: Engine) -> None:
    producer.offer("T", tokens=20, lease=1.0)
    world.advance(0.9)
    assert producer.ended("T") == []
    world.advance(0.2)
    assert producer.ended("T") == [(1, "expired")]
    world.advance(100)
    assert producer.ended("T") == [(1, "expired")]
    assert producer.node.recorded("offer_ended")[0]["reason"] == "expired"


def test_a_lease_is_no_longer_than_the_daemon_allows(world: World) -> None:
    producer = world.node("p", CoreConfig(lease_max_s=2.0)).engine("P")
    producer.offer("T", tokens=20, lease=1000.0)
    world.advance(2.1)
    assert producer.ended("T") == [(1, "expired")]


def test_a_newer_generation_takes_the_place_of_the_older(producer: Engine) -> None:
    producer.offer("T", 1, tokens=20)
    producer.offer("T", 2, tokens=20, slot=1)
    assert producer.ended("T") == [(1, "revoked")]
    assert producer.node.core.statistics().held == 1


def test_an_older_generation_is_refused_and_told(producer: Engine) -> None:
    producer.offer("T", 5, tokens=20)
    producer.open_offer("T", 4, slot=1)
    assert producer.ended("T") == [(4, "stale_generation")]
    producer.say(local.Seal("T", 5, 20))
    assert producer.node.core.statistics().held == 1


def test_the_live_generation_offered_again_changes_nothing(producer: Engine) -> None:
    producer.offer("T", 5, tokens=20)
    producer.open_offer("T", 5, slot=1)
    assert producer.ended("T") == []
    assert producer.node.recorded("refused")[0]["code"] == "duplicate"


def test_a_generation_that_ended_is_not_offered_again(producer: Engine) -> None:
    producer.offer("T", 5, tokens=20)
    producer.say(local.Revoke("T", 5))
    producer.open_offer("T", 5, slot=1)
    assert producer.ended("T") == [(5, "revoked"), (5, "duplicate")]
    assert producer.node.core.statistics().held == 0


def test_what_comes_for_an_offer_that_ended_is_late(producer: Engine) -> None:
    producer.offer("T", 1, tokens=20)
    producer.say(local.Revoke("T", 1))
    producer.inbox.clear()
    producer.say(local.Revoke("T", 1))
    producer.say(local.Extend("T", 1, 20))
    producer.say(local.Seal("T", 1, 20))
    producer.give_blocks("T", 1, [[1]])
    producer.give_digests("T", 1, [16])
    assert producer.inbox == []
    assert len(producer.node.recorded("late")) == 5


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (local.OfferBlocks("T", 1, 0, 0, pack([64])), "block 64 of 64"),
        (local.OfferBlocks("T", 1, 0, 1, pack([3])), "0 are known"),
        (local.OfferBlocks("T", 1, 1, 0, pack([3])), "group 1 of 1"),
        (local.OfferBlocks("T", 1, 0, 0, b"abc"), "32-bit"),
        (local.OfferBlocks("T", 1, 0, 0, pack([1] * 65)), "more blocks"),
        (local.OfferDigests("T", 1, pack([16]), b"short"), "do not match"),
        (local.Extend("T", 1, 16), "need 1 blocks"),
        (local.Extend("T", 1, 0, 2, 2), "layers"),
        (local.Extend("T", 1, 0, 3, 1), "layers"),
        (local.Seal("T", 1, 2**62), "blocks"),
    ],
)
def test_what_cannot_be_ends_the_offer(
    producer: Engine, message: local.FromShim, says: str
) -> None:
    producer.open_offer("T")
    producer.say(message)
    assert producer.ended("T") == [(1, "bad_message")]
    assert says in str(producer.node.recorded("refused")[0]["detail"])


def test_two_digests_at_one_position_end_the_offer(producer: Engine) -> None:
    producer.open_offer("T")
    producer.give_digests("T", 1, [16, 32])
    producer.give_digests("T", 1, [16])
    assert producer.ended("T") == []
    producer.give_digests("T", 1, [32], prompt="another")
    assert producer.ended("T") == [(1, "bad_message")]


def test_a_seal_below_what_was_valid_ends_the_offer(producer: Engine) -> None:
    producer.open_offer("T")
    producer.give_blocks("T", 1, [[1, 2]])
    producer.say(local.Extend("T", 1, 32, 1, 1))
    producer.say(local.Seal("T", 1, 16))
    assert producer.ended("T") == [(1, "bad_message")]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"slot": 64}, "bad_message"),
        ({"word": 0}, "bad_message"),
    ],
)
def test_an_offer_without_a_fence_word_is_refused(
    producer: Engine, change: dict[str, int], code: str
) -> None:
    message = {"slot": 0, "word": 7, **change}
    producer.say(local.Offer("T", 1, message["slot"], message["word"], 5.0))
    assert producer.ended("T") == [(1, code)]


def test_limits_of_offers_and_blocks(world: World) -> None:
    config = CoreConfig(max_offers=2, max_blocks=6)
    producer = world.node("p", config).engine("P")
    producer.offer("A", tokens=4 * BLOCK)
    producer.open_offer("B", slot=1)
    producer.open_offer("C", slot=2)
    assert producer.ended("C") == [(1, "overloaded")]
    producer.give_blocks("B", 1, [[1, 2, 3]])
    assert producer.ended("B") == [(1, "overloaded")]
    producer.open_offer("D", slot=1)
    assert producer.ended("D") == []


def test_roles_and_registration_are_asked_for(world: World) -> None:
    node = world.node("p")
    consumer = node.engine("C", role="consumer")
    consumer.open_offer("T")
    assert consumer.ended("T") == [(1, "unsupported")]
    early = node.engine("E", register=False)
    early.open_offer("T")
    assert early.ended("T") == [(1, "not_registered")]


def test_release_ends_an_offer_that_nobody_fetched(producer: Engine) -> None:
    client = client_of(producer)
    producer.offer("T", 3, tokens=20)
    assert release(producer, client, "T", 2) == "stale_generation"
    assert producer.ended("T") == []
    assert release(producer, client, "T", 3) == "ok"
    assert producer.ended("T") == [(3, "released")]
    assert release(producer, client, "T", 3) == "ok"


@pytest.mark.parametrize(
    ("named", "offered", "ends"),
    [(None, 4, True), (4, 4, True), (5, 4, False), (3, 4, False)],
)
def test_a_release_before_its_offer_is_remembered(
    producer: Engine, named: int | None, offered: int, ends: bool
) -> None:
    client = client_of(producer)
    assert release(producer, client, "T", named) == "ok"
    producer.open_offer("T", offered)
    assert producer.ended("T") == ([(offered, "released")] if ends else [])


def test_an_early_release_works_once_and_for_a_time(world: World, producer: Engine) -> None:
    client = client_of(producer)
    release(producer, client, "T")
    producer.open_offer("T", 1)
    producer.open_offer("T", 2, slot=1)
    assert producer.ended("T") == [(1, "released")]
    release(producer, client, "U")
    world.advance(CoreConfig().early_release_ttl_s + 1)
    producer.open_offer("U", 1, slot=2)
    assert producer.ended("U") == []


def test_early_releases_and_tombstones_are_bounded(world: World) -> None:
    config = CoreConfig(max_early_releases=10, max_tombstones=10)
    producer = world.node("p", config).engine("P")
    client = client_of(producer)
    for i in range(50):
        release(producer, client, f"R{i}")
        producer.open_offer(f"T{i}")
        producer.say(local.Revoke(f"T{i}", 1))
    seen = producer.node.core.statistics()
    assert (seen.early_releases, seen.tombstones) == (10, 10)
    world.advance(config.tombstone_ttl_s + 2)
    seen = producer.node.core.statistics()
    assert (seen.early_releases, seen.tombstones) == (0, 0)
    assert producer.node.core.next_deadline() is None


def test_renew_restarts_the_lease(world: World, producer: Engine) -> None:
    client = client_of(producer)
    producer.offer("T", 3, tokens=20, lease=1.0)
    for _ in range(5):
        world.advance(0.8)
        assert renew(producer, client, "T") == "ok"
    assert renew(producer, client, "T", 2) == "stale_generation"
    assert renew(producer, client, "T", 4) == "unknown_transfer"
    assert renew(producer, client, "nothing") == "unknown_transfer"
    assert producer.ended("T") == []
    world.advance(1.1)
    assert producer.ended("T") == [(3, "expired")]


def test_renewals_come_to_an_end(world: World) -> None:
    """However long a consumer's queue is, prefill's blocks come back."""
    producer = world.node("p", CoreConfig(lease_max_s=5.0)).engine("P")
    client = client_of(producer)
    producer.open_offer("T", lease=1.0)
    world.advance(3.0)  # prefill takes its time, which is not the consumer's
    producer.give_blocks("T", 1, [[1, 2]])
    producer.say(local.Seal("T", 1, 20))
    held = 0.0
    while producer.ended("T") == [] and held < 20.0:
        renew(producer, client, "T")
        world.advance(0.5)
        held += 0.5
    assert producer.ended("T") == [(1, "expired")]
    assert held == 5.0


def test_revoke_all_ends_each_offer_of_that_session_only(world: World) -> None:
    node = world.node("p")
    one, other = node.engine("P"), node.engine("Q")
    one.offer("A", tokens=20)
    one.offer("B", tokens=20, slot=1)
    other.offer("A", tokens=20)
    one.say(local.RevokeAll())
    assert one.ended("A") == [(1, "revoked")]
    assert one.ended("B") == [(1, "revoked")]
    assert other.ended("A") == []


def test_a_draining_daemon_ends_new_offers_at_once(producer: Engine) -> None:
    producer.offer("A", tokens=20)
    producer.node.run(ev.DrainStarted())
    assert producer.took(local.State) == [local.State(draining=True)]
    producer.open_offer("B", slot=1)
    assert producer.ended("B") == [(1, "draining")]
    assert producer.ended("A") == []
    producer.node.run(ev.DrainStarted())
    assert producer.took(local.State) == []


def test_ping_is_answered(producer: Engine) -> None:
    producer.say(local.Ping(7))
    assert producer.took(local.Pong) == [local.Pong(7)]
