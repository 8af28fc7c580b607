"""Sessions: the shims of this daemon, their memory as described, and their orderly end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvd.core.context import Context
from kvd.core.events import SessionOpened, SessionRegistered
from kvd.core.instructions import ReleaseSession, SendShim
from kvd.protocol import local, peer
from kvd.protocol.codes import Code
from kvd.protocol.types import Geometry, LayerLayout, Rank, Role

if TYPE_CHECKING:
    from kvd.core.attachment import Attachment
    from kvd.core.clients import ClientAttachment
    from kvd.core.fetch import Fetch
    from kvd.core.grant import Request
    from kvd.core.offers import Offer


@dataclass(frozen=True, slots=True)
class Group:
    """The layers that one block table addresses."""

    layers: tuple[int, ...]
    """Global layer indices, ascending."""
    nbytes: tuple[int, ...]
    """Bytes of one block in each of `layers`."""

    @property
    def block_nbytes(self) -> int:
        return sum(self.nbytes)


@dataclass(frozen=True, slots=True)
class Memory:
    """An engine's KV memory, as far as the core has to know it."""

    geometry: Geometry
    num_blocks: int
    segments: tuple[peer.SegmentInfo, ...]
    layers: tuple[LayerLayout, ...]
    fence_slots: int
    groups: tuple[Group, ...]

    @property
    def block_size(self) -> int:
        return self.geometry.block_size


def layers_by_group(layers: tuple[LayerLayout, ...]) -> tuple[Group, ...]:
    count = max((layer.group for layer in layers), default=-1) + 1
    if count > len(layers):
        raise ValueError(f"{count} groups for {len(layers)} layers")
    found: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    for index, layer in enumerate(layers):
        found[layer.group].append((index, sum(region.nbytes for region in layer.regions)))
    return tuple(
        Group(tuple(index for index, _ in group), tuple(nbytes for _, nbytes in group))
        for group in found
    )


@dataclass(slots=True, eq=False)
class Session:
    """One shim's connection. Dead ones stay until no job writes into their memory."""

    id: int
    engine_id: str
    epoch: int
    rank: Rank
    role: Role
    probe: bool = False
    """It only tries peers: each fetch really tries, and what it leaves is forgotten at once."""
    alive: bool = True
    closed: bool = False
    """The shell said that the connection is gone."""
    memory: Memory | None = None
    offers: dict[str, Offer] = field(default_factory=dict)
    requests: dict[str, dict[tuple[int, str], Request]] = field(default_factory=dict)
    """Parked requests of clients, by transfer."""
    clients: dict[tuple[int, str], ClientAttachment] = field(default_factory=dict)
    fetches: dict[str, Fetch] = field(default_factory=dict)
    attachments: dict[Attachment, None] = field(default_factory=dict)
    destinations: list[set[int]] = field(default_factory=list)
    """For each group, block ids into which live fetches may still write."""
    jobs: int = 0

    @property
    def produces(self) -> bool:
        return self.role in ("producer", "both")

    @property
    def consumes(self) -> bool:
        return self.role in ("consumer", "both")


def same_rank(a: Rank, b: Rank) -> bool:
    """Whether two ranks hold the same share of a model; which data-parallel copy is no matter."""
    return (a.pp_rank, a.pp_size, a.tp_rank, a.tp_size) == (
        b.pp_rank,
        b.pp_size,
        b.tp_rank,
        b.tp_size,
    )


class Sessions:
    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.by_id: dict[int, Session] = {}

    def get(self, session: int) -> Session | None:
        """The session, if it is alive."""
        found = self.by_id.get(session)
        return found if found is not None and found.alive else None

    def send(self, session: Session, message: local.ToShim) -> None:
        """Nothing is sent to the dead."""
        if session.alive:
            self._ctx.emit(SendShim(session.id, message))

    def open(self, event: SessionOpened) -> tuple[Session | None, list[Session]]:
        """Let a session in. Returns it, and the sessions that it replaces.

        Of one engine rank the newest epoch wins; within an epoch the newest connection does,
        since a shim has only one.
        """
        if event.session in self.by_id:
            self._ctx.refused(Code.DUPLICATE, "SessionOpened", f"session {event.session}")
            return None, []
        session = Session(
            event.session, event.engine_id, event.epoch, event.rank, event.role, event.probe
        )
        rivals = [
            other
            for other in self.by_id.values()
            if other.alive and other.engine_id == event.engine_id and other.rank == event.rank
        ]
        if any(other.epoch > event.epoch for other in rivals):
            self._turn_away(session, Code.STALE_EPOCH, "a newer epoch of this rank is registered")
            return None, []
        if len(self.by_id) - len(rivals) >= self._ctx.config.max_sessions:
            self._turn_away(session, Code.OVERLOADED, "max_sessions is reached")
            return None, []
        self.by_id[session.id] = session
        if self._ctx.draining:
            self.send(session, local.State(draining=True))
        return session, rivals

    def register(self, event: SessionRegistered) -> Session | None:
        """Enter the memory of a session. Unknown and repeated registrations are recorded."""
        session = self.get(event.session)
        if session is None or session.memory is not None:
            code = Code.NOT_REGISTERED if session is None else Code.DUPLICATE
            self._ctx.refused(code, "SessionRegistered", f"session {event.session}")
            return None
        try:
            groups = layers_by_group(event.layers)
        except ValueError as error:
            self._ctx.refused(Code.BAD_MEMORY, "SessionRegistered", str(error))
            self.send(session, local.Refused(str(Code.BAD_MEMORY), str(error)))
            return None
        session.memory = Memory(
            event.geometry,
            event.num_blocks,
            event.segments,
            event.layers,
            event.fence_slots,
            groups,
        )
        session.destinations = [set() for _ in groups]
        return session

    def release_if_quiet(self, session: Session) -> None:
        """Give a dead session's memory back once no job of ours can touch it."""
        if session.alive or session.jobs or session.fetches:
            return
        if self.by_id.pop(session.id, None) is not None:
            self._ctx.emit(ReleaseSession(session.id))

    def producing(self, engine_id: str) -> list[Session]:
        """Live, registered sessions of an engine, the newest epoch first."""
        found = [
            session
            for session in self.by_id.values()
            if session.alive and session.memory is not None and session.engine_id == engine_id
        ]
        return sorted(found, key=lambda session: (-session.epoch, -session.id))

    def producers(self) -> list[tuple[str, Rank]]:
        """Engine id and rank of all live, registered producers, the newest epoch first."""
        found = [
            session
            for session in self.by_id.values()
            if session.alive and session.memory is not None and session.produces
        ]
        found.sort(key=lambda session: (-session.epoch, -session.id))
        return [(session.engine_id, session.rank) for session in found]

    def meant(self, engine_id: str, any_engine: bool) -> str:
        """The engine that a peer means; with `any_engine` the id may be of an earlier life."""
        if not any_engine or self.producing(engine_id):
            return engine_id
        others = {one for one, _ in self.producers()}
        return others.pop() if len(others) == 1 else engine_id

    def _turn_away(self, session: Session, code: Code, detail: str) -> None:
        self._ctx.refused(code, "SessionOpened", f"{session.engine_id}: {detail}")
        self._ctx.emit(SendShim(session.id, local.Refused(str(code), detail)))
        self._ctx.emit(ReleaseSession(session.id))
