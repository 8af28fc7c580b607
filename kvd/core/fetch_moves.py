"""Consumer: what each event does to a fetch in each state."""

from __future__ import annotations

from kvd.core.attachment import AttachState
from kvd.core.context import Refusal
from kvd.core.fetch import FETCHES, Fetch, FetchEvent, FetchState
from kvd.core.fetches import Fetches
from kvd.core.instructions import StopPulls
from kvd.core.manifest import Plan
from kvd.protocol import peer
from kvd.protocol.codes import Code

S, E = FetchState, FetchEvent
_WAITING = (S.ASSEMBLING, S.CONNECTING, S.ATTACHING, S.ASKED)


@FETCHES.on(S.ASSEMBLING, E.GO, S.CONNECTING, S.ATTACHING, S.ASKED, S.TOLD)
def _go(owner: Fetches, fetch: Fetch, _: object) -> FetchState:
    message = fetch.message
    if message.start == message.end:
        release = peer.PeerRelease(
            message.transfer_id,
            message.generation,
            message.engine_id,
            message.remote.rank is not None,
        )
        owner.peers.notify(None, message.remote, release)
        return owner.tell(fetch)
    try:
        fetch.attachment = one = owner.attachments.join(fetch, message.remote)
    except Refusal as refusal:
        return owner.failing(fetch, refusal)
    if one.state is AttachState.CONNECTING:
        return S.CONNECTING
    return owner.ask(fetch) if one.state is AttachState.OPEN else S.ATTACHING


@FETCHES.on(S.CONNECTING, E.PEER_UP, S.ATTACHING)
def _peer_up(owner: Fetches, fetch: Fetch, _: object) -> FetchState:
    return S.ATTACHING


@FETCHES.on(S.ATTACHING, E.ATTACHED, S.ASKED)
def _attached(owner: Fetches, fetch: Fetch, _: object) -> FetchState:
    return owner.ask(fetch)


@FETCHES.on(S.ASKED, E.GRANTED, S.MOVING, S.TOLD)
def _granted(owner: Fetches, fetch: Fetch, grant: peer.Grant) -> FetchState:
    try:
        manifest = owner.make_manifest(fetch, grant)
    except Refusal as refusal:
        return owner.failing(fetch, refusal)
    return owner.install(fetch, grant, manifest)


@FETCHES.on(S.VOIDING, E.GRANTED, S.VOIDING, S.DRAINING)
def _granted_early(owner: Fetches, fetch: Fetch, grant: peer.Grant) -> FetchState:
    try:
        fetch.incoming = (grant, owner.make_manifest(fetch, grant))
    except Refusal as refusal:
        return owner.failing(fetch, refusal)
    return S.VOIDING


@FETCHES.on(S.MOVING, E.PROGRESS, S.MOVING, S.DRAINING, S.TOLD)
def _progress(owner: Fetches, fetch: Fetch, news: peer.Progress) -> FetchState:
    assert fetch.manifest is not None
    try:
        before = fetch.manifest.offered
        fetch.manifest.extend(news.blocks, news.valid)
    except Refusal as refusal:
        return owner.failing(fetch, refusal)
    if fetch.manifest.offered and not before:
        fetch.early = fetch.received
    return S.MOVING


@FETCHES.on(S.VOIDING, E.PROGRESS, S.VOIDING, S.DRAINING)
def _progress_early(owner: Fetches, fetch: Fetch, news: peer.Progress) -> FetchState:
    assert fetch.incoming is not None
    try:
        fetch.incoming[1].extend(news.blocks, news.valid)
    except Refusal as refusal:
        return owner.failing(fetch, refusal)
    return S.VOIDING


@FETCHES.on(S.MOVING, E.AGAIN, S.VOIDING, S.ASKED)
@FETCHES.on(S.FENCED, E.AGAIN, S.VOIDING, S.ASKED)
def _again(owner: Fetches, fetch: Fetch, _: object) -> FetchState:
    fetch.void = True
    owner.ctx.deadlines.clear(("fence", fetch.id))
    if not fetch.jobs:
        return owner.start_over(fetch)
    if fetch.state is S.MOVING:
        owner.ctx.emit(StopPulls(fetch.id))
    return S.VOIDING


