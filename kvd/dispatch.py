"""Which part of the daemon carries out which of the core's instructions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import structlog

from kvd.attachments import Attachments
from kvd.core import events
from kvd.core import instructions as ask
from kvd.core.choice import SAME_HOST
from kvd.data_plane import DataPlane
from kvd.history import History
from kvd.local.server import LocalServer
from kvd.logging import OncePerKind
from kvd.metrics import Metrics
from kvd.peers.server import PeerServer
from kvd.peers.table import PeerTable
from kvd.protocol import peer
from kvd.protocol.codes import Code
from kvd.spans import Spans

log = structlog.get_logger("kvd.core")

I = TypeVar("I", bound=ask.Instruction)  # noqa: E741

QUIET = frozenset({"late"})
"""Records that are counted, and logged only for debugging."""
FROM_OUTSIDE = frozenset({"refused", "attach_failed"})
"""Records that a neighbour can cause as often as it likes: each kind of them has one line in
REPEAT_S, with how many were left out."""
REPEAT_S = 1.0


class Dispatcher:
    """Stateless: a table from instruction to method, and what to give up when a bug shows."""

    def __init__(
        self,
        *,
        feed: Callable[[events.Event], None],
        local: LocalServer,
        server: PeerServer,
        peers: PeerTable,
        attachments: Attachments,
        data: DataPlane,
        metrics: Metrics,
        history: History,
        spans: Spans | None = None,
    ) -> None:
        self._history = history
        self._spans = spans
        self._feed = feed
        self._local = local
        self._server = server
        self._peers = peers
        self._attachments = attachments
        self._data = data
        self._metrics = metrics
        self._once_a_while = OncePerKind(log, every_s=REPEAT_S)
        self._loop = asyncio.get_running_loop()
        self._table: dict[type, Callable[[Any], None]] = {}
        self._enter(ask.SendShim, lambda i: local.send(i.session, i.message))
        self._enter(ask.ReleaseSession, lambda i: local.release(i.session))
        self._enter(ask.ConnectPeer, lambda i: peers.connect(i.peer))
        self._enter(ask.DisconnectPeer, lambda i: peers.disconnect(i.peer))
        self._enter(ask.SendPeer, lambda i: peers.send(i.peer, i.message))
        self._enter(ask.SendClient, self._send_client)
        self._enter(ask.OpenTransport, attachments.open)
        self._enter(ask.CloseTransport, lambda i: attachments.close(i.attach_id))
        self._enter(ask.StartPull, attachments.start_pull)
        self._enter(ask.StopPulls, lambda i: attachments.stop_pulls(i.fetch_id))
        self._enter(ask.OpenTicket, self._open_ticket)
        self._enter(ask.ExtendTicket, data.extend_ticket)
        self._enter(ask.CloseTicket, lambda i: data.close_ticket(i.ticket))
        self._enter(ask.Record, self._record)

    def carry_out(self, instruction: ask.Instruction) -> None:
        """Does it, or starts it. May raise; `give_up` is for that."""
        self._table[type(instruction)](instruction)

    def give_up(self, what: events.Event | ask.Instruction, error: Exception) -> None:
        """A bug met `what`: ends the session, peer or client that it was about, nothing else."""
        detail = f"internal error at {type(what).__name__}: {error}"
        match what:
            case ask.StartPull():
                self._feed(events.PullFailed(what.job, Code.INTERNAL, detail))
            case ask.OpenTransport():
                self._feed(events.TransportFailed(what.attach_id, Code.INTERNAL, detail))
            case ask.ConnectPeer():
                self._feed(events.PeerDown(what.peer, Code.INTERNAL, detail))
            case events.SessionClosed() | ask.ReleaseSession():
                # The pins on the memory keep it mapped until its last copy has ended.
                self._attachments.stop_session(what.session)
                self._local.release(what.session)
            case (
                events.ShimMessage()
                | events.SessionOpened()
                | events.SessionRegistered()
                | ask.SendShim()
                | ask.OpenTicket()
            ):
                self._local.throw_out(what.session, Code.INTERNAL, detail)
            case events.PeerMessage() | events.PeerUp() | ask.SendPeer():
                self._peers.fail(what.peer, Code.INTERNAL, detail)
            case events.ClientMessage() | events.ClientJoined() | ask.SendClient():
                self._server.throw_out(what.client, Code.INTERNAL, detail)
            case events.PullDone() | events.PullFailed():
                self._end_session(self._attachments.session_of_job(what.job), detail)
            case events.TransportOpened() | events.TransportFailed():
                self._end_session(self._attachments.session_of(what.attach_id), detail)
            case _:
                pass

    # --- inside -----------------------------------------------------------------------------

    def _enter(self, kind: type[I], run: Callable[[I], None]) -> None:
        self._table[kind] = run

    def _end_session(self, session: int | None, detail: str) -> None:
        if session is not None:
            self._local.throw_out(session, Code.INTERNAL, detail)

    def _send_client(self, i: ask.SendClient) -> None:
        message = i.message
        if isinstance(message, peer.AttachOk):
            message = self._attach_ok(message)
        self._server.send(i.client, message)

    def _attach_ok(self, message: peer.AttachOk) -> peer.AttachOk:
        if message.transport == "tcp":
            message = msgspec.structs.replace(message, data_port=self._data.port)
        if message.transport not in SAME_HOST and any(one.handle for one in message.segments):
            # A handle opens the memory, so only who is to map it may have it.
            bare = [msgspec.structs.replace(one, handle=b"") for one in message.segments]
            message = msgspec.structs.replace(message, segments=bare)
        return message

    def _open_ticket(self, i: ask.OpenTicket) -> None:
        memory = self._local.memory(i.session)
        if memory is not None:
            self._data.open_ticket(i, memory, self._local.block_size(i.session))

    def _record(self, i: ask.Record) -> None:
        self._metrics.record(i)
        self._history.record(i)
        # An engine or a peer may wait for what follows; the line can wait for both.
        self._loop.call_soon(self._log, i)
        if self._spans is not None:
            self._loop.call_soon(self._spans.record, i)

    def _log(self, i: ask.Record) -> None:
        fields = {name: _plain(value) for name, value in i.fields.items()}
        if i.kind in FROM_OUTSIDE:
            kind = (i.kind, fields.get("code"), fields.get("what"))
            self._once_a_while.log("info", kind, i.kind, **fields)
            return
        level = log.debug if i.kind in QUIET else log.info
        level(i.kind, **fields)


def _plain(value: object) -> object:
    """Structs as what they look like in a log line."""
    return msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else value
