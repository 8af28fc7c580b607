"""Producer: offers, their leases, and the memory of those that ended.

An offer's state says who holds it: nobody yet (leased), open grants (serving), or the time after
the last grant (lingering). How far prefill has come (`valid`, `sealed`) is apart from that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from kvd.core.context import Context
from kvd.core.remembered import Remembered
from kvd.core.sessions import Memory, Session, Sessions
from kvd.core.transitions import Story, Table, new_story
from kvd.core.watermarks import Watermarks
from kvd.protocol import local
from kvd.protocol.codes import Code

if TYPE_CHECKING:
    from kvd.core.grant import Request
    from kvd.core.grants import Grants


class OfferState(StrEnum):
    LEASED = "leased"
    SERVING = "serving"
    LINGERING = "lingering"
    ENDED = "ended"


class OfferEvent(StrEnum):
    GRANT_OPENED = "grant opened"
    LAST_CLOSED = "last grant closed"
    RENEWED = "renewed"
    RELEASED = "released"
    LAPSED = "time passed"
    STOPPED = "stopped"


class Closing(Enum):
    """Argument of LAST_CLOSED: how the last grant ended."""

    FAILED = "failed"
    FETCHED = "fetched"
    """Others may want it too: with `n` > 1 several requests share one transfer."""
    FOR_GOOD = "for good"
    """It was fetched, and its consumer knows of no other."""


@dataclass(slots=True, eq=False)
class Offer:
    session: Session
    memory: Memory
    transfer_id: str
    generation: int
    slot: int
    word: int
    lease_s: float
    lease_until: float
    valid: Watermarks
    blocks: list[bytearray]
    """Packed ids for each group, from the transfer's first block."""
    digests: dict[int, bytes] = field(default_factory=dict)
    sealed: int | None = None
    """Tokens in all, once the offer is complete."""
    renewable_until: float = 0.0
    """Renewals do not hold it for longer."""
    grants: dict[tuple[int, str], Request] = field(default_factory=dict)
    fetched: int = 0
    """Fetches that closed with ok."""
    delivered: bool = False
    """Whether a consumer has got it, or said that it needs none of it."""
    watched: bool = False
    told_readers: tuple[int, int] = (0, 0)
    state: OfferState = OfferState.LEASED
    story: Story = field(default_factory=new_story)
    moving: bool = False

    @property
    def label(self) -> str:
        return f"{self.transfer_id}#{self.generation}"

    @property
    def key(self) -> tuple[str, int, str]:
        return ("offer", self.session.id, self.transfer_id)


@dataclass(slots=True)
class Tombstone:
    """The newest generation of a transfer that ended, and why."""

    generation: int
    reason: Code


@dataclass(frozen=True, slots=True)
class Stop:
    """Argument of STOPPED. `again`: fetches that named no generation wait for the next one."""

    reason: Code
    again: bool = False


@dataclass(frozen=True, slots=True)
class EarlyRelease:
    """A release that came before its offer; None releases any generation."""

    generation: int | None


