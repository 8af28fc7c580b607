"""Offers whose engine waits for their readers."""

from __future__ import annotations

from kvd.core import events as ev
from kvd.protocol import local, peer
from tests.unit.core.consumer_daemon import Daemon
from tests.unit.core.engine import BLOCK, Engine


def watched(producer: Engine, transfer: str = "t", generation: int = 1) -> None:
    """An offer that grows, two blocks of three given."""
    producer.fence[0] = 77
    producer.say(local.Offer(transfer, generation, 0, 77, 30.0, watched=True))
    producer.give_blocks(transfer, generation, [[1, 2, 3]])
    producer.give_digests(transfer, generation, [BLOCK, 2 * BLOCK, 3 * BLOCK])


def news(producer: Engine) -> list[tuple[int, int]]:
    return [(one.readers, one.tokens) for one in producer.took(local.OfferRead)]


def test_an_engine_that_watches_hears_how_far_all_readers_are(producer: Engine) -> None:
    one, two = Daemon(producer, 901), Daemon(producer, 902)
    watched(producer)
    assert news(producer) == []
    (grant,) = (m for m in one.ask("a", "t", 0, 3 * BLOCK) if isinstance(m, peer.Grant))
    assert grant.report
    two.ask("b", "t", BLOCK, 3 * BLOCK)
    assert news(producer) == [(1, 0), (2, 0)]
    producer.say(local.Extend("t", 1, BLOCK))
    one.say(peer.FetchGot("a", 1, BLOCK))
    assert news(producer) == [(2, BLOCK)]
    producer.say(local.Extend("t", 1, 2 * BLOCK))
    one.say(peer.FetchGot("a", 1, 2 * BLOCK))
    one.say(peer.FetchGot("a", 1, BLOCK))  # late: it never goes back
    assert news(producer) == [], "the other lacks them still"
    two.say(peer.FetchGot("b", 1, 2 * BLOCK))
    assert news(producer) == [(2, 2 * BLOCK)]
    producer.say(local.Seal("t", 1, 3 * BLOCK))
    one.say(peer.FetchGot("a", 1, 3 * BLOCK))
    assert news(producer) == [(1, 2 * BLOCK)], "who has all is waited for no more"
    two.say(peer.FetchClose("b", "cancelled", 0))
    assert news(producer) == [(0, 0)]


def test_a_lost_reader_is_told_at_once(producer: Engine) -> None:
    daemon = Daemon(producer, 901)
    watched(producer)
    daemon.ask("a", "t", 0, 3 * BLOCK)
    assert news(producer) == [(1, 0)]
    producer.node.run(ev.ClientLeft(901, "peer_lost"))
    assert news(producer) == [(0, 0)]


def test_progress_of_another_generation_or_of_nobody_is_late(producer: Engine) -> None:
    daemon = Daemon(producer, 901)
    watched(producer)
    daemon.ask("a", "t", 0, 3 * BLOCK)
    news(producer)
    daemon.say(peer.FetchGot("a", 2, 3 * BLOCK))
    daemon.say(peer.FetchGot("nobody", 1, 3 * BLOCK))
    assert news(producer) == []


def test_nobody_reports_to_an_engine_that_does_not_watch(producer: Engine) -> None:
    daemon = Daemon(producer, 901)
    producer.open_offer("t")
    producer.give_blocks("t", 1, [[1, 2, 3]])
    producer.give_digests("t", 1, [3 * BLOCK])
    (grant,) = (m for m in daemon.ask("a", "t", 0, 3 * BLOCK) if isinstance(m, peer.Grant))
    assert not grant.report
    daemon.say(peer.FetchGot("a", 1, BLOCK))
    assert producer.took(local.OfferRead) == []
