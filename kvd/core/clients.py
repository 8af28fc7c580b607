"""Producer: consumers' daemons, and the attachments that they hold to engines here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvd.core.choice import SAME_HOST, device_of, reasons, unusable
from kvd.core.context import Context, Refusal
from kvd.core.events import ClientJoined
from kvd.core.sessions import Memory, Session, Sessions, same_rank
from kvd.protocol import peer
from kvd.protocol.codes import Code
from kvd.protocol.types import mismatch

if TYPE_CHECKING:
    from kvd.core.grant import Request


@dataclass(slots=True, eq=False)
class Client:
    id: int
    daemon_id: str
    boot_id: int
    same_host: bool
    peer: str
    """Whose quota its requests use; several daemons may share one."""
    attachments: dict[str, ClientAttachment] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class ClientAttachment:
    client: Client
    attach_id: str
    session: Session
    transport: str


class Clients:
    def __init__(self, ctx: Context, sessions: Sessions) -> None:
        self._ctx = ctx
        self._sessions = sessions
        self.by_id: dict[int, Client] = {}
        self.num_attachments = 0

    def joined(self, event: ClientJoined) -> None:
        if event.client in self.by_id:
            self._ctx.refused(Code.DUPLICATE, "ClientJoined", f"client {event.client}")
            return
        self.by_id[event.client] = Client(
            event.client,
            event.daemon_id,
            event.boot_id,
            event.same_host,
            event.peer or event.daemon_id,
        )

    def attach(self, client: Client, message: peer.Attach) -> None:
        if message.attach_id in client.attachments:
            self._ctx.refused(Code.DUPLICATE, "Attach", message.attach_id)
            return
        try:
            session, memory, transport = self._match(client, message)
        except Refusal as refusal:
            self._ctx.to_client(
                client.id,
                peer.AttachRefused(message.attach_id, str(refusal.code), refusal.detail),
            )
            self._ctx.record(
                "attach_failed",
                attach_id=message.attach_id,
                peer=client.daemon_id,
                transport="",
                code=str(refusal.code),
                detail=refusal.detail,
            )
            return
        attachment = ClientAttachment(client, message.attach_id, session, transport)
        client.attachments[message.attach_id] = attachment
        session.clients[client.id, message.attach_id] = attachment
        self.num_attachments += 1
        self._ctx.to_client(
            client.id,
            peer.AttachOk(
                attach_id=message.attach_id,
                engine_epoch=session.epoch,
                transport=transport,
                num_blocks=memory.num_blocks,
                segments=list(memory.segments),
                layers=list(memory.layers),
                fence_slots=memory.fence_slots,
                memory_key=session.id,
                engine_id=session.engine_id,
            ),
        )
        self._ctx.record(
            "attached",
            attach_id=message.attach_id,
            peer=client.daemon_id,
            transport=transport,
            code=str(Code.OK),
            detail="",
        )

    def _match(self, client: Client, message: peer.Attach) -> tuple[Session, Memory, str]:
        candidates = self._sessions.producing(
            self._sessions.meant(message.engine_id, message.any_engine)
        )
        if not candidates:
            raise Refusal(Code.UNKNOWN_ENGINE, f"no engine {message.engine_id} is registered here")
        session = next((one for one in candidates if same_rank(one.rank, message.rank)), None)
        if session is None:
            raise Refusal(
                Code.GEOMETRY_MISMATCH,
                f"rank: ours {[one.rank for one in candidates]!r}, theirs {message.rank!r}",
            )
        memory = session.memory
        assert memory is not None
        if not session.produces:
            raise Refusal(Code.UNSUPPORTED, f"engine {message.engine_id} does not produce")
        difference = mismatch(memory.geometry, message.geometry)
        if difference is not None:
            name, ours, theirs = difference
            raise Refusal(Code.GEOMETRY_MISMATCH, f"{name}: ours {ours}, theirs {theirs}")
        if self.num_attachments >= self._ctx.config.max_attachments:
            raise Refusal(Code.OVERLOADED, "max_attachments is reached")
        allowed = self._ctx.config.transports
        why: dict[str, str] = {}
        for transport in message.transports:
            if transport not in allowed:
                why[transport] = "not allowed here"
                continue
            why[transport] = unusable(
                transport,
                ours=device_of(memory),
                theirs=message.device,
                same_host=client.same_host,
            )
            if transport in SAME_HOST and not memory.fence_slots:
                why[transport] = "the engine has no fence table"
            if not why[transport]:
                return session, memory, transport
        raise Refusal(
            Code.TRANSPORT_UNAVAILABLE,
            f"asked for {reasons(message.transports, why) or 'none'};"
            f" allowed here: {', '.join(allowed)}"
            f"{'' if client.same_host else ' (not on one host)'}",
        )

    def detach(self, attachment: ClientAttachment) -> None:
        """Forget an attachment; its requests are ended by the caller."""
        client = attachment.client
        if client.attachments.pop(attachment.attach_id, None) is not None:
            attachment.session.clients.pop((client.id, attachment.attach_id), None)
            self.num_attachments -= 1

    def session_gone(self, session: Session) -> None:
        """Tell every daemon that is attached to an engine that it left."""
        attached = list(session.clients.values())
        for client_id in dict.fromkeys(one.client.id for one in attached):
            self._ctx.to_client(client_id, peer.EngineGone(session.engine_id, session.epoch))
        for attachment in attached:
            self.detach(attachment)
