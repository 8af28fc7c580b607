"""Producer: requests of consumers' daemons."""

from __future__ import annotations

import pytest

from kvd.core import events as ev
from kvd.core import instructions as ins
from kvd.core.config import CoreConfig
from kvd.core.packed import NULL, pack, unpack
from kvd.protocol import local, peer
from kvd.protocol.codes import Code
from kvd.protocol.types import Stages, Watermark
from tests.unit.core.consumer_daemon import Daemon, code_of, granted
from tests.unit.core.engine import NBYTES, Engine
from tests.unit.core.world import World


def test_a_grant_names_the_blocks_of_its_range(producer: Engine, daemon: Daemon) -> None:
    producer.offer("T", 4, tokens=70, blocks=[[9, 8, 7, 6, 5]], slot=3)
    (grant,) = daemon.ask("f", "T", 32, 64)
    assert isinstance(grant, peer.Grant)
    assert grant.generation == 4
    assert grant.blocks == [pack([7, 6])]
    assert grant.valid == [Watermark(0, 3, 64)]
    assert grant.sealed
    assert (grant.fence_slot, grant.fence_word) == (3, producer.fence[3])


def test_the_ticket_is_open_before_the_grant_is_sent(producer: Engine, daemon: Daemon) -> None:
    producer.offer("T", tokens=20)
    producer.node.log.clear()
    daemon.ask("f", "T", 0, 20)
    kinds = [type(one) for one in producer.node.log]
    assert kinds.index(ins.OpenTicket) < kinds.index(ins.SendClient)
    opened = next(one for one in producer.node.log if isinstance(one, ins.OpenTicket))
    assert opened.valid == (Watermark(0, 3, 20),)
    assert opened.first_index == 0


@pytest.mark.parametrize(
    ("start", "end", "code"),
    [
        (8, 32, "unaligned_range"),
        (32, 32, "unaligned_range"),
        (48, 32, "unaligned_range"),
        (0, 24, "unaligned_range"),
        (0, 64, "range_not_held"),
        (0, 2**40, "range_not_held"),
        (0, 40, None),
        (0, 32, None),
    ],
)
def test_ranges(producer: Engine, daemon: Daemon, start: int, end: int, code: str | None) -> None:
    producer.offer("T", tokens=40)
    heard = daemon.ask("f", "T", start, end, park=5.0)
    if code is None:
        assert isinstance(heard[0], peer.Grant)
    else:
        assert code_of(heard) == code
        assert producer.node.tickets == {}


def test_another_prompt_is_refused(producer: Engine, daemon: Daemon) -> None:
    producer.offer("T", tokens=40, prompt="a")
    assert code_of(daemon.ask("f", "T", 0, 32, prompt="b")) == "prompt_mismatch"
    assert isinstance(daemon.ask("g", "T", 0, 32, prompt="a")[0], peer.Grant)


def test_a_sealed_offer_without_the_digest_is_refused(producer: Engine, daemon: Daemon) -> None:
    producer.open_offer("T")
    producer.give_blocks("T", 1, [[1, 2]])
    producer.say(local.Seal("T", 1, 32))
    assert code_of(daemon.ask("f", "T", 0, 32)) == "prompt_mismatch"


def test_a_streamed_offer_is_granted_once_its_digest_is_known(
    producer: Engine, daemon: Daemon
) -> None:
    producer.open_offer("T")
    producer.give_blocks("T", 1, [[1, 2]])
    producer.say(local.Extend("T", 1, 16))
    assert daemon.ask("f", "T", 0, 32) == []
    producer.give_digests("T", 1, [32])
    grant = daemon.hears(peer.Grant)
    assert grant.valid == [Watermark(0, 3, 16)]
    assert not grant.sealed


def test_a_held_request_hears_of_another_prompt(producer: Engine, daemon: Daemon) -> None:
    producer.open_offer("T")
    assert daemon.ask("f", "T", 0, 32) == []
    producer.give_digests("T", 1, [32], prompt="another")
    assert daemon.hears(peer.FetchRefused).code == "prompt_mismatch"


def test_news_are_told_and_nothing_else(producer: Engine, daemon: Daemon) -> None:
    producer.open_offer("T")
    producer.give_digests("T", 1, [32, 48, 60])
    producer.give_blocks("T", 1, [[1, 2]])
    (grant,) = daemon.ask("f", "T", 16, 48)
    assert isinstance(grant, peer.Grant)
    assert (grant.blocks, grant.valid) == ([pack([2])], [])
    producer.say(local.Extend("T", 1, 32, 0, 1))
    news = daemon.hears(peer.Progress)
    assert (news.blocks, news.valid) == ([b""], [Watermark(0, 1, 32)])
    producer.say(local.Extend("T", 1, 20, 0, 1))
    assert daemon.heard() == []
    producer.give_blocks("T", 1, [[3, 4]], first=2)
    assert daemon.heard() == []
    producer.say(local.Extend("T", 1, 48))
    news = daemon.hears(peer.Progress)
    assert news.blocks == [pack([3])]
    assert news.valid == [Watermark(0, 1, 48), Watermark(1, 2, 48)]
    held = producer.node.tickets[grant.ticket]
    assert held.blocks == [pack([2, 3])]
    assert held.valid == {0: 48, 1: 48, 2: 48}
    producer.say(local.Seal("T", 1, 60))
    assert daemon.heard() == []


