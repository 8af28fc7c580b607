"""The core: one synchronous machine, events in, instructions out."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

from kvd.core import events as ev
from kvd.core import fetch_moves as fetch_moves  # fills the table of fetches
from kvd.core.attachments import Attachments
from kvd.core.clients import Client, Clients
from kvd.core.config import CoreConfig
from kvd.core.context import Context, Refusal, failure_code
from kvd.core.deadlines import Key
from kvd.core.fetch_messages import Answers, Wishes
from kvd.core.fetches import Fetches
from kvd.core.grants import Grants
from kvd.core.instructions import Instruction
from kvd.core.invariants import check
from kvd.core.jobs import Job, Jobs
from kvd.core.offer_feed import OfferFeed
from kvd.core.offers import Offers
from kvd.core.peers import Peer, Peers
from kvd.core.readers import Readers
from kvd.core.sessions import Session, Sessions
from kvd.core.statistics import Snapshot, Statistics, snapshot, statistics
from kvd.protocol import local, peer
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr, Rank


def _ticket() -> bytes:
    return secrets.token_bytes(16)


class Core:
    """`handle` is the only way in. Whatever a shim or a peer says, it does not raise."""

    def __init__(
        self,
        config: CoreConfig,
        boot_id: int,
        daemon_id: str,
        advertise: PeerAddr,
        version: str,
        *,
        token: Callable[[], bytes] = _ticket,
    ) -> None:
        self.config = config
        self.boot_id = boot_id
        self.daemon_id = daemon_id
        self.advertise = advertise
        self.version = version
        self.ctx = ctx = Context(config, boot_id, token)
        self.sessions = Sessions(ctx)
        self.clients = Clients(ctx, self.sessions)
        self.offers = Offers(ctx, self.sessions)
        self.readers = Readers(ctx, self.sessions)
        self.grants = Grants(ctx, self.clients, self.offers, self.readers)
        self.offers.grants = self.grants
        self.feed = OfferFeed(ctx, self.offers, self.grants)
        self.peers = Peers(ctx, self.sessions)
        self.jobs = Jobs(ctx)
        self.attachments = Attachments(ctx, self.peers)
        self.fetches = Fetches(ctx, self.sessions, self.peers, self.jobs)
        self.fetches.attachments = self.attachments
        self.attachments.fetches = self.fetches
        self.wishes = Wishes(ctx, self.sessions, self.fetches, self.jobs)
        self.answers = Answers(ctx, self.fetches, self.attachments, self.jobs)
        self._events: dict[type[Any], Callable[[Any], None]] = {
            ev.SessionOpened: self._session_opened,
            ev.SessionRegistered: self._session_registered,
            ev.SessionClosed: self._session_closed,
            ev.ShimMessage: self._shim_message,
            ev.PeerUp: self._peer_up,
            ev.PeerDown: self._peer_down,
            ev.PeerMessage: self._peer_message,
            ev.ClientJoined: self.clients.joined,
            ev.ClientLeft: self._client_left,
            ev.ClientMessage: self._client_message,
            ev.TransportOpened: lambda event: self.attachments.opened(event.attach_id),
            ev.TransportFailed: self._transport_failed,
            ev.PullDone: self._pull_done,
            ev.PullFailed: self._pull_failed,
            ev.TicketRead: lambda event: self.grants.read(event.ticket),
            ev.Tick: lambda event: None,
            ev.DrainStarted: self._drain_started,
        }
        self._shim: dict[type[Any], Callable[[Session, Any], None]] = {
            local.Offer: self.offers.open,
            local.OfferBlocks: self.feed.blocks,
            local.OfferDigests: self.feed.digests,
            local.Extend: self.feed.extend,
            local.Seal: self.feed.seal,
            local.Revoke: self.offers.revoke,
            local.RevokeAll: lambda session, _: self.offers.stop_all(session, Code.REVOKED),
            local.Fetch: self.wishes.fetch,
            local.FetchBlocks: self.wishes.blocks,
            local.FetchGo: self.wishes.go,
            local.Cancel: self.wishes.cancel,
            local.Release: self._release,
            local.Renew: self._renew,
            local.Ping: lambda session, m: self.sessions.send(session, local.Pong(m.seq)),
        }
        self._peer: dict[type[Any], Callable[[Peer, Any], None]] = {
            peer.AttachOk: self.attachments.accepted,
            peer.AttachRefused: lambda found, m: self.attachments.refused(
                found, m, failure_code(m.code)
            ),
            peer.Grant: self.answers.granted,
            peer.FetchRefused: self.answers.refused,
            peer.Progress: self.answers.progress,
            peer.FetchRevoked: self.answers.revoked,
            peer.NotifyResult: self.peers.notify_result,
            peer.EngineGone: self.attachments.engine_gone,
        }
        self._client: dict[type[Any], Callable[[Client, Any], None]] = {
            peer.Attach: self.clients.attach,
            peer.Detach: lambda client, m: self.grants.detach(client, m.attach_id),
            peer.FetchReq: self.grants.ask,
            peer.FetchGot: self.readers.got,
            peer.FetchClose: self.grants.close,
            peer.PeerRelease: self._peer_release,
            peer.PeerRenew: self._peer_renew,
        }
        self._due: dict[str, Callable[..., None]] = {
            "offer": self.offers.lapse,
            "park": self.grants.park_passed,
            "grant": self.grants.grant_passed,
            "fetch": self.fetches.deadline_passed,
            "fence": self.fetches.fence_passed,
            "attach": self.attachments.time_passed,
            "peer": self.peers.idle_passed,
            "notify": self.peers.notify_passed,
            "trim": self._trim,
        }

    def handle(self, event: ev.Event, now: float) -> list[Instruction]:
        """Take one event at time `now` (seconds, monotonic); returns what is to be done, in order.

        Deadlines that have passed by then are acted on after the event, whatever it is. Raises
        IllegalTransition if the core itself is wrong.
        """
        ctx = self.ctx
        ctx.now = max(ctx.now, now)
        self._events[type(event)](event)
        key = ctx.deadlines.pop_due(ctx.now)
        while key is not None:
            self._passed(key)
            key = ctx.deadlines.pop_due(ctx.now)
        self.jobs.pump()
        self._plan_trim()
        out, ctx.out = ctx.out, []
        return out

    def next_deadline(self) -> float | None:
        """When the next Tick is due, on the clock of `handle`; None when nothing waits."""
        return self.ctx.deadlines.next()

    @property
    def draining(self) -> bool:
        return self.ctx.draining

    @property
    def idle(self) -> bool:
        """No transfer is in flight, on either side. Offers that nobody fetches do not count."""
        return not (self.fetches.by_id or self.grants.count or self.jobs.running)

    def statistics(self) -> Statistics:
        return statistics(self)

    def snapshot(self) -> Snapshot:
        """Every live session, offer, fetch and attachment, for people to look at."""
        return snapshot(self)

    def validate(self) -> None:
        """Check the invariants; raises AssertionError. For tests: it costs a walk over all."""
        check(self)

    # --- sessions ---------------------------------------------------------------------------

    def _session_opened(self, event: ev.SessionOpened) -> None:
        _, replaced = self.sessions.open(event)
        for session in replaced:
            self._end_session(session, "a newer session of this rank was opened")

    def _session_registered(self, event: ev.SessionRegistered) -> None:
        self.sessions.register(event)

    def _session_closed(self, event: ev.SessionClosed) -> None:
        session = self.sessions.by_id.get(event.session)
        if session is None or not session.alive:
            self.ctx.late("SessionClosed")
            return
        # Nothing is sent from here on: the shim is gone.
        session.alive = False
        self._end_session(session, "the engine left")

    def _end_session(self, session: Session, detail: str) -> None:
        self.offers.stop_all(session, Code.ENGINE_GONE)
        self.grants.session_gone(session)
        self.clients.session_gone(session)
        for one in list(session.attachments):
            self.attachments.lose(one, Code.ENGINE_GONE, detail)
        for fetch in list(session.fetches.values()):
            self.fetches.fail(fetch, Code.ENGINE_GONE, detail)
        session.alive = False
        self.sessions.release_if_quiet(session)

    def _shim_message(self, event: ev.ShimMessage) -> None:
        session = self.sessions.get(event.session)
        run = self._shim.get(type(event.message))
        name = type(event.message).__name__
        if session is None:
            self.ctx.refused(Code.NOT_REGISTERED, name, f"session {event.session}")
        elif run is None:
            self.ctx.refused(Code.BAD_MESSAGE, name, "not a message for the core")
        else:
            run(session, event.message)

    def _release(self, session: Session, m: local.Release) -> None:
        message = peer.PeerRelease(
            m.transfer_id, m.generation, m.engine_id, m.remote.rank is not None
        )
        self.peers.notify(session, m.remote, message)

    def _renew(self, session: Session, m: local.Renew) -> None:
        message = peer.PeerRenew(
            m.transfer_id, m.generation, m.engine_id, m.remote.rank is not None
        )
        self.peers.notify(session, m.remote, message)

    def producers(self) -> list[tuple[str, Rank]]:
        """Engine id and rank of every registered session that may offer, the newest first."""
        return self.sessions.producers()

    # --- peers (we consume) -----------------------------------------------------------------

    def _peer_up(self, event: ev.PeerUp) -> None:
        found = self.peers.up(event, self._peer_restarted)
        if found is not None:
            self.attachments.peer_up(found)

    def _peer_restarted(self, found: Peer) -> None:
        self._lose_peer(found, str(Code.PEER_LOST), "the peer restarted")

    def _peer_down(self, event: ev.PeerDown) -> None:
        found = self.peers.by_addr.get(event.peer)
        if found is None:
            self.ctx.late("PeerDown")
            return
        self._lose_peer(found, event.code, event.detail)

    def _lose_peer(self, found: Peer, code: str, detail: str) -> None:
        failure: Refusal = self.peers.down(found, code, detail)
        self.attachments.peer_down(found, failure)

    def _peer_message(self, event: ev.PeerMessage) -> None:
        found = self.peers.by_addr.get(event.peer)
        run = self._peer.get(type(event.message))
        name = type(event.message).__name__
        if run is None:
            self.ctx.refused(Code.BAD_MESSAGE, name, "not a message for the core")
        elif found is None or not found.up:
            self.ctx.late(name)
        else:
            run(found, event.message)

    # --- clients (we produce) ---------------------------------------------------------------

    def _client_message(self, event: ev.ClientMessage) -> None:
        client = self.clients.by_id.get(event.client)
        run = self._client.get(type(event.message))
        name = type(event.message).__name__
        if run is None:
            self.ctx.refused(Code.BAD_MESSAGE, name, "not a message for the core")
        elif client is None:
            self.ctx.late(name)
        else:
            run(client, event.message)

    def _client_left(self, event: ev.ClientLeft) -> None:
        client = self.clients.by_id.get(event.client)
        if client is None:
            self.ctx.late("ClientLeft")
            return
        self.grants.client_left(client, failure_code(event.code))

    def _peer_release(self, client: Client, m: peer.PeerRelease) -> None:
        engine_id = self.sessions.meant(m.engine_id, m.any_engine)
        code = self.offers.release(engine_id, m.transfer_id, m.generation)
        self.ctx.to_client(client.id, peer.NotifyResult(m.transfer_id, "release", str(code)))

    def _peer_renew(self, client: Client, m: peer.PeerRenew) -> None:
        engine_id = self.sessions.meant(m.engine_id, m.any_engine)
        code = self.offers.renew(engine_id, m.transfer_id, m.generation)
        self.ctx.to_client(client.id, peer.NotifyResult(m.transfer_id, "renew", str(code)))

    # --- data -------------------------------------------------------------------------------

    def _transport_failed(self, event: ev.TransportFailed) -> None:
        self.attachments.broke(event.attach_id, failure_code(event.code), event.detail)

    def _pull_done(self, event: ev.PullDone) -> None:
        job = self.jobs.take(event.job)
        if job is None:
            self.ctx.late("PullDone")
            return
        self.fetches.job_done(job, event.nbytes)
        self._job_ended(job)

    def _pull_failed(self, event: ev.PullFailed) -> None:
        job = self.jobs.take(event.job)
        if job is None:
            self.ctx.late("PullFailed")
            return
        self.fetches.job_failed(job, Refusal(failure_code(event.code), event.detail))
        self._job_ended(job)

    def _job_ended(self, job: Job) -> None:
        self.jobs.wake(job.fetch)
        self.attachments.quiet(job.attachment)
        self.sessions.release_if_quiet(job.fetch.session)

    # --- time and drain ---------------------------------------------------------------------

    def _passed(self, key: Key) -> None:
        kind = key[0]
        assert isinstance(kind, str)
        self._due[kind](*key[1:])

    def _plan_trim(self) -> None:
        tables = (self.offers.tombstones, self.offers.early, self.fetches.told)
        times = [when for when in (table.next_expiry() for table in tables) if when is not None]
        if times and ("trim",) not in self.ctx.deadlines:
            # Not for each entry: they may live a little longer than they count.
            self.ctx.deadlines.set(("trim",), max(min(times), self.ctx.now + 1.0))

    def _trim(self) -> None:
        for table in (self.offers.tombstones, self.offers.early, self.fetches.told):
            table.trim(self.ctx.now)

    def _drain_started(self, event: ev.DrainStarted) -> None:
        if self.ctx.draining:
            return
        self.ctx.draining = True
        live = [session for session in self.sessions.by_id.values() if session.alive]
        for session in live:
            self.sessions.send(session, local.State(draining=True))
        self.grants.drain(live)
