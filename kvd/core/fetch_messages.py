"""Consumer: what the shim and the producer say about fetches, checked before it moves anything."""

from __future__ import annotations

from kvd.core.attachments import Attachments
from kvd.core.context import Context, Refusal, failure_code
from kvd.core.fetch import Fetch, FetchEvent, FetchState
from kvd.core.fetches import Fetches
from kvd.core.jobs import Jobs
from kvd.core.packed import NULL, unpack
from kvd.core.peers import Peer
from kvd.core.sessions import Memory, Session, Sessions
from kvd.protocol import local, peer
from kvd.protocol.codes import Code
from kvd.protocol.types import Stages

MAX_FETCH_BLOCKS = 2**18
"""Of all groups together: the bitmaps of FetchDone must fit into one local frame."""


class Wishes:
    """From the shim."""

    def __init__(self, ctx: Context, sessions: Sessions, fetches: Fetches, jobs: Jobs) -> None:
        self._ctx = ctx
        self._sessions = sessions
        self._fetches = fetches
        self._jobs = jobs

    def fetch(self, session: Session, message: local.Fetch) -> None:
        live = self._fetches.by_id.get(message.fetch_id)
        told = self._fetches.told.get((session.id, message.fetch_id), self._ctx.now)
        if told or (live is not None and live.session is session):
            # An id is told once: a second answer would end the first one's story twice.
            self._ctx.refused(Code.DUPLICATE, "Fetch", message.fetch_id)
            return
        if live is not None:
            self._answer_foreign(session, message)
            return
        memory, config = session.memory, self._ctx.config
        problem = self._problem(session, message)
        count = 0
        if memory is not None and message.start <= message.end:
            wanted = -(-message.end // memory.block_size) - message.start // memory.block_size
            count = min(wanted, memory.num_blocks)
        fetch = Fetch(
            session,
            message,
            count,
            [bytearray() for _ in (memory.groups if memory is not None else ())],
            deadline=self._ctx.now + config.fetch_max_s,
            asked_at=self._ctx.now,
        )
        self._fetches.enter(fetch)
        if problem is not None:
            self._fetches.fail(fetch, problem.code, problem.detail)
        elif message.blocks is not None:
            self._whole(session, fetch, message.blocks)

    def _whole(self, session: Session, fetch: Fetch, blocks: list[bytes]) -> None:
        """A fetch that came with all of its blocks."""
        for group, packed in enumerate(blocks):
            detail = self._add(fetch, group, 0, packed)
            if detail:
                self._fetches.fail(fetch, Code.BAD_MESSAGE, detail)
                return
        self._start(session, fetch)

    def _answer_foreign(self, session: Session, message: local.Fetch) -> None:
        detail = "another engine of this daemon uses this fetch id now"
        self._fetches.told.put((session.id, message.fetch_id), True, self._ctx.now)
        self._ctx.refused(Code.DUPLICATE, "Fetch", message.fetch_id)
        done = local.FetchDone(
            fetch_id=message.fetch_id,
            code=str(Code.DUPLICATE),
            detail=detail,
            generation=message.generation or 0,
            bad=[],
            tokens=0,
            nbytes=0,
            transport="",
            stages=Stages(),
        )
        self._sessions.send(session, done)

    def _problem(self, session: Session, message: local.Fetch) -> Refusal | None:
        memory = session.memory
        if memory is None:
            return Refusal(Code.NOT_REGISTERED, "the session has described no memory")
        if self._ctx.draining:
            return Refusal(Code.DRAINING, "this daemon takes no new fetches")
        if not session.consumes:
            return Refusal(Code.UNSUPPORTED, f"role {session.role} fetches nothing")
        if len(self._fetches.by_id) >= self._ctx.config.max_fetches:
            return Refusal(Code.OVERLOADED, "max_fetches is reached")
        span = f"[{message.start}, {message.end})"
        if message.start > message.end:
            return Refusal(Code.UNALIGNED_RANGE, span)
        if message.start == message.end:
            return None
        if message.start % memory.block_size:
            return Refusal(Code.UNALIGNED_RANGE, f"{span} with block size {memory.block_size}")
        count = -(-message.end // memory.block_size) - message.start // memory.block_size
        if count > memory.num_blocks or count * len(memory.groups) > MAX_FETCH_BLOCKS:
            return Refusal(Code.BAD_MESSAGE, f"{span} does not fit {memory.num_blocks} blocks")
        return None

    def blocks(self, session: Session, message: local.FetchBlocks) -> None:
        fetch = self._assembling(session, message.fetch_id, "FetchBlocks")
        if fetch is None:
            return
        detail = self._add(fetch, message.group, message.first, message.blocks)
        if detail:
            self._fetches.fail(fetch, Code.BAD_MESSAGE, detail)

    def _add(self, fetch: Fetch, group: int, first: int, packed: bytes) -> str:
        """Adds destinations, or says what is wrong with them."""
        if group >= len(fetch.dst):
            return f"group {group} of {len(fetch.dst)}"
        if len(packed) % 4:
            return "a block list is not whole 32-bit ids"
        held, more = len(fetch.dst[group]) // 4, len(packed) // 4
        if first != held:
            return f"blocks from index {first}, {held} are known"
        if held + more > fetch.count:
            return f"{held + more} blocks for a range of {fetch.count}"
        fetch.dst[group] += packed
        return ""

    def go(self, session: Session, message: local.FetchGo) -> None:
        fetch = self._assembling(session, message.fetch_id, "FetchGo")
        if fetch is not None:
            self._start(session, fetch)

    def _start(self, session: Session, fetch: Fetch) -> None:
        memory = session.memory
        assert memory is not None
        try:
            ids = self._destinations(session, memory, fetch)
        except Refusal as refusal:
            self._fetches.fail(fetch, refusal.code, refusal.detail)
            return
        for held, mine in zip(session.destinations, ids, strict=True):
            held |= mine
        fetch.reserved = ids
        fetch.asked_at = self._ctx.now
        fetch.deadline = self._ctx.now + min(fetch.message.deadline_s, self._ctx.config.fetch_max_s)
        self._ctx.deadlines.set(("fetch", fetch.id), fetch.deadline)
        self._fetches.fire(fetch, FetchEvent.GO)

    def _destinations(self, session: Session, memory: Memory, fetch: Fetch) -> list[set[int]]:
        """The ids that will be written, for each group. Raises Refusal if they may not be."""
        out: list[set[int]] = []
        for index, (group, packed) in enumerate(zip(memory.groups, fetch.dst, strict=True)):
            known = len(packed) // 4
            if group.layers and known != fetch.count:
                raise Refusal(
                    Code.BAD_MESSAGE, f"group {index}: {known} blocks for a range of {fetch.count}"
                )
            blocks = unpack(packed)
            ids = set(blocks)
            nulls = blocks.count(NULL) if NULL in ids else 0
            ids.discard(NULL)
            if ids and max(ids) >= memory.num_blocks:
                raise Refusal(
                    Code.BAD_MESSAGE, f"group {index}: block {max(ids)} of {memory.num_blocks}"
                )
            if len(ids) + nulls != known:
                raise Refusal(Code.BAD_MESSAGE, f"group {index}: a destination is named twice")
            if not ids.isdisjoint(session.destinations[index]):
                raise Refusal(
                    Code.BAD_MESSAGE, f"group {index}: a destination belongs to another fetch"
                )
            out.append(ids)
        return out

    def cancel(self, session: Session, message: local.Cancel) -> None:
        fetch = session.fetches.get(message.fetch_id)
        if fetch is None:
            self._ctx.late("Cancel")
            return
        self._fetches.fail(fetch, Code.CANCELLED, "cancelled by the engine")

    def _assembling(self, session: Session, fetch_id: str, what: str) -> Fetch | None:
        fetch = session.fetches.get(fetch_id)
        if fetch is None or fetch.state is not FetchState.ASSEMBLING:
            self._ctx.late(what)
            return None
        return fetch


class Answers:
    """From the producer's daemon."""

    def __init__(
        self, ctx: Context, fetches: Fetches, attachments: Attachments, jobs: Jobs
    ) -> None:
        self._ctx = ctx
        self._fetches = fetches
        self._attachments = attachments
        self._jobs = jobs

    def granted(self, found: Peer, message: peer.Grant) -> None:
        fetch = self._fetch(found, message.fetch_id)
        waits = (FetchState.ASKED, FetchState.VOIDING)
        if fetch is None or fetch.state not in waits or fetch.incoming is not None:
            self._ctx.late("Grant")
            return
        self._fetches.fire(fetch, FetchEvent.GRANTED, message)
        self._fetches.report(fetch)
        self._jobs.wake(fetch)

    def progress(self, found: Peer, message: peer.Progress) -> None:
        fetch = self._fetch(found, message.fetch_id)
        granted = (FetchState.MOVING, FetchState.VOIDING)
        if (
            fetch is None
            or fetch.state not in granted
            or message.generation != self._generation(fetch)
        ):
            self._ctx.late("Progress")
            return
        self._fetches.fire(fetch, FetchEvent.PROGRESS, message)
        self._fetches.report(fetch)
        self._jobs.wake(fetch)

    def refused(self, found: Peer, message: peer.FetchRefused) -> None:
        fetch = self._fetch(found, message.fetch_id)
        if fetch is None or fetch.state not in (FetchState.ASKED, FetchState.VOIDING):
            self._ctx.late("FetchRefused")
            return
        one, code = fetch.attachment, failure_code(message.code)
        self._fetches.fail(fetch, code, message.detail)
        if code is Code.STALE_EPOCH and one is not None:
            # The producer knows the attachment no more: the next fetch shall make a new one.
            self._attachments.lose(one, code, message.detail)

    def revoked(self, found: Peer, message: peer.FetchRevoked) -> None:
        fetch = self._fetch(found, message.fetch_id)
        if fetch is None or message.generation != self._generation(fetch):
            self._ctx.late("FetchRevoked")
            return
        if fetch.state is FetchState.DRAINING:
            fetch.void = True
        elif message.again:
            self._fetches.fire(fetch, FetchEvent.AGAIN)
        else:
            detail = f"generation {message.generation} was taken back"
            self._fetches.fail(fetch, failure_code(message.code), detail, void=True)

    def _fetch(self, found: Peer, fetch_id: str) -> Fetch | None:
        """The fetch, if that peer was asked for it in its present life."""
        fetch = self._fetches.by_id.get(fetch_id)
        if fetch is None or not fetch.asked or fetch.attachment is None:
            return None
        one = fetch.attachment
        return fetch if one.peer is found and one.boot_id == found.boot_id else None

    def _generation(self, fetch: Fetch) -> int | None:
        """The generation that the producer speaks of: granted last."""
        if fetch.state is FetchState.VOIDING:
            return fetch.incoming[0].generation if fetch.incoming is not None else None
        return fetch.generation