def test_a_seal_shows_that_a_streamed_range_was_wrong(producer: Engine, daemon: Daemon) -> None:
    producer.open_offer("T")
    producer.give_digests("T", 1, [24, 64])
    producer.give_blocks("T", 1, [[1, 2, 3]])
    assert isinstance(daemon.ask("f", "T", 0, 64)[0], peer.Grant)
    assert isinstance(daemon.ask("g", "T", 0, 24)[0], peer.Grant)
    producer.say(local.Seal("T", 1, 40))
    revoked = {m.fetch_id: m for m in daemon.heard() if isinstance(m, peer.FetchRevoked)}
    assert (revoked["f"].code, revoked["f"].again) == ("range_not_held", False)
    assert (revoked["g"].code, revoked["g"].again) == ("unaligned_range", False)
    assert producer.node.tickets == {}


def test_null_source_blocks_are_passed_on(world: World) -> None:
    producer = world.node("p").engine("P")
    daemon = Daemon(producer)
    producer.offer("T", tokens=48, blocks=[[NULL, NULL, 4]])
    (grant,) = daemon.ask("f", "T", 0, 48)
    assert isinstance(grant, peer.Grant)
    assert list(unpack(grant.blocks[0])) == [NULL, NULL, 4]
    daemon.say(peer.FetchClose("f", "ok", 0))
    assert producer.node.recorded("fetch_served")[0]["nbytes"] == 3 * NBYTES


def test_an_unknown_transfer_is_waited_for(world: World, producer: Engine, daemon: Daemon) -> None:
    assert code_of(daemon.ask("now", "T", 0, 32)) == "unknown_transfer"
    assert daemon.ask("later", "T", 0, 32, park=2.0) == []
    assert daemon.ask("never", "U", 0, 32, park=2.0) == []
    world.advance(1.0)
    producer.offer("T", tokens=32)
    assert granted(daemon).fetch_id == "later"
    world.advance(1.1)
    refused = daemon.hears(peer.FetchRefused)
    assert (refused.fetch_id, refused.code) == ("never", "unknown_transfer")


def test_parking_is_bounded_in_time_and_number(world: World) -> None:
    config = CoreConfig(park_max_s=3.0, max_parked=2)
    daemon = Daemon(world.node("p", config).engine("P"))
    assert daemon.ask("a", "T", 0, 32, park=1000) == []
    assert daemon.ask("b", "T", 0, 32, park=1000) == []
    assert code_of(daemon.ask("c", "T", 0, 32, park=1000)) == "overloaded"
    world.advance(3.1)
    assert [getattr(m, "code", "") for m in daemon.heard()] == ["unknown_transfer"] * 2
    assert daemon.producer.node.core.idle


def test_what_one_peer_may_park_is_bounded_over_all_its_daemons(world: World) -> None:
    config = CoreConfig(park_max_s=3.0, max_parked=10, max_parked_per_peer=2)
    producer = world.node("p", config).engine("P")
    one, other = (Daemon(producer, n, peer_name="10.0.0.1") for n in (1, 2))
    good = Daemon(producer, 3, peer_name="10.0.0.2")
    assert one.ask("a", "T", 0, 32, park=9) == []
    assert other.ask("b", "T", 0, 32, park=9) == []
    (refused,) = one.ask("c", "T", 0, 32, park=9)
    assert isinstance(refused, peer.FetchRefused)
    assert (refused.code, refused.detail) == ("overloaded", "max_parked_per_peer is reached")
    assert good.ask("d", "T", 0, 32, park=9) == []
    # One that leaves gives back what it had.
    producer.node.run(ev.ClientLeft(2, Code.PEER_LOST))
    assert one.ask("e", "T", 0, 32, park=9) == []


def test_what_one_peer_may_read_at_once_is_bounded(world: World) -> None:
    two_blocks = 2 * 3 * NBYTES  # in three layers
    config = CoreConfig(max_bytes_per_peer=2 * two_blocks, park_max_s=9.0)
    producer = world.node("p", config).engine("P")
    one, other = (Daemon(producer, n, peer_name="10.0.0.1") for n in (1, 2))
    good = Daemon(producer, 3, peer_name="10.0.0.2")
    producer.offer("T", tokens=32)
    assert isinstance(one.ask("a", "T", 0, 32)[0], peer.Grant)
    assert isinstance(other.ask("b", "T", 0, 32)[0], peer.Grant)
    (refused,) = one.ask("c", "T", 0, 32)
    assert isinstance(refused, peer.FetchRefused)
    assert refused.code == "overloaded"
    assert "max_bytes_per_peer" in refused.detail
    # A parked one is told the same when its turn comes.
    assert one.ask("later", "U", 0, 32, park=9) == []
    producer.offer("U", tokens=32, slot=1)
    assert code_of(one.heard()) == "overloaded"
    assert isinstance(good.ask("d", "T", 0, 32)[0], peer.Grant)
    one.say(peer.FetchClose("a", "ok", two_blocks))
    assert isinstance(one.ask("e", "T", 0, 32)[0], peer.Grant)


