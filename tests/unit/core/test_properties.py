"""Two cores under random events: nothing wrong is ever told as right, and everything ends.

The oracle looks at tags. A fetch that is told ok holds, in every block of every layer, what one
generation of its transfer put there; a failed one holds it in each block that is not named bad.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvd.core import events as ev
from kvd.core.config import CoreConfig
from kvd.core.packed import NULL
from kvd.protocol import local
from kvd.protocol.codes import Code
from tests.unit.core.engine import BLOCK, NBYTES, Engine
from tests.unit.core.world import Node, World

GROUPS = (0, 1, 0, 1)
TRANSFERS = ["T0", "T1", "T2"]
NUM_BLOCKS = 24
CONFIG = CoreConfig(
    min_job_bytes=NBYTES,
    max_job_bytes=3 * NBYTES,
    max_shm_job_bytes=3 * NBYTES,
    max_jobs=4,
    max_jobs_per_fetch=3,
    max_jobs_per_attachment=3,
    max_parked=6,
    max_parked_per_peer=4,
    max_tombstones=8,
    max_early_releases=2,
    release_linger_s=1.0,
    park_max_s=4.0,
    fetch_max_s=20.0,
    attach_timeout_s=3.0,
    tombstone_ttl_s=6.0,
    early_release_ttl_s=3.0,
    peer_idle_s=8.0,
)


class Offered:
    """What the producer's shim knows of one offer."""

    def __init__(self, transfer: str, generation: int, slot: int, tokens: int) -> None:
        self.transfer = transfer
        self.generation = generation
        self.slot = slot
        self.tokens = tokens
        self.blocks: list[list[int]] = []
        self.computed = [0] * len(GROUPS)
        self.sealed = False


class Wanted:
    """What the consumer's shim knows of one fetch."""

    def __init__(self, transfer: str, first: int, blocks: list[list[int]]) -> None:
        self.transfer = transfer
        self.first = first
        self.blocks = blocks


