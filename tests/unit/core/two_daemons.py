"""Two cores, the engines' own books, and an oracle: what is told must be so, and everything ends.

The oracle looks at tags. A fetch that is told ok holds, in every block of every layer, what one
generation of its transfer put there; a failed one holds it in each block that is not named bad.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
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
    """What may be done to them. `test_properties.py` does it at random."""

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

    def grow(self, offer: Offered, first: int, count: int, share: float) -> None:
        layers = list(range(first, min(4, first + count))) if count else list(range(4))
        tokens = round(offer.tokens * share)
        self.fill(offer, layers, tokens)
        self.producer.say(
            local.Extend(offer.transfer, offer.generation, tokens, first, len(layers) % 4)
            if len(layers) < 4
            else local.Extend(offer.transfer, offer.generation, tokens)
        )

    def revoke_all(self) -> None:
        for offer in self.offers.values():
            self.producer.fence[offer.slot] = 0
        self.producer.say(local.RevokeAll())
        assert not self.offers

    # --- consumer -------------------------------------------------------------------------------

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

    # --- network and copies -----------------------------------------------------------------------

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