@FETCHES.on(S.VOIDING, E.AGAIN)
def _again_already(owner: Fetches, fetch: Fetch, _: object) -> FetchState:
    fetch.incoming = None
    return S.VOIDING


@FETCHES.on(S.MOVING, E.JOB_DONE, S.MOVING, S.TOLD)
def _job_done(owner: Fetches, fetch: Fetch, plan: Plan) -> FetchState:
    assert fetch.manifest is not None
    fetch.manifest.arrived(plan)
    return owner.tell(fetch) if fetch.manifest.complete else S.MOVING


@FETCHES.on(S.MOVING, E.JOB_FAILED, S.DRAINING, S.TOLD)
def _job_failed(owner: Fetches, fetch: Fetch, failure: Refusal) -> FetchState:
    return owner.failing(fetch, failure)


@FETCHES.on(S.MOVING, E.JOB_FENCED, S.FENCED)
def _job_fenced(owner: Fetches, fetch: Fetch, _: object) -> FetchState:
    fetch.void = True
    if fetch.jobs:
        owner.ctx.emit(StopPulls(fetch.id))
    grace = owner.ctx.now + owner.ctx.config.fence_grace_s
    owner.ctx.deadlines.set(("fence", fetch.id), grace)
    return S.FENCED


@FETCHES.on(S.FENCED, E.JOB_DONE)
@FETCHES.on(S.FENCED, E.JOB_FAILED)
@FETCHES.on(S.FENCED, E.JOB_FENCED)
def _job_ended_fenced(owner: Fetches, fetch: Fetch, _: object) -> FetchState:
    return S.FENCED


@FETCHES.on(S.VOIDING, E.JOB_DONE, S.VOIDING, S.ASKED, S.MOVING, S.TOLD)
@FETCHES.on(S.VOIDING, E.JOB_FAILED, S.VOIDING, S.ASKED, S.MOVING, S.TOLD)
@FETCHES.on(S.VOIDING, E.JOB_FENCED, S.VOIDING, S.ASKED, S.MOVING, S.TOLD)
def _job_ended_void(owner: Fetches, fetch: Fetch, _: object) -> FetchState:
    return S.VOIDING if fetch.jobs else owner.start_over(fetch)


@FETCHES.on(S.DRAINING, E.JOB_DONE, S.DRAINING, S.TOLD)
def _job_done_draining(owner: Fetches, fetch: Fetch, plan: Plan) -> FetchState:
    if fetch.manifest is not None and not fetch.void:
        fetch.manifest.arrived(plan)
    return S.DRAINING if fetch.jobs else owner.tell(fetch)


@FETCHES.on(S.DRAINING, E.JOB_FAILED, S.DRAINING, S.TOLD)
@FETCHES.on(S.DRAINING, E.JOB_FENCED, S.DRAINING, S.TOLD)
def _job_failed_draining(owner: Fetches, fetch: Fetch, failure: Refusal) -> FetchState:
    # A dead fence word says that the generation is gone, whatever else had failed before.
    fetch.void = fetch.void or failure.code is Code.FENCED
    return S.DRAINING if fetch.jobs else owner.tell(fetch)


@FETCHES.on(_WAITING, E.FAILED, S.TOLD)
@FETCHES.on((S.MOVING, S.FENCED, S.VOIDING), E.FAILED, S.DRAINING, S.TOLD)
def _failed(owner: Fetches, fetch: Fetch, failure: Refusal) -> FetchState:
    return owner.failing(fetch, failure)


@FETCHES.on(S.DRAINING, E.FAILED)
def _failed_already(owner: Fetches, fetch: Fetch, _: object) -> FetchState:
    return S.DRAINING
