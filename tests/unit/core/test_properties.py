"""Two cores under random events: nothing wrong is ever told as right, and everything ends."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    precondition,
    rule,
)

from kvd.protocol import local
from kvd.protocol.codes import Code
from tests.unit.core.engine import BLOCK
from tests.unit.core.two_daemons import TRANSFERS, TwoDaemons


class AtRandom(TwoDaemons):
    @initialize()
    def start(self) -> None:
        self.new_producer()
        self.new_consumer()

    # --- producer -------------------------------------------------------------------------------

    @rule(
        transfer=st.sampled_from(TRANSFERS),
        tokens=st.integers(1, 5 * BLOCK),
        whole=st.booleans(),
        lease=st.sampled_from([0.5, 30.0, 30.0, 30.0]),
    )
    def offer(self, transfer: str, tokens: int, whole: bool, lease: float) -> None:
        self.begin(transfer, tokens, whole=whole, lease=lease)

    @precondition(lambda self: any(not one.sealed for one in self.offers.values()))
    @rule(data=st.data(), first=st.integers(0, 3), count=st.integers(0, 4), share=st.floats(0, 1))
    def extend(self, data: st.DataObject, first: int, count: int, share: float) -> None:
        offer = self.live(data, sealed=False)
        assert offer is not None
        self.grow(offer, first, count, share)
        self.world.settle()

    @precondition(lambda self: any(not one.sealed for one in self.offers.values()))
    @rule(data=st.data())
    def finish_prefill(self, data: st.DataObject) -> None:
        offer = self.live(data, sealed=False)
        assert offer is not None
        self.seal(offer)

    @precondition(lambda self: self.offers and (self.d.pulls or self.wanted))
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        offer = self.live(data)
        assert offer is not None
        self.producer.fence[offer.slot] = 0
        self.producer.say(local.Revoke(offer.transfer, offer.generation))
        assert (offer.transfer, offer.generation) not in self.offers

    @precondition(lambda self: self.offers and self.d.pulls)
    @rule(data=st.data())
    def expire_by_own_clock(self, data: st.DataObject) -> None:
        """The shim does not wait for its daemon: it flips the word and uses the blocks again."""
        offer = self.live(data)
        assert offer is not None
        self.drop(offer)
        self.world.post(lambda: self.producer.say(local.Revoke(offer.transfer, offer.generation)))

    # --- consumer -------------------------------------------------------------------------------

    @precondition(lambda self: self.offers)
    @rule(
        transfer=st.sampled_from(TRANSFERS),
        start=st.sampled_from([0, 0, 1, 2]),
        tokens=st.integers(0, 5 * BLOCK),
        aimed=st.sampled_from([True] * 5 + [False]),
        settle=st.sampled_from([True, True, False]),
        named=st.sampled_from([None, None, None, None, 0, 1]),
        park=st.sampled_from([0.0, 3.0, 3.0]),
        deadline=st.sampled_from([0.5, 15.0, 15.0]),
        wrong_prompt=st.sampled_from([False] * 9 + [True]),
        nulls=st.booleans(),
        whole=st.booleans(),
        sole=st.booleans(),
    )
    def fetch(self, transfer: str, **want: Any) -> None:
        self.wish(transfer, **want)

    @precondition(lambda self: self.d.pulls and self.wanted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.consumer.say(local.Cancel(data.draw(st.sampled_from(sorted(self.wanted)))))

    @rule(transfer=st.sampled_from(TRANSFERS), renew=st.booleans(), named=st.booleans())
    def notify(self, transfer: str, renew: bool, named: bool) -> None:
        kind = local.Renew if renew else local.Release
        generation = self.next_generation[transfer] if named else None
        self.consumer.say(kind(transfer, generation, self.p.addr, "P"))

    # --- network and copies -----------------------------------------------------------------------

    @rule(count=st.integers(1, 8))
    def deliver(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @precondition(lambda self: self.d.pulls and any(not o.sealed for o in self.offers.values()))
    @rule(data=st.data())
    def resume_prefill(self, data: st.DataObject) -> None:
        """Preempted and resumed: a newer generation takes the place of one that is streamed."""
        offer = self.live(data, sealed=False)
        assert offer is not None
        self.begin(offer.transfer, offer.tokens, whole=data.draw(st.booleans()), lease=30.0)

    @rule(
        transfer=st.sampled_from(TRANSFERS),
        tokens=st.integers(1, 5 * BLOCK),
        early=st.booleans(),
        share=st.floats(0, 1),
        named=st.sampled_from([None, None, 0]),
        sole=st.booleans(),
    )
    def stream(
        self, transfer: str, tokens: int, early: bool, share: float, named: int | None, sole: bool
    ) -> None:
        """A prefill that is fetched while it runs, asked for before or after it started."""
        self.link_heals()
        want: dict[str, Any] = {
            "start": 0,
            "tokens": tokens,
            "aimed": not early,
            "settle": True,
            "park": 3.0,
            "deadline": 15.0,
            "wrong_prompt": False,
            "nulls": False,
            "sole": sole,
        }
        if early:
            self.wish(transfer, named=1 if named == 0 else None, **want)
        self.begin(transfer, tokens, whole=False, lease=30.0)
        if not early:
            self.wish(transfer, named=named, **want)
        self.world.settle()
        offer = self.offers.get((transfer, self.next_generation[transfer]))
        if offer is not None and not offer.sealed:
            self.grow(offer, 0, 0, share)
        self.world.settle()

    @precondition(lambda self: self.d.pulls)
    @rule(data=st.data(), how=st.sampled_from(["copy", "later", "later", "finish", "break"]))
    def pull(self, data: st.DataObject, how: str) -> None:
        job = data.draw(st.sampled_from(sorted(self.d.pulls)))
        if how == "break":
            fraction = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
            self.world.fail_pull(self.d, job, Code.TRANSPORT_ERROR, fraction)
        elif how == "later":
            answer = self.world.answer_later(self.d, job, copied=job in self.begun)
            self.answers.append(answer)
            self.begun.add(job)
        elif how == "copy":
            self.world.write(self.d, self.d.pulls[job])
            self.begun.add(job)
        else:
            self.world.finish_pull(self.d, job, copied=job in self.begun)

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        self.answers.pop(data.draw(st.integers(0, len(self.answers) - 1)))()

    @precondition(lambda self: self.d.pulls)
    @rule(count=st.integers(1, 6))
    def several_pulls(self, count: int) -> None:
        for job in sorted(self.d.pulls)[:count]:
            self.world.finish_pull(self.d, job, copied=job in self.begun)
            self.world.settle()

    @precondition(lambda self: self.d.pulls)
    @rule()
    def pull_everything(self) -> None:
        while self.d.pulls or self.world.queue:
            self.world.settle()
            for job in sorted(self.d.pulls):
                self.world.finish_pull(self.d, job, copied=job in self.begun)

    @precondition(lambda self: self.d.stopped)
    @rule()
    def stopped_pulls_end(self) -> None:
        for job, pull in sorted(self.d.pulls.items()):
            if pull.fetch_id in self.d.stopped:
                self.world.fail_pull(self.d, job, Code.CANCELLED, 0.5)
        self.d.stopped.clear()

    # --- death and time ---------------------------------------------------------------------------

    @precondition(lambda self: self.d.pulls)
    @rule(
        kind=st.sampled_from(
            [
                "revoke all",
                "transport",
                "link",
                "link",
                "heal",
                "producer",
                "consumer",
                "producer's daemon",
            ]
        ),
        both=st.booleans(),
        heal=st.booleans(),
    )
    def trouble(self, kind: str, both: bool, heal: bool) -> None:
        match kind:
            case "revoke all":
                self.revoke_all()
            case "transport":
                self.transport_breaks()
            case "link":
                self.link_breaks(both, heal)
            case "heal":
                self.link_heals()
            case "producer":
                self.producer_restarts()
            case "consumer":
                self.consumer_restarts()
            case "producer's daemon":
                self.producer_daemon_restarts()

    @rule(seconds=st.sampled_from([0.1, 0.1, 0.1, 1.0, 3.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.advance(seconds)


TestTwoDaemons = AtRandom.TestCase
TestTwoDaemons.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
