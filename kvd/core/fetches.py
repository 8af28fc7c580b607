"""Consumer: fetches. Each is told its end exactly once, when no byte of it can land any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.context import Context, Refusal
from kvd.core.fetch import FETCHES, Fetch, FetchEvent, FetchState
from kvd.core.instructions import StopPulls
from kvd.core.manifest import Manifest
from kvd.core.packed import bitmap, ones, present
from kvd.core.peers import Peers
from kvd.core.remembered import Remembered
from kvd.core.sessions import Sessions
from kvd.protocol import local, peer
from kvd.protocol.codes import Code
from kvd.protocol.types import Stages

if TYPE_CHECKING:
    from kvd.core.attachments import Attachments
    from kvd.core.jobs import Job, Jobs


class Fetches:
    """Life cycle; its moves are in `fetch_moves.py`."""

    def __init__(self, ctx: Context, sessions: Sessions, peers: Peers, jobs: Jobs) -> None:
        self.ctx = ctx
        self.peers = peers
        self.jobs = jobs
        self.sessions = sessions
        self.attachments: Attachments
        self.by_id: dict[str, Fetch] = {}
        self.told: Remembered[tuple[int, str], bool] = Remembered(
            ctx.config.tombstone_ttl_s, ctx.config.max_tombstones
        )

    def fire(self, fetch: Fetch, event: FetchEvent, arg: object = None) -> None:
        FETCHES.fire(self, fetch, event, self.ctx.now, arg)

    def enter(self, fetch: Fetch) -> None:
        self.by_id[fetch.id] = fetch
        fetch.session.fetches[fetch.id] = fetch
        self.ctx.deadlines.set(("fetch", fetch.id), fetch.deadline)

    def fail(self, fetch: Fetch, code: Code, detail: str, void: bool = False) -> None:
        """The first failure is the one that is told."""
        if fetch.state is FetchState.TOLD:
            return
        fetch.void = fetch.void or void
        self.fire(fetch, FetchEvent.FAILED, Refusal(code, detail))

    def peer_up(self, fetches: list[Fetch]) -> None:
        for fetch in fetches:
            if fetch.state is FetchState.CONNECTING:
                self.fire(fetch, FetchEvent.PEER_UP)

    def attachment_open(self, fetches: list[Fetch]) -> None:
        for fetch in fetches:
            if fetch.state is FetchState.ATTACHING:
                self.fire(fetch, FetchEvent.ATTACHED)

    def job_done(self, job: Job, nbytes: int) -> None:
        fetch = job.fetch
        if nbytes != job.plan.nbytes:
            detail = f"{nbytes} bytes of {job.plan.nbytes} in a job that was done"
            self.job_failed(job, Refusal(Code.INTEGRITY, detail))
            return
        fetch.received += nbytes
        fetch.last_byte = self.ctx.now
        if fetch.first_byte < 0:
            fetch.first_byte = self.ctx.now
        self.fire(fetch, FetchEvent.JOB_DONE, job.plan)
        self.report(fetch)

    def report(self, fetch: Fetch) -> None:
        """Tell a producer that waits for it that all which may be copied has arrived."""
        one, manifest = fetch.attachment, fetch.manifest
        if not (fetch.reports and fetch.copies) or one is None or manifest is None:
            return
        if fetch.jobs or manifest.pending_nbytes or manifest.valid <= fetch.reported:
            return
        fetch.reported = manifest.valid
        assert fetch.generation is not None
        self.peers.send(
            one.peer, one.boot_id, peer.FetchGot(fetch.id, fetch.generation, fetch.reported)
        )

    def job_failed(self, job: Job, failure: Refusal) -> None:
        event = FetchEvent.JOB_FENCED if failure.code is Code.FENCED else FetchEvent.JOB_FAILED
        self.fire(job.fetch, event, failure)

    def deadline_passed(self, fetch_id: str) -> None:
        fetch = self.by_id.get(fetch_id)
        if fetch is not None:
            self.fail(fetch, Code.DEADLINE, f"in state {fetch.state} at the deadline")

    def fence_passed(self, fetch_id: str) -> None:
        fetch = self.by_id.get(fetch_id)
        if fetch is not None and fetch.state is FetchState.FENCED:
            self.fail(fetch, Code.FENCED, "the source was taken back while it was read", void=True)

    # --- within a move ----------------------------------------------------------------------

    def ask(self, fetch: Fetch) -> FetchState:
        one, message = fetch.attachment, fetch.message
        assert one is not None
        fetch.asked = True
        if fetch.parked_at < 0:
            fetch.parked_at = self.ctx.now
        self.ctx.to_peer(
            one.peer.addr,
            peer.FetchReq(
                fetch_id=fetch.id,
                attach_id=one.id,
                transfer_id=message.transfer_id,
                generation=message.generation,
                start=message.start,
                end=message.end,
                digest=message.digest,
                park_s=message.park_s,
            ),
        )
        return FetchState.ASKED

    def make_manifest(self, fetch: Fetch, grant: peer.Grant) -> Manifest:
        """Raises Refusal for a grant that cannot be."""
        one, memory, message = fetch.attachment, fetch.session.memory, fetch.message
        assert one is not None
        assert one.answer is not None
        assert memory is not None
        if message.generation is not None and grant.generation != message.generation:
            raise Refusal(Code.STALE_GENERATION, f"granted {grant.generation}")
        if grant.fence_slot >= one.answer.fence_slots or grant.fence_word == 0:
            raise Refusal(Code.BAD_MESSAGE, f"fence slot {grant.fence_slot} is not in the table")
        manifest = Manifest(
            memory.groups,
            [bytes(blocks) for blocks in fetch.dst],
            start=message.start,
            end=message.end,
            block_size=memory.block_size,
            source_blocks=one.answer.num_blocks,
        )
        manifest.extend(grant.blocks, grant.valid)
        return manifest

    def install(self, fetch: Fetch, grant: peer.Grant, manifest: Manifest) -> FetchState:
        """Copy from this grant on. Nothing of an earlier generation is in flight."""
        assert fetch.jobs == 0
        fetch.generation = grant.generation
        fetch.ticket = grant.ticket
        fetch.fence_slot = grant.fence_slot
        fetch.fence_word = grant.fence_word
        fetch.manifest = manifest
        fetch.reports, fetch.reported = grant.report, fetch.message.start
        fetch.void = False
        fetch.granted_at = self.ctx.now
        # What came of a generation before does not count.
        fetch.received = fetch.early = 0
        return self.tell(fetch) if manifest.complete else FetchState.MOVING

    def start_over(self, fetch: Fetch) -> FetchState:
        """All jobs of the void generation have ended."""
        fetch.manifest = None
        fetch.generation = None
        fetch.void = False
        if fetch.incoming is None:
            return FetchState.ASKED
        grant, manifest = fetch.incoming
        fetch.incoming = None
        return self.install(fetch, grant, manifest)

    def failing(self, fetch: Fetch, failure: Refusal) -> FetchState:
        fetch.failure = fetch.failure or failure
        fetch.incoming = None
        if fetch.jobs:
            self.ctx.emit(StopPulls(fetch.id))
            return FetchState.DRAINING
        return self.tell(fetch)

    def tell(self, fetch: Fetch) -> FetchState:
        """The one place where a fetch ends: no job of it is in flight."""
        assert fetch.jobs == 0
        session, message, one = fetch.session, fetch.message, fetch.attachment
        failure = fetch.failure or Refusal(Code.OK, "")
        code = failure.code
        del self.by_id[fetch.id]
        del session.fetches[fetch.id]
        for held, ids in zip(session.destinations, fetch.reserved, strict=False):
            held -= ids
        self.ctx.deadlines.clear(("fetch", fetch.id))
        self.ctx.deadlines.clear(("fence", fetch.id))
        self.told.put((session.id, fetch.id), True, self.ctx.now)
        stages = Stages.since(
            fetch.asked_at,
            granted=fetch.granted_at,
            first_byte=fetch.first_byte,
            last_byte=fetch.last_byte,
            parked=fetch.parked_at,
        )
        tokens = self._tokens(fetch)
        transport = one.transport if one is not None else ""
        generation = fetch.generation if fetch.generation is not None else message.generation or 0
        self.sessions.send(
            session,
            local.FetchDone(
                fetch_id=fetch.id,
                code=str(code),
                detail=failure.detail,
                generation=generation,
                bad=self._bad(fetch),
                tokens=tokens,
                nbytes=fetch.received,
                transport=transport,
                stages=stages,
            ),
        )
        # After the news for our engine, which waits for it: to send to a peer can take 2 ms.
        if one is not None:
            if fetch.asked:
                sole = fetch.message.sole
                close = peer.FetchClose(fetch.id, str(code), fetch.received, sole)
                self.peers.send(one.peer, one.boot_id, close)
            self.attachments.leave(fetch, one)
        self.ctx.record(
            "fetch_done",
            code=str(code),
            fetch_id=fetch.id,
            transfer_id=message.transfer_id,
            generation=generation,
            engine_id=session.engine_id,
            transport=transport,
            tokens=tokens,
            nbytes=fetch.received,
            early_bytes=fetch.early,
            seconds=self.ctx.now - fetch.asked_at,
            stages=stages,
            peer=str(message.remote),
            detail=failure.detail,
            traceparent=message.traceparent,
        )
        return FetchState.TOLD

    def _tokens(self, fetch: Fetch) -> int:
        if fetch.failure is None:
            return fetch.message.end - fetch.message.start
        if fetch.manifest is None or fetch.void:
            return 0
        return fetch.manifest.tokens

    def _bad(self, fetch: Fetch) -> list[bytes]:
        if fetch.failure is None:
            return [bitmap(0, fetch.count) for _ in fetch.dst]
        if fetch.manifest is not None and not fetch.void:
            return fetch.manifest.bad()
        out: list[bytes] = []
        for blocks in fetch.dst:
            known = len(blocks) // 4
            # Blocks that were never named are not valid either.
            mask = present(blocks) | (ones(fetch.count) & ~ones(known))
            out.append(bitmap(mask, fetch.count))
        return out
