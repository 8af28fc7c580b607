"""What must hold between any two events. Tests check it after each; nothing else calls it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvd.core.attachment import AttachState
from kvd.core.fetch import FetchState
from kvd.core.grant import RequestState
from kvd.core.jobs import MAX_JOB_BLOCKS, job_limit
from kvd.core.offers import OfferState

if TYPE_CHECKING:
    from kvd.core.machine import Core


def check(core: Core) -> None:
    """Raises AssertionError naming what is wrong."""
    assert not core.ctx.out, "instructions were left behind"
    _check_sessions(core)
    _check_offers(core)
    _check_requests(core)
    _check_fetches(core)
    _check_attachments(core)
    _check_jobs(core)
    _check_bounds(core)


def _check_sessions(core: Core) -> None:
    live = [session for session in core.sessions.by_id.values() if session.alive]
    ranks = Counter((session.engine_id, session.rank) for session in live)
    assert all(count == 1 for count in ranks.values()), "two live sessions of one rank"
    for session in core.sessions.by_id.values():
        if session.alive:
            continue
        assert session.jobs, "a dead session with no job was not released"
        assert not session.offers
        assert not session.requests
        assert not session.clients
        assert all(fetch.state is FetchState.DRAINING for fetch in session.fetches.values())


def _check_offers(core: Core) -> None:
    count = num_blocks = 0
    for session in core.sessions.by_id.values():
        for transfer_id, offer in session.offers.items():
            count += 1
            num_blocks += sum(len(blocks) // 4 for blocks in offer.blocks)
            assert offer.transfer_id == transfer_id
            assert offer.session is session
            assert (offer.state is OfferState.SERVING) == bool(offer.grants), offer.label
            assert offer.state is not OfferState.ENDED
            # Either open grants hold it (each with its deadline), or a deadline does.
            assert (offer.key in core.ctx.deadlines) == (not offer.grants), offer.label
            need = -(-offer.valid.highest() // offer.memory.block_size)
            for group, blocks in zip(offer.memory.groups, offer.blocks, strict=True):
                if group.layers and offer.sealed is not None:
                    assert len(blocks) // 4 >= need
            for key, request in offer.grants.items():
                assert request.offer is offer
                assert request.key == key
                assert request.state is not RequestState.PARKED
    assert count == core.offers.count
    assert num_blocks == core.offers.num_blocks


def _check_requests(core: Core) -> None:
    count = parked = attachments = 0
    parked_by: Counter[str] = Counter()
    bytes_by: Counter[str] = Counter()
    tickets: list[bytes] = []
    for client in core.clients.by_id.values():
        attachments += len(client.attachments)
        for one in client.attachments.values():
            assert one.session.alive
            assert one.session.clients[client.id, one.attach_id] is one
        for fetch_id, request in client.requests.items():
            count += 1
            assert request.message.fetch_id == fetch_id
            assert client.attachments[request.attachment.attach_id] is request.attachment
            waits = ("park", *request.key) in core.ctx.deadlines
            granted = ("grant", *request.key) in core.ctx.deadlines
            if request.state is RequestState.PARKED:
                parked += 1
                parked_by[client.peer] += 1
                assert waits
                assert not granted
                assert request.offer is None
                waiting = request.attachment.session.requests[request.message.transfer_id]
                assert waiting[request.key] is request
            else:
                assert granted
                assert not waits
                assert request.offer is not None
                assert request.offer.grants[request.key] is request
                assert bool(request.ticket) == (request.state is RequestState.GRANTED)
                if request.message.generation is not None:
                    assert request.message.generation == request.offer.generation
            if request.ticket:
                tickets.append(request.ticket)
                bytes_by[client.peer] += request.nbytes
            else:
                assert request.nbytes == 0
    assert len(tickets) == len(set(tickets)), "one ticket for two grants"
    assert set(tickets) == set(core.grants.by_ticket)
    assert count == core.grants.count
    assert parked == core.grants.parked
    assert parked_by == core.grants.parked_by
    assert bytes_by == core.grants.bytes_by
    assert attachments == core.clients.num_attachments


def _check_fetches(core: Core) -> None:
    for fetch_id, fetch in core.fetches.by_id.items():
        assert fetch.id == fetch_id
        assert fetch.session.fetches[fetch_id] is fetch
        assert fetch.state is not FetchState.TOLD
        assert (fetch.failure is not None) == (fetch.state is FetchState.DRAINING), fetch.label
        assert (fetch.incoming is None) or fetch.state is FetchState.VOIDING
        if fetch.state is FetchState.DRAINING:
            assert fetch.jobs, "a fetch drains without a job"
        else:
            assert ("fetch", fetch_id) in core.ctx.deadlines, "a fetch waits without a deadline"
        if fetch.state is FetchState.MOVING:
            assert fetch.manifest is not None
            assert not fetch.manifest.complete
            assert not fetch.void
        if fetch.state is FetchState.VOIDING:
            assert fetch.jobs
            assert fetch.void
        if fetch.state is FetchState.FENCED:
            assert fetch.void
            assert ("fence", fetch_id) in core.ctx.deadlines
        if fetch.state in (FetchState.ASSEMBLING, FetchState.CONNECTING, FetchState.ATTACHING):
            assert not fetch.asked
            assert not fetch.jobs
        if fetch.manifest is not None:
            fetch.manifest.check()
        one = fetch.attachment
        if one is not None:
            assert fetch in one.fetches
        elif fetch.state is not FetchState.DRAINING:
            assert fetch.state is FetchState.ASSEMBLING
    for session in core.sessions.by_id.values():
        for group, held in enumerate(session.destinations):
            mine = [fetch.reserved[group] for fetch in session.fetches.values() if fetch.reserved]
            assert sum(map(len, mine)) == len(held), "a destination block has two fetches, or none"
            assert held == set().union(*mine)


def _check_attachments(core: Core) -> None:
    waiting = {
        FetchState.CONNECTING: (AttachState.CONNECTING,),
        FetchState.ATTACHING: (AttachState.ASKED, AttachState.OPENING),
        FetchState.ASKED: (AttachState.OPEN,),
        FetchState.MOVING: (AttachState.OPEN,),
    }
    for attach_id, one in core.attachments.by_id.items():
        assert one.id == attach_id
        assert one in one.peer.attachments
        assert one in one.session.attachments
        assert core.peers.by_addr.get(one.peer.addr) is one.peer
        closing = one.state is AttachState.CLOSING
        assert closing or core.attachments.by_key[one.key] is one
        assert not closing or one.jobs, "an attachment closes without a job"
        idle = one.state is AttachState.OPEN and one.fetches
        assert closing or idle or ("attach", attach_id) in core.ctx.deadlines
        for fetch in one.fetches:
            assert fetch.attachment is one
            assert one.state in waiting.get(fetch.state, tuple(AttachState)), (
                fetch.state,
                one.state,
            )
    for found in core.peers.by_addr.values():
        busy = found.attachments or found.notifies
        assert busy or ("peer", found.addr) in core.ctx.deadlines, "an idle peer without an end"
        assert busy or not found.only_probed, "a probe left a peer"
        for number in found.notifies:
            assert ("notify", found.addr, number) in core.ctx.deadlines


def _check_jobs(core: Core) -> None:
    by_fetch = Counter(job.fetch.id for job in core.jobs.running.values())
    by_attachment = Counter(job.attachment.id for job in core.jobs.running.values())
    by_session = Counter(job.fetch.session.id for job in core.jobs.running.values())
    for fetch in core.fetches.by_id.values():
        assert fetch.jobs == by_fetch.pop(fetch.id, 0), fetch.label
        assert fetch.jobs <= core.config.max_jobs_per_fetch
    for one in core.attachments.by_id.values():
        assert one.jobs == by_attachment.pop(one.id, 0), one.label
        assert one.jobs <= max(1, core.config.max_jobs_per_attachment)
    for session in core.sessions.by_id.values():
        assert session.jobs == by_session.pop(session.id, 0)
    assert not by_fetch + by_attachment, "a job of nobody"
    assert not by_session, "a job of no session"
    for job in core.jobs.running.values():
        limit = job_limit(core.config, job.attachment)
        assert job.plan.nbytes <= limit or len(job.plan.parts) == 1
        assert sum(part.mask.bit_count() for part in job.plan.parts) <= MAX_JOB_BLOCKS


def _check_bounds(core: Core) -> None:
    config = core.config
    assert len(core.sessions.by_id) <= config.max_sessions + len(core.jobs.running)
    assert core.offers.count <= config.max_offers
    assert core.offers.num_blocks <= config.max_blocks
    # One over: a fetch that is refused for it is entered and told within one event.
    assert len(core.fetches.by_id) <= config.max_fetches
    assert core.grants.count <= config.max_fetches
    assert core.grants.parked <= config.max_parked
    assert max(core.grants.parked_by.values(), default=0) <= config.max_parked_per_peer
    assert max(core.grants.bytes_by.values(), default=0) <= config.max_bytes_per_peer
    assert len(core.offers.tombstones) <= config.max_tombstones
    assert len(core.offers.early) <= config.max_early_releases
    assert len(core.attachments.by_id) <= config.max_attachments
    assert len(core.peers.by_addr) <= config.max_peers
    assert core.peers.num_notifies <= config.max_notifies