class Offers:
    def __init__(self, ctx: Context, sessions: Sessions) -> None:
        self.ctx = ctx
        self._sessions = sessions
        self.grants: Grants
        self.count = 0
        self.num_blocks = 0
        """Block ids held by all offers together."""
        config = ctx.config
        self.tombstones: Remembered[tuple[int, str], Tombstone] = Remembered(
            config.tombstone_ttl_s, config.max_tombstones
        )
        self.early: Remembered[tuple[str, str], EarlyRelease] = Remembered(
            config.early_release_ttl_s, config.max_early_releases
        )

    def fire(self, offer: Offer, event: OfferEvent, arg: object = None) -> None:
        OFFERS.fire(self, offer, event, self.ctx.now, arg)

    # --- from the shim ----------------------------------------------------------------------

    def open(self, session: Session, message: local.Offer) -> None:
        transfer_id, generation = message.transfer_id, message.generation
        live = session.offers.get(transfer_id)
        tomb = self.tombstones.get((session.id, transfer_id), self.ctx.now)
        if live is not None and live.generation == generation:
            # The live one stands, and its end is still to be told: telling one now for the same
            # generation would make two.
            self.ctx.refused(Code.DUPLICATE, "Offer", live.label)
            return
        newest = max(
            live.generation if live is not None else -1,
            tomb.generation if tomb is not None else -1,
        )
        if generation <= newest:
            code = Code.DUPLICATE if generation == newest else Code.STALE_GENERATION
            self._refuse(session, message, code, f"{newest} was offered")
            return
        if live is not None:
            self.fire(live, OfferEvent.STOPPED, Stop(Code.REVOKED, again=True))
        problem = self._problem(session, message)
        if problem is not None:
            self._refuse(session, message, *problem)
            return
        assert session.memory is not None
        self._enter(session, session.memory, message)

    def _problem(self, session: Session, message: local.Offer) -> tuple[Code, str] | None:
        memory, config = session.memory, self.ctx.config
        if memory is None:
            return Code.NOT_REGISTERED, "the session has described no memory"
        if self.ctx.draining:
            return Code.DRAINING, "this daemon takes no new offers"
        if not session.produces:
            return Code.UNSUPPORTED, f"role {session.role} offers nothing"
        if message.slot >= memory.fence_slots:
            return Code.BAD_MESSAGE, f"slot {message.slot} of {memory.fence_slots} fence slots"
        if message.word == 0:
            return Code.BAD_MESSAGE, "fence word 0 means that nothing is offered"
        if self.count >= config.max_offers:
            return Code.OVERLOADED, "max_offers is reached"
        return None

    def _enter(self, session: Session, memory: Memory, message: local.Offer) -> None:
        lease = min(message.lease_s, self.ctx.config.lease_max_s)
        offer = Offer(
            session,
            memory,
            message.transfer_id,
            message.generation,
            message.slot,
            message.word,
            lease,
            # Prefill may take long: the lease runs from its end, and until then this bounds it.
            self.ctx.now + self.ctx.config.lease_max_s,
            Watermarks(len(memory.layers)),
            [bytearray() for _ in memory.groups],
            watched=message.watched,
        )
        session.offers[offer.transfer_id] = offer
        self.count += 1
        self.ctx.deadlines.set(offer.key, offer.lease_until)
        self.grants.offer_opened(offer)
        self._apply_early_release(offer)

    def _apply_early_release(self, offer: Offer) -> None:
        key = (offer.session.engine_id, offer.transfer_id)
        early = self.early.get(key, self.ctx.now)
        if early is None:
            return
        if early.generation is None or early.generation <= offer.generation:
            self.early.drop(key)
        if early.generation in (None, offer.generation):
            self.fire(offer, OfferEvent.RELEASED)

    def revoke(self, session: Session, message: local.Revoke) -> None:
        offer = self.live(session, message.transfer_id, message.generation, "Revoke")
        if offer is not None:
            self.fire(offer, OfferEvent.STOPPED, Stop(Code.REVOKED, again=offer.sealed is None))

    def stop_all(self, session: Session, reason: Code) -> None:
        for offer in list(session.offers.values()):
            again = reason is Code.REVOKED and offer.sealed is None
            self.fire(offer, OfferEvent.STOPPED, Stop(reason, again))

    def live(self, session: Session, transfer_id: str, generation: int, what: str) -> Offer | None:
        """The live offer of that very generation; anything else is recorded as late."""
        offer = session.offers.get(transfer_id)
        if offer is None or offer.generation != generation:
            self.ctx.late(what)
            return None
        return offer

    def refuse_live(self, offer: Offer, code: Code, detail: str) -> None:
        """End an offer whose producer sent something that cannot be."""
        self.ctx.refused(code, "offer", f"{offer.label}: {detail}")
        self.fire(offer, OfferEvent.STOPPED, Stop(code))

    # --- from peers -------------------------------------------------------------------------

    def release(self, engine_id: str, transfer_id: str, generation: int | None) -> Code:
        """A consumer does not need this transfer. One that is not there yet is remembered."""
        offers = self._named(engine_id, transfer_id)
        code = Code.OK
        for offer in offers:
            if generation is None or generation == offer.generation:
                self.fire(offer, OfferEvent.RELEASED)
            elif generation < offer.generation:
                code = Code.STALE_GENERATION
            else:
                self._remember_release(engine_id, transfer_id, generation)
        if not offers and not self._released_before(engine_id, transfer_id, generation):
            self._remember_release(engine_id, transfer_id, generation)
        return code

    def renew(self, engine_id: str, transfer_id: str, generation: int | None) -> Code:
        offers = self._named(engine_id, transfer_id)
        if not offers:
            return Code.UNKNOWN_TRANSFER
        code = Code.OK
        for offer in offers:
            if generation is None or generation == offer.generation:
                self.fire(offer, OfferEvent.RENEWED)
            elif generation < offer.generation:
                code = Code.STALE_GENERATION
            else:
                code = Code.UNKNOWN_TRANSFER
        return code

    def tombstone(self, session: Session, transfer_id: str) -> Tombstone | None:
        return self.tombstones.get((session.id, transfer_id), self.ctx.now)

    def lapse(self, session_id: int, transfer_id: str) -> None:
        """The deadline of an offer came."""
        session = self._sessions.get(session_id)
        offer = session.offers.get(transfer_id) if session is not None else None
        if offer is not None:
            self.fire(offer, OfferEvent.LAPSED)

    # --- within -----------------------------------------------------------------------------

    def _named(self, engine_id: str, transfer_id: str) -> list[Offer]:
        return [
            session.offers[transfer_id]
            for session in self._sessions.producing(engine_id)
            if transfer_id in session.offers
        ]

    def _released_before(self, engine_id: str, transfer_id: str, generation: int | None) -> bool:
        """Whether what a release asks for has ended already, so that no offer for it can come."""
        for session in self._sessions.producing(engine_id):
            tomb = self.tombstone(session, transfer_id)
            if tomb is None:
                continue
            if generation is not None and generation <= tomb.generation:
                return True
            if generation is None and tomb.reason is not Code.REVOKED:
                return True
        return False

    def _remember_release(self, engine_id: str, transfer_id: str, generation: int | None) -> None:
        self.early.put((engine_id, transfer_id), EarlyRelease(generation), self.ctx.now)

    def _refuse(self, session: Session, message: local.Offer, code: Code, detail: str) -> None:
        label = f"{message.transfer_id}#{message.generation}"
        self.ctx.refused(code, "Offer", f"{label}: {detail}")
        self._bury(session, message.transfer_id, message.generation, code)
        if code not in (Code.STALE_GENERATION, Code.DUPLICATE):
            self.grants.offer_refused(session, message.transfer_id, message.generation, code)

    def _bury(self, session: Session, transfer_id: str, generation: int, reason: Code) -> None:
        """Tell the end of one generation, and remember that it was told."""
        key = (session.id, transfer_id)
        tomb = self.tombstones.get(key, self.ctx.now)
        if tomb is None:
            tomb = Tombstone(generation, reason)
        elif generation > tomb.generation:
            tomb.generation, tomb.reason = generation, reason
        self.tombstones.put(key, tomb, self.ctx.now)
        self._sessions.send(session, local.OfferEnded(transfer_id, generation, str(reason)))

    def finish(self, offer: Offer, stop: Stop) -> OfferState:
        """What every way to the end does, within a move."""
        requests = list(offer.grants.values())
        offer.grants.clear()
        del offer.session.offers[offer.transfer_id]
        self.count -= 1
        self.num_blocks -= sum(len(blocks) // 4 for blocks in offer.blocks)
        self.ctx.deadlines.clear(offer.key)
        # Nobody may get a new read of these blocks once the shim hears that they are free.
        self.grants.offer_ended(offer, requests, stop)
        if offer.session.alive:
            self._bury(offer.session, offer.transfer_id, offer.generation, stop.reason)
        self.ctx.record(
            "offer_ended",
            reason=str(stop.reason),
            transfer_id=offer.transfer_id,
            generation=offer.generation,
            engine_id=offer.session.engine_id,
            fetches=offer.fetched,
        )
        return OfferState.ENDED

    def sealed(self, offer: Offer) -> None:
        """It is complete: the lease begins."""
        offer.lease_until = self.ctx.now + offer.lease_s
        offer.renewable_until = self.ctx.now + self.ctx.config.lease_max_s
        if offer.state is OfferState.LEASED:
            self.hold_until(offer, offer.lease_until)

    def hold_until(self, offer: Offer, when: float) -> None:
        self.ctx.deadlines.set(offer.key, when)

    def linger_until(self, offer: Offer, failed: bool) -> float:
        """How long an offer is held after its last grant; after a failure another may come."""
        linger = self.ctx.now + self.ctx.config.release_linger_s
        return max(linger, offer.lease_until) if failed else linger


OFFERS: Table[Offers, Offer] = Table("offer", OfferState.LEASED)
_HELD = (OfferState.LEASED, OfferState.SERVING, OfferState.LINGERING)


@OFFERS.on(_HELD, OfferEvent.GRANT_OPENED, OfferState.SERVING)
def _grant_opened(offers: Offers, offer: Offer, _: object) -> OfferState:
    # Open grants hold the offer; each has a deadline of its own.
    offers.ctx.deadlines.clear(offer.key)
    return OfferState.SERVING


@OFFERS.on(OfferState.SERVING, OfferEvent.LAST_CLOSED, OfferState.LINGERING, OfferState.ENDED)
def _last_closed(offers: Offers, offer: Offer, closing: Closing) -> OfferState:
    if closing is Closing.FOR_GOOD:
        return offers.finish(offer, Stop(Code.RELEASED))
    offers.hold_until(offer, offers.linger_until(offer, closing is Closing.FAILED))
    return OfferState.LINGERING


@OFFERS.on(OfferState.LEASED, OfferEvent.RENEWED)
@OFFERS.on(OfferState.SERVING, OfferEvent.RENEWED)
@OFFERS.on(OfferState.LINGERING, OfferEvent.RENEWED)
def _renewed(offers: Offers, offer: Offer, _: object) -> OfferState:
    if offer.sealed is not None:
        offer.lease_until = min(offers.ctx.now + offer.lease_s, offer.renewable_until)
    if offer.state is not OfferState.SERVING:
        current = offers.ctx.deadlines.get(offer.key) or 0.0
        offers.hold_until(offer, max(current, offer.lease_until))
    return offer.state


@OFFERS.on(OfferState.LEASED, OfferEvent.RELEASED, OfferState.ENDED)
def _released_unfetched(offers: Offers, offer: Offer, _: object) -> OfferState:
    return offers.finish(offer, Stop(Code.RELEASED))


@OFFERS.on(OfferState.SERVING, OfferEvent.RELEASED)
def _released_while_serving(offers: Offers, offer: Offer, _: object) -> OfferState:
    offer.delivered = True
    # One consumer is through with it; those that still read decide.
    return OfferState.SERVING


@OFFERS.on(OfferState.LINGERING, OfferEvent.RELEASED)
def _released_while_lingering(offers: Offers, offer: Offer, _: object) -> OfferState:
    offer.delivered = True
    current = offers.ctx.deadlines.get(offer.key)
    linger = offers.linger_until(offer, failed=False)
    offers.hold_until(offer, linger if current is None else min(current, linger))
    return OfferState.LINGERING


@OFFERS.on(OfferState.LEASED, OfferEvent.LAPSED, OfferState.ENDED)
def _lease_passed(offers: Offers, offer: Offer, _: object) -> OfferState:
    return offers.finish(offer, Stop(Code.EXPIRED))


@OFFERS.on(OfferState.LINGERING, OfferEvent.LAPSED, OfferState.ENDED)
def _linger_passed(offers: Offers, offer: Offer, _: object) -> OfferState:
    # If no fetch ever came through, the transfer was not delivered: say so.
    return offers.finish(offer, Stop(Code.RELEASED if offer.delivered else Code.EXPIRED))


@OFFERS.on(_HELD, OfferEvent.STOPPED, OfferState.ENDED)
def _stopped(offers: Offers, offer: Offer, stop: Stop) -> OfferState:
    return offers.finish(offer, stop)
