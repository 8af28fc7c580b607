"""What the core can say about itself: numbers for metrics, lists for `kvd status`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvd.core.attachment import AttachState
from kvd.core.fetch import FetchState
from kvd.core.offers import OfferState

if TYPE_CHECKING:
    from kvd.core.machine import Core


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts at one moment; every state is named, also when nothing is in it."""

    sessions: int
    registered: int
    offers: dict[str, int]
    offered_blocks: int
    fetches: dict[str, int]
    attachments: dict[str, int]
    peers: dict[str, int]
    clients: int
    client_attachments: int
    requests: int
    """Of clients: parked, held or granted."""
    parked: int
    jobs: int
    notifies: int
    tombstones: int
    early_releases: int
    draining: bool
    idle: bool

    @property
    def held(self) -> int:
        """Offers that still hold blocks of an engine."""
        return sum(self.offers.values())


@dataclass(frozen=True, slots=True)
class SessionView:
    session: int
    engine_id: str
    epoch: int
    role: str
    alive: bool
    registered: bool
    offers: int
    fetches: int
    jobs: int


@dataclass(frozen=True, slots=True)
class OfferView:
    engine_id: str
    transfer_id: str
    generation: int
    state: str
    sealed: int | None
    tokens: int
    """Valid in at least one layer."""
    blocks: int
    grants: int
    fetched: int
    ends_in: float | None
    """Seconds; None while grants hold it."""


@dataclass(frozen=True, slots=True)
class FetchView:
    engine_id: str
    fetch_id: str
    transfer_id: str
    generation: int | None
    state: str
    peer: str
    transport: str
    start: int
    end: int
    nbytes: int
    jobs: int
    age: float
    ends_in: float


@dataclass(frozen=True, slots=True)
class AttachmentView:
    attach_id: str
    engine_id: str
    peer: str
    remote_engine_id: str
    state: str
    transport: str
    fetches: int
    jobs: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    sessions: list[SessionView]
    offers: list[OfferView]
    fetches: list[FetchView]
    attachments: list[AttachmentView]


def statistics(core: Core) -> Statistics:
    sessions = core.sessions.by_id.values()
    offers = Counter(offer.state for session in sessions for offer in session.offers.values())
    fetches = Counter(fetch.state for fetch in core.fetches.by_id.values())
    attachments = Counter(one.state for one in core.attachments.by_id.values())
    up = sum(found.up for found in core.peers.by_addr.values())
    return Statistics(
        sessions=len(sessions),
        registered=sum(session.memory is not None for session in sessions),
        offers={str(s): offers[s] for s in OfferState if s is not OfferState.ENDED},
        offered_blocks=core.offers.num_blocks,
        fetches={str(s): fetches[s] for s in FetchState if s is not FetchState.TOLD},
        attachments={str(s): attachments[s] for s in AttachState if s is not AttachState.CLOSED},
        peers={"up": up, "down": len(core.peers.by_addr) - up},
        clients=len(core.clients.by_id),
        client_attachments=core.clients.num_attachments,
        requests=core.grants.count,
        parked=core.grants.parked,
        jobs=len(core.jobs.running),
        notifies=core.peers.num_notifies,
        tombstones=len(core.offers.tombstones),
        early_releases=len(core.offers.early),
        draining=core.draining,
        idle=core.idle,
    )


def snapshot(core: Core) -> Snapshot:
    now = core.ctx.now
    sessions = list(core.sessions.by_id.values())
    offers: list[OfferView] = []
    for session in sessions:
        for offer in session.offers.values():
            ends = core.ctx.deadlines.get(offer.key)
            offers.append(
                OfferView(
                    engine_id=session.engine_id,
                    transfer_id=offer.transfer_id,
                    generation=offer.generation,
                    state=str(offer.state),
                    sealed=offer.sealed,
                    tokens=offer.valid.highest(),
                    blocks=sum(len(blocks) // 4 for blocks in offer.blocks),
                    grants=len(offer.grants),
                    fetched=offer.fetched,
                    ends_in=None if ends is None else ends - now,
                )
            )
    return Snapshot(
        sessions=[
            SessionView(
                session=session.id,
                engine_id=session.engine_id,
                epoch=session.epoch,
                role=session.role,
                alive=session.alive,
                registered=session.memory is not None,
                offers=len(session.offers),
                fetches=len(session.fetches),
                jobs=session.jobs,
            )
            for session in sessions
        ],
        offers=offers,
        fetches=[
            FetchView(
                engine_id=fetch.session.engine_id,
                fetch_id=fetch.id,
                transfer_id=fetch.message.transfer_id,
                generation=fetch.generation,
                state=str(fetch.state),
                peer=str(fetch.message.remote),
                transport=fetch.attachment.transport if fetch.attachment is not None else "",
                start=fetch.message.start,
                end=fetch.message.end,
                nbytes=fetch.received,
                jobs=fetch.jobs,
                age=now - fetch.asked_at,
                ends_in=fetch.deadline - now,
            )
            for fetch in core.fetches.by_id.values()
        ],
        attachments=[
            AttachmentView(
                attach_id=one.id,
                engine_id=one.session.engine_id,
                peer=str(one.peer.addr),
                remote_engine_id=one.engine_id,
                state=str(one.state),
                transport=one.transport,
                fetches=len(one.fetches),
                jobs=one.jobs,
            )
            for one in core.attachments.by_id.values()
        ],
    )