class TwoDaemons(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.auto_pull = False
        self.world.auto_stop = False
        self.world.offer_ended = self.on_offer_ended
        self.world.fetch_done = self.on_fetch_done
        self.p: Node = self.world.node("p", CONFIG)
        self.d: Node = self.world.node("d", CONFIG)
        self.producer: Engine
        self.consumer: Engine
        self.epoch = 0
        self.next_generation: Counter[str] = Counter()
        self.next_fetch = 0
        self.offers: dict[tuple[str, int], Offered] = {}
        self.wanted: dict[str, Wanted] = {}
        self.told: Counter[str] = Counter()
        self.ended: Counter[tuple[int, str, int]] = Counter()
        self.answers: list[Callable[[], None]] = []
        """Of jobs that have copied and looked, but whose end the core has yet to hear."""
        self.begun: set[int] = set()
        """Jobs that have copied, and have yet to look at the fence."""

    @initialize()
    def start(self) -> None:
        self.new_producer()
        self.new_consumer()

    def new_producer(self) -> None:
        self.epoch += 1
        self.producer = self.p.engine(
            "P", groups=GROUPS, num_blocks=NUM_BLOCKS, epoch=self.epoch, role="producer"
        )
        self.offers = {}

    def new_consumer(self) -> None:
        self.epoch += 1
        self.consumer = self.d.engine(
            "D", groups=GROUPS, num_blocks=NUM_BLOCKS, epoch=self.epoch, role="consumer"
        )
        self.wanted = {}

    # --- the shims' own books -----------------------------------------------------------------

    def free_blocks(self, used: list[list[int]]) -> list[int]:
        held = {block for blocks in used for block in blocks}
        return [block for block in range(NUM_BLOCKS) if block not in held]

    def source_blocks_used(self) -> list[list[int]]:
        return [ids for offer in self.offers.values() for ids in offer.blocks]

    def drop(self, offer: Offered) -> None:
        """Flip the word, then let the blocks go: from now on anything may be written there."""
        self.producer.fence[offer.slot] = 0
        self.offers.pop((offer.transfer, offer.generation), None)
        for layer, group in enumerate(GROUPS):
            for block in offer.blocks[group]:
                self.producer.memory[group, layer, block] = ("reused", -1, -1)

    def on_offer_ended(self, engine: Engine, message: local.OfferEnded) -> None:
        self.ended[engine.session, message.transfer_id, message.generation] += 1
        key = (message.transfer_id, message.generation)
        assert self.ended[engine.session, *key] == 1, "an offer's end was told twice"
        offer = self.offers.get(key) if engine is self.producer else None
        if offer is not None:
            self.drop(offer)

    def on_fetch_done(self, engine: Engine, message: local.FetchDone) -> None:
        self.told[message.fetch_id] += 1
        assert self.told[message.fetch_id] == 1, "a fetch was told twice"
        assert not any(pull.fetch_id == message.fetch_id for pull in self.d.pulls.values())
        wanted = self.wanted.pop(message.fetch_id)
        for layer, group in enumerate(GROUPS):
            bitmap = message.bad[group]
            assert message.code != Code.OK or not any(bitmap)
            for index, block in enumerate(wanted.blocks[group]):
                if bitmap[index // 8] >> index % 8 & 1 or block == NULL:
                    continue
                tag = engine.memory.get((group, layer, block))
                expected = (wanted.transfer, message.generation, wanted.first + index)
                assert tag == expected, (message, group, layer, block)
            for block in wanted.blocks[group]:
                # The engine uses its blocks again at once.
                engine.memory[group, layer, block] = ("own", -1, -1)

    # --- producer -------------------------------------------------------------------------------

    @rule(
        transfer=st.sampled_from(TRANSFERS),
        tokens=st.integers(1, 5 * BLOCK),
        whole=st.booleans(),
        lease=st.sampled_from([0.5, 30.0, 30.0, 30.0]),
    )
    def offer(self, transfer: str, tokens: int, whole: bool, lease: float) -> None:
        self.begin(transfer, tokens, whole=whole, lease=lease)

    def begin(self, transfer: str, tokens: int, *, whole: bool, lease: float) -> None:
        """Also replaces a live generation of the same transfer, as a resumed prefill does."""
        slots = {offer.slot for offer in self.offers.values()}
        slot = next(slot for slot in range(64) if slot not in slots)
        need = -(-tokens // BLOCK)
        free = self.free_blocks(self.source_blocks_used())
        if len(free) < need:
            return
        self.next_generation[transfer] += 1
        generation = self.next_generation[transfer]
        for older in [one for one in self.offers.values() if one.transfer == transfer]:
            self.producer.fence[older.slot] = 0
        offer = Offered(transfer, generation, slot, tokens)
        offer.blocks = [free[:need], list(reversed(free))[:need]]
        self.offers[transfer, generation] = offer
        watched = generation % 2 == 0
        self.producer.open_offer(transfer, generation, slot=slot, lease=lease, watched=watched)
        if (transfer, generation) not in self.offers:
            return
        self.producer.give_blocks(transfer, generation, offer.blocks)
        marks = sorted({*range(BLOCK, tokens + 1, BLOCK), tokens})
        self.producer.give_digests(transfer, generation, marks)
        if whole:
            self.seal(offer)
        self.world.settle()

    def fill(self, offer: Offered, layers: list[int], tokens: int) -> None:
        for layer in layers:
            offer.computed[layer] = max(offer.computed[layer], tokens)
            group = GROUPS[layer]
            for index in range(-(-offer.computed[layer] // BLOCK)):
                place = (group, layer, offer.blocks[group][index])
                self.producer.memory[place] = (offer.transfer, offer.generation, index)

    def seal(self, offer: Offered) -> None:
        self.fill(offer, list(range(len(GROUPS))), offer.tokens)
        offer.sealed = True
        self.producer.say(local.Seal(offer.transfer, offer.generation, offer.tokens))

    def live(self, data: st.DataObject, sealed: bool | None = None) -> Offered | None:
        found = [one for one in self.offers.values() if sealed is None or one.sealed == sealed]
        return data.draw(st.sampled_from(found)) if found else None

    @precondition(lambda self: any(not one.sealed for one in self.offers.values()))
    @rule(data=st.data(), first=st.integers(0, 3), count=st.integers(0, 4), share=st.floats(0, 1))
    def extend(self, data: st.DataObject, first: int, count: int, share: float) -> None:
        offer = self.live(data, sealed=False)
        assert offer is not None
        self.grow(offer, first, count, share)
        self.world.settle()

    def grow(self, offer: Offered, first: int, count: int, share: float) -> None:
        layers = list(range(first, min(4, first + count))) if count else list(range(4))
        tokens = round(offer.tokens * share)
        self.fill(offer, layers, tokens)
        self.producer.say(
            local.Extend(offer.transfer, offer.generation, tokens, first, len(layers) % 4)
            if len(layers) < 4
            else local.Extend(offer.transfer, offer.generation, tokens)
        )

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

    def revoke_all(self) -> None:
        for offer in self.offers.values():
            self.producer.fence[offer.slot] = 0
        self.producer.say(local.RevokeAll())
        assert not self.offers

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

    def wish(
        self,
        transfer: str,
        *,
        start: int,
        tokens: int,
        aimed: bool,
        settle: bool,
        named: int | None,
        park: float,
        deadline: float,
        wrong_prompt: bool,
        nulls: bool,
        whole: bool = True,
        sole: bool,
    ) -> None:
        live = list(self.offers.values())
        first = start * BLOCK
        end = first + tokens
        if live and aimed:
            transfer, end = live[-1].transfer, live[-1].tokens
        if end < first:
            first = 0
        need = -(-end // BLOCK) - first // BLOCK
        used = [ids for wanted in self.wanted.values() for ids in wanted.blocks]
        free = self.free_blocks(used)
        if len(free) < need:
            return
        self.next_fetch += 1
        fetch_id = f"f{self.next_fetch}"
        blocks = [free[:need], free[:need][::-1]]
        if nulls and need > 1:
            blocks[1][0] = NULL
        self.wanted[fetch_id] = Wanted(transfer, first // BLOCK, blocks)
        self.consumer.fetch(
            fetch_id,
            transfer,
            self.producer,
            start=first,
            end=end,
            blocks=blocks,
            generation=None if named is None else self.next_generation[transfer] + named,
            park=park,
            deadline=deadline,
            prompt="another" if wrong_prompt else transfer,
            whole=whole,
            sole=sole,
        )
        if settle:
            self.world.settle()

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

    def transport_breaks(self) -> None:
        for attach_id in sorted(self.d.transports):
            self.d.run(ev.TransportFailed(attach_id, "transport_error", "broken"))

    def link_breaks(self, both: bool, heal: bool) -> None:
        """One-sided: the producer believes that the consumer is still there."""
        client = self.world.links.get((self.d.addr, self.p.addr))
        if client is None:
            return
        self.world.cut(self.d, self.p, both=both)
        if not both:
            self.world.post(partial(self.world.client_left, self.p, client))
        if heal:
            self.world.post(lambda: self.world.connect(self.d, self.p.addr))

    def link_heals(self) -> None:
        if self.p.addr in self.d.connected:
            self.world.connect(self.d, self.p.addr)

    # --- death and time ---------------------------------------------------------------------------

    def producer_restarts(self) -> None:
        for offer in list(self.offers.values()):
            self.drop(offer)
        self.producer.close()
        self.new_producer()

    def consumer_restarts(self) -> None:
        self.consumer.close()
        self.new_consumer()

    def producer_daemon_restarts(self) -> None:
        for offer in list(self.offers.values()):
            self.drop(offer)
        self.producer.alive = False
        self.world.cut(self.d, self.p, both=False)
        self.p = self.world.node("p", CONFIG, boot=self.p.boot + 1)
        self.new_producer()
        self.world.post(self.link_heals)

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

    # --- what must hold ---------------------------------------------------------------------------

    @invariant()
    def quarantine_is_kept(self) -> None:
        """A job in flight belongs to a fetch that is not told, so its blocks are not free."""
        for pull in self.d.pulls.values():
            engine = self.world.engines[pull.session]
            assert not engine.released
            assert not engine.alive or pull.fetch_id in self.wanted

    def teardown(self) -> None:
        if not hasattr(self, "consumer"):
            return
        self.world.settle()
        self.world.auto_pull = True
        for _ in range(50):
            for job in sorted(self.d.pulls):
                self.world.finish_pull(self.d, job, copied=job in self.begun)
            self.world.settle()
            if not self.d.pulls:
                break
        self.world.advance(CONFIG.fetch_max_s + CONFIG.attach_timeout_s + CONFIG.lease_max_s)
        assert not self.wanted, "a fetch was never told its end"
        assert not self.offers, "an offer was never told its end"
        for node in (self.p, self.d):
            assert node.core.idle
            assert not node.tickets
            assert node.core.statistics().parked == 0
            assert node.core.statistics().client_attachments == 0 or node.clients
        self.world.advance(60.0)
        assert not self.d.connected, "an idle peer is never let go"
        assert not self.d.transports
        for node in (self.p, self.d):
            assert node.core.next_deadline() is None


TestTwoDaemons = TwoDaemons.TestCase
TestTwoDaemons.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
