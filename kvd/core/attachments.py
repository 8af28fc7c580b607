"""Consumer: the binding of one engine here to one engine at a peer, from hello to last byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.attachment import ATTACHMENTS, AttachEvent, Attachment, AttachState
from kvd.core.choice import device_of, reasons, unusable
from kvd.core.context import Context, Refusal
from kvd.core.instructions import CloseTransport, OpenTransport
from kvd.core.peers import Peer, Peers
from kvd.protocol import peer as wire
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr

if TYPE_CHECKING:
    from kvd.core.fetch import Fetch
    from kvd.core.fetches import Fetches


class Attachments:
    def __init__(self, ctx: Context, peers: Peers) -> None:
        self.ctx = ctx
        self.peers = peers
        self.fetches: Fetches
        self.by_id: dict[str, Attachment] = {}
        self.by_key: dict[tuple[int, PeerAddr, str], Attachment] = {}

    def fire(self, one: Attachment, event: AttachEvent, arg: object = None) -> None:
        """Move, and fail the fetches that waited for what will not come."""
        ATTACHMENTS.fire(self, one, event, self.ctx.now, arg)
        if one.state in (AttachState.FAILED, AttachState.CLOSED):
            self._fail_fetches(one)

    def join(self, fetch: Fetch, addr: PeerAddr) -> Attachment:
        """The attachment for a fetch, made if there is none. Raises Refusal at a known failure."""
        session = fetch.session
        assert session.memory is not None
        one = self.by_key.get((session.id, addr, fetch.engine_id))
        if one is None:
            found = self.peers.reach(addr, probe=session.probe)
            if len(self.by_id) >= self.ctx.config.max_attachments:
                raise Refusal(Code.OVERLOADED, "max_attachments is reached")
            one = Attachment(self._new_id(), session, session.memory, found, fetch.engine_id)
            self.by_id[one.id] = one
            self.by_key[one.key] = one
            session.attachments[one] = None
            found.attachments[one] = None
            self.peers.idle_or_not(found)
            self.ctx.deadlines.set(
                ("attach", one.id), self.ctx.now + self.ctx.config.attach_timeout_s
            )
            if found.up:
                self.fire(one, AttachEvent.PEER_UP)
        if one.failure is not None:
            raise Refusal(one.failure.code, one.failure.detail)
        one.fetches[fetch] = None
        if one.state is AttachState.OPEN:
            self.ctx.deadlines.clear(("attach", one.id))
        return one

    def leave(self, fetch: Fetch, one: Attachment) -> None:
        one.fetches.pop(fetch, None)
        if not one.fetches and one.state is AttachState.OPEN:
            self.keep(one, self.ctx.config.peer_idle_s)

    # --- events -----------------------------------------------------------------------------

    def peer_up(self, found: Peer) -> None:
        for one in list(found.attachments):
            if one.state is AttachState.CONNECTING:
                self.fire(one, AttachEvent.PEER_UP)
                # Of an attachment that failed just now, none are left.
                self.fetches.peer_up(list(one.fetches))

    def peer_down(self, found: Peer, failure: Refusal) -> None:
        for one in list(found.attachments):
            self.lose(one, failure.code, failure.detail)

    def accepted(self, found: Peer, message: wire.AttachOk) -> None:
        one = self._asked(found, message.attach_id, "AttachOk")
        if one is not None:
            self.fire(one, AttachEvent.ACCEPTED, message)

    def refused(self, found: Peer, message: wire.AttachRefused, code: Code) -> None:
        one = self._asked(found, message.attach_id, "AttachRefused")
        if one is not None:
            self.fire(one, AttachEvent.REFUSED, Refusal(code, message.detail))

    def engine_gone(self, found: Peer, message: wire.EngineGone) -> None:
        for one in list(found.attachments):
            if one.answer is None or (one.answer.engine_id or one.engine_id) != message.engine_id:
                continue
            if one.answer.engine_epoch == message.engine_epoch:
                detail = f"engine {message.engine_id} left (epoch {message.engine_epoch})"
                self.lose(one, Code.ENGINE_GONE, detail)

    def opened(self, attach_id: str) -> None:
        one = self.by_id.get(attach_id)
        if one is None or one.state is not AttachState.OPENING:
            self.ctx.late("TransportOpened")
            return
        self.fire(one, AttachEvent.OPENED)
        self.fetches.attachment_open(list(one.fetches))

    def broke(self, attach_id: str, code: Code, detail: str) -> None:
        one = self.by_id.get(attach_id)
        if one is None or one.state not in (AttachState.OPENING, AttachState.OPEN):
            self.ctx.late("TransportFailed")
            return
        failure = Refusal(code, detail)
        if one.state is AttachState.OPEN:
            self._fail_fetches(one, failure)
        self.fire(one, AttachEvent.BROKE, failure)

    def lose(self, one: Attachment, code: Code, detail: str) -> None:
        """The attachment is void: its fetches fail once their jobs have ended."""
        if one.state is AttachState.CLOSED:
            return
        failure = Refusal(code, detail)
        # Fetches first, so that each is closed at the peer before the attachment is.
        self._fail_fetches(one, failure)
        self.fire(one, AttachEvent.LOST, failure)

    def quiet(self, one: Attachment) -> None:
        if one.state is AttachState.CLOSING and not one.jobs:
            self.fire(one, AttachEvent.QUIET)

    def time_passed(self, attach_id: str) -> None:
        one = self.by_id.get(attach_id)
        if one is None:
            return
        if one.state is AttachState.FAILED:
            self.fire(one, AttachEvent.FORGOTTEN)
        elif one.state is AttachState.OPEN:
            if not one.fetches:
                self.fire(one, AttachEvent.IDLE)
        elif one.state is not AttachState.CLOSING:
            self.fire(one, AttachEvent.TIMED_OUT)

    # --- within -----------------------------------------------------------------------------

    def _asked(self, found: Peer, attach_id: str, what: str) -> Attachment | None:
        one = self.by_id.get(attach_id)
        if one is None or one.peer is not found or one.state is not AttachState.ASKED:
            self.ctx.late(what)
            return None
        return one

    def _new_id(self) -> str:
        return f"{self.ctx.boot_id:x}-{self.ctx.number()}"

    def _fail_fetches(self, one: Attachment, failure: Refusal | None = None) -> None:
        failure = failure or one.failure or Refusal(Code.INTERNAL, "the attachment closed")
        for fetch in list(one.fetches):
            self.fetches.fail(fetch, failure.code, failure.detail)

    def ask(self, one: Attachment, transports: list[str]) -> AttachState:
        """Send Attach, within a move."""
        if not transports:
            mapped = "" if one.peer.same_host else " (the peer is on another host)"
            allowed = self.ctx.config.transports
            why = {name: self._unusable(one, name) for name in allowed}
            return self.failed(
                one,
                Refusal(
                    Code.TRANSPORT_UNAVAILABLE, f"allowed here: {reasons(allowed, why)}{mapped}"
                ),
            )
        one.offered = transports
        one.boot_id = one.peer.boot_id
        self.ctx.to_peer(
            one.peer.addr,
            wire.Attach(
                attach_id=one.id,
                engine_id=one.engine_id,
                consumer_engine_id=one.session.engine_id,
                consumer_epoch=one.session.epoch,
                rank=one.session.rank,
                geometry=one.memory.geometry,
                transports=transports,
                any_engine=one.peer.addr.rank is not None,
                device=device_of(one.memory),
            ),
        )
        return AttachState.ASKED

    def _unusable(self, one: Attachment, transport: str) -> str:
        same_host = one.peer.same_host
        return unusable(transport, ours=device_of(one.memory), theirs=None, same_host=same_host)

    def usable(self, one: Attachment) -> list[str]:
        """What may be asked for, as far as it can be known on this side."""
        return [name for name in self.ctx.config.transports if not self._unusable(one, name)]

    def keep(self, one: Attachment, seconds: float) -> None:
        """It may be of use for so long to an engine; to a probe it is not."""
        kept_s = 0.0 if one.session.probe else seconds
        self.ctx.deadlines.set(("attach", one.id), self.ctx.now + kept_s)

    def failed(self, one: Attachment, failure: Refusal) -> AttachState:
        one.failure = failure
        self.keep(one, self.ctx.config.failure_cache_s)
        self._record("attach_failed", one, failure)
        return AttachState.FAILED

    def opened_record(self, one: Attachment) -> None:
        self._record("attached", one, Refusal(Code.OK, ""))

    def _record(self, kind: str, one: Attachment, outcome: Refusal) -> None:
        self.ctx.record(
            kind,
            attach_id=one.id,
            peer=str(one.peer.addr),
            transport=one.transport,
            code=str(outcome.code),
            detail=outcome.detail,
        )

    def detach(self, one: Attachment) -> None:
        self.peers.send(one.peer, one.boot_id, wire.Detach(one.id))

    def retry(self, one: Attachment, transports: list[str]) -> AttachState:
        """Ask anew under a new id, so that no answer to the old one is taken for it."""
        self.ctx.deadlines.clear(("attach", one.id))
        del self.by_id[one.id]
        one.id = self._new_id()
        one.answer = None
        self.by_id[one.id] = one
        self.ctx.deadlines.set(("attach", one.id), self.ctx.now + self.ctx.config.attach_timeout_s)
        return self.ask(one, transports)

    def unlink(self, one: Attachment) -> None:
        """No new fetch shall find it."""
        if self.by_key.get(one.key) is one:
            del self.by_key[one.key]

    def close(self, one: Attachment) -> AttachState:
        self.ctx.emit(CloseTransport(one.id))
        self.detach(one)
        return self.closed(one)

    def closed(self, one: Attachment) -> AttachState:
        self.unlink(one)
        self.by_id.pop(one.id, None)
        self.ctx.deadlines.clear(("attach", one.id))
        one.session.attachments.pop(one, None)
        one.peer.attachments.pop(one, None)
        self.peers.idle_or_not(one.peer)
        return AttachState.CLOSED


S, E = AttachState, AttachEvent


@ATTACHMENTS.on(S.CONNECTING, E.PEER_UP, S.ASKED, S.FAILED)
def _peer_up(owner: Attachments, one: Attachment, _: object) -> AttachState:
    return owner.ask(one, owner.usable(one))


@ATTACHMENTS.on(S.ASKED, E.ACCEPTED, S.OPENING, S.FAILED)
def _accepted(owner: Attachments, one: Attachment, answer: wire.AttachOk) -> AttachState:
    problem = _answer_problem(one, answer)
    if problem is not None:
        owner.detach(one)
        return owner.failed(one, problem)
    one.answer = answer
    owner.ctx.emit(OpenTransport(one.id, one.peer.addr, one.session.id, answer))
    return S.OPENING


def _answer_problem(one: Attachment, answer: wire.AttachOk) -> Refusal | None:
    """The producer has compared geometries; this side still copies by its own layout."""
    if answer.transport not in one.offered:
        return Refusal(Code.TRANSPORT_UNAVAILABLE, f"{answer.transport!r} was not offered")
    if answer.num_blocks == 0:
        return Refusal(Code.BAD_MESSAGE, "the producer has no blocks")
    ours = [(layer.group, [r.nbytes for r in layer.regions]) for layer in one.memory.layers]
    theirs = [(layer.group, [r.nbytes for r in layer.regions]) for layer in answer.layers]
    if ours != theirs:
        return Refusal(Code.GEOMETRY_MISMATCH, "layers: the layouts differ in groups or sizes")
    return None


@ATTACHMENTS.on(S.ASKED, E.REFUSED, S.FAILED)
def _refused(owner: Attachments, one: Attachment, failure: Refusal) -> AttachState:
    return owner.failed(one, failure)


@ATTACHMENTS.on(S.OPENING, E.OPENED, S.OPEN)
def _opened(owner: Attachments, one: Attachment, _: object) -> AttachState:
    owner.ctx.deadlines.clear(("attach", one.id))
    if not one.fetches:
        owner.keep(one, owner.ctx.config.peer_idle_s)
    owner.opened_record(one)
    return S.OPEN


@ATTACHMENTS.on(S.OPENING, E.BROKE, S.ASKED, S.FAILED)
def _opening_failed(owner: Attachments, one: Attachment, failure: Refusal) -> AttachState:
    owner.ctx.emit(CloseTransport(one.id))
    owner.detach(one)
    rest = [name for name in one.offered if name != one.transport]
    if not rest:
        return owner.failed(one, failure)
    return owner.retry(one, rest)


@ATTACHMENTS.on((S.CONNECTING, S.ASKED, S.OPENING), E.TIMED_OUT, S.FAILED)
def _timed_out(owner: Attachments, one: Attachment, _: object) -> AttachState:
    if one.state is S.OPENING:
        owner.ctx.emit(CloseTransport(one.id))
    if one.state is not S.CONNECTING:
        owner.detach(one)
    waited = owner.ctx.config.attach_timeout_s
    return owner.failed(
        one, Refusal(Code.PEER_UNREACHABLE, f"{one.state} for {waited:g} s at {one.peer.addr}")
    )


@ATTACHMENTS.on((S.CONNECTING, S.ASKED, S.OPENING, S.FAILED), E.LOST, S.CLOSED)
def _lost_early(owner: Attachments, one: Attachment, failure: Refusal) -> AttachState:
    if one.state is S.OPENING:
        owner.ctx.emit(CloseTransport(one.id))
    if one.state in (S.ASKED, S.OPENING):
        owner.detach(one)
    one.failure = one.failure or failure
    return owner.closed(one)


@ATTACHMENTS.on(S.OPEN, E.BROKE, S.CLOSING, S.CLOSED)
@ATTACHMENTS.on(S.OPEN, E.LOST, S.CLOSING, S.CLOSED)
def _void(owner: Attachments, one: Attachment, failure: Refusal) -> AttachState:
    one.failure = failure
    if one.jobs:
        owner.unlink(one)
        owner.ctx.deadlines.clear(("attach", one.id))
        return S.CLOSING
    return owner.close(one)


@ATTACHMENTS.on(S.CLOSING, E.LOST)
def _void_already(owner: Attachments, one: Attachment, _: object) -> AttachState:
    return S.CLOSING


@ATTACHMENTS.on(S.OPEN, E.IDLE, S.CLOSED)
@ATTACHMENTS.on(S.CLOSING, E.QUIET, S.CLOSED)
def _close(owner: Attachments, one: Attachment, _: object) -> AttachState:
    return owner.close(one)


@ATTACHMENTS.on(S.FAILED, E.FORGOTTEN, S.CLOSED)
def _forgotten(owner: Attachments, one: Attachment, _: object) -> AttachState:
    return owner.closed(one)