def test_what_was_served_is_counted_by_the_producer(producer: Engine, daemon: Daemon) -> None:
    producer.offer("T", tokens=40)
    daemon.ask("f", "T", 16, 40)
    daemon.say(peer.FetchClose("f", "ok", 1))
    served = producer.node.recorded("fetch_served")[-1]
    assert served["nbytes"] == 2 * 3 * NBYTES
    assert (served["code"], served["transport"]) == ("ok", "shm")
    assert producer.node.tickets == {}


def stages(producer: Engine) -> dict[str, float]:
    """Of what was served last, in seconds since it was asked for; -1 is not known."""
    served = producer.node.recorded("fetch_served")[-1]
    told, seconds = served["stages"], served["seconds"]
    assert isinstance(told, Stages)
    assert isinstance(seconds, float)
    found = {name: getattr(told, name) for name in told.__struct_fields__} | {"told": seconds}
    return {name: round(value, 6) for name, value in found.items()}


def read(producer: Engine, ticket: bytes) -> None:
    producer.node.run(ev.TicketRead(ticket))


def test_stages_of_what_a_consumer_read_by_itself(
    world: World, producer: Engine, daemon: Daemon
) -> None:
    producer.offer("T", tokens=32)
    world.advance(1.0)
    daemon.ask("f", "T", 0, 32)
    world.advance(0.5)
    daemon.say(peer.FetchClose("f", "ok", 1))
    assert stages(producer) == {
        "parked": -1, "granted": 0, "first_byte": -1, "last_byte": -1, "told": 0.5,
    }  # fmt: skip


def test_stages_of_what_waited_and_was_sent_from_here(
    world: World, producer: Engine, daemon: Daemon
) -> None:
    assert daemon.ask("f", "T", 0, 32, park=9.0) == []
    world.advance(1.0)
    producer.offer("T", tokens=32)
    grant = granted(daemon)
    for _ in range(3):
        world.advance(0.25)
        read(producer, grant.ticket)
    world.advance(0.5)
    daemon.say(peer.FetchClose("f", "transport_error", 1))
    assert stages(producer) == {
        "parked": 0, "granted": 1, "first_byte": 1.25, "last_byte": 1.75, "told": 2.25,
    }  # fmt: skip
    # What is told late, or of a ticket that nobody was given, changes nothing.
    read(producer, grant.ticket)
    read(producer, bytes(16))


def test_stages_of_what_waited_for_a_digest(world: World, producer: Engine, daemon: Daemon) -> None:
    producer.open_offer("T", 1)
    assert daemon.ask("f", "T", 0, 32) == []
    world.advance(2.0)
    producer.give_digests("T", 1, [32])
    daemon.say(peer.FetchClose("f", "ok", 1))
    assert stages(producer) == {
        "parked": 0, "granted": 2, "first_byte": -1, "last_byte": -1, "told": 2,
    }  # fmt: skip


def test_stages_are_those_of_the_generation_that_was_served(
    world: World, producer: Engine, daemon: Daemon
) -> None:
    producer.open_offer("T", 1)
    producer.give_digests("T", 1, [32])
    first = daemon.ask("f", "T", 0, 32)[0]
    assert isinstance(first, peer.Grant)
    world.advance(1.0)
    read(producer, first.ticket)
    producer.say(local.Revoke("T", 1))
    world.advance(1.0)
    producer.offer("T", 2, tokens=32)
    second = granted(daemon)
    world.advance(1.0)
    read(producer, first.ticket)
    daemon.say(peer.FetchClose("f", "transport_error", 1))
    assert second.generation == 2
    assert stages(producer) == {
        "parked": 1, "granted": 2, "first_byte": -1, "last_byte": -1, "told": 3,
    }  # fmt: skip


def test_the_number_of_served_fetches_is_bounded(world: World) -> None:
    daemon = Daemon(world.node("p", CoreConfig(max_fetches=2)).engine("P"))
    daemon.producer.offer("T", tokens=32)
    assert isinstance(daemon.ask("a", "T", 0, 32)[0], peer.Grant)
    assert isinstance(daemon.ask("b", "T", 0, 32)[0], peer.Grant)
    assert code_of(daemon.ask("c", "T", 0, 32)) == "overloaded"
