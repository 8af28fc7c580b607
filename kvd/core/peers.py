"""Consumer: producers' daemons as we know them, and releases and renewals on their way to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvd.core.context import Context, Refusal, failure_code
from kvd.core.events import PeerUp
from kvd.core.instructions import ConnectPeer, DisconnectPeer
from kvd.core.sessions import Session, Sessions
from kvd.protocol import local, peer
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr

if TYPE_CHECKING:
    from kvd.core.attachment import Attachment

MAX_BACKLOG = 4096


@dataclass(slots=True, eq=False)
class Notify:
    """One PeerRelease or PeerRenew that waits for its answer; without a session nobody asked."""

    number: int
    session: Session | None
    message: peer.PeerRelease | peer.PeerRenew

    @property
    def what(self) -> str:
        return "release" if isinstance(self.message, peer.PeerRelease) else "renew"


@dataclass(slots=True, eq=False)
class Peer:
    addr: PeerAddr
    up: bool = False
    boot_id: int = 0
    daemon_id: str = ""
    same_host: bool = False
    only_probed: bool = False
    """No engine ever asked for it; it is forgotten when the last probe ends."""
    attachments: dict[Attachment, None] = field(default_factory=dict)
    notifies: dict[int, Notify] = field(default_factory=dict)
    """In the order in which they were sent."""
    backlog: deque[tuple[int, peer.ToProducer]] = field(
        default_factory=lambda: deque(maxlen=MAX_BACKLOG)
    )
    """(boot id, message) for one that is down but may come back as the same process."""
    failure: Refusal | None = None
    failed_until: float = 0.0


class Peers:
    def __init__(self, ctx: Context, sessions: Sessions) -> None:
        self._ctx = ctx
        self._sessions = sessions
        self.by_addr: dict[PeerAddr, Peer] = {}
        self.num_notifies = 0

    def reach(self, addr: PeerAddr, *, probe: bool) -> Peer:
        """The peer, being connected to. Raises Refusal if it just failed, or is one too many.

        For a probe it is tried anew, however it ended last.
        """
        found = self.by_addr.get(addr)
        if found is None:
            if len(self.by_addr) >= self._ctx.config.max_peers:
                raise Refusal(Code.OVERLOADED, "max_peers is reached")
            found = self.by_addr[addr] = Peer(addr, only_probed=probe)
            self._ctx.emit(ConnectPeer(addr))
            self.idle_or_not(found)
        elif probe:
            if not found.up:
                self._ctx.emit(ConnectPeer(addr))
            return found
        found.only_probed = probe
        if not found.up and found.failure is not None and found.failed_until > self._ctx.now:
            raise Refusal(found.failure.code, found.failure.detail)
        return found

    def up(self, event: PeerUp, restarted: Callable[[Peer], None]) -> Peer | None:
        """`restarted` is called first for a peer that was up in an earlier life."""
        found = self.by_addr.get(event.peer)
        if found is None:
            self._ctx.late("PeerUp")
            return None
        if found.up:
            if found.boot_id == event.boot_id:
                self._ctx.late("PeerUp")
                return None
            restarted(found)
        found.up = True
        found.boot_id = event.boot_id
        found.daemon_id = event.daemon_id
        found.same_host = event.same_host
        found.failure = None
        backlog, found.backlog = found.backlog, deque(maxlen=MAX_BACKLOG)
        for boot_id, message in backlog:
            self.send(found, boot_id, message)
        for notify in found.notifies.values():
            self._ctx.to_peer(found.addr, notify.message)
        return found

    def down(self, found: Peer, code: str, detail: str) -> Refusal:
        """Returns why what depends on the peer fails; new tries are answered so for a moment."""
        if found.up:
            failure = Refusal(Code.PEER_LOST, detail)
        else:
            named = failure_code(code)
            known = (Code.VERSION_MISMATCH, Code.PEER_NOT_ALLOWED)
            failure = Refusal(named if named in known else Code.PEER_UNREACHABLE, detail)
        found.up = False
        found.failure = failure
        found.failed_until = self._ctx.now + self._ctx.config.failure_cache_s
        for notify in list(found.notifies.values()):
            self._answer(found, notify, failure.code)
        return failure

    def send(self, found: Peer, boot_id: int, message: peer.ToProducer) -> None:
        """Send what concerns the peer's life `boot_id`; kept if that may come back."""
        if found.boot_id != boot_id:
            return
        if found.up:
            self._ctx.to_peer(found.addr, message)
        else:
            found.backlog.append((boot_id, message))

    def idle_or_not(self, found: Peer) -> None:
        key = ("peer", found.addr)
        if found.attachments or found.notifies:
            self._ctx.deadlines.clear(key)
        elif key not in self._ctx.deadlines:
            kept_s = 0.0 if found.only_probed else self._ctx.config.peer_idle_s
            self._ctx.deadlines.set(key, self._ctx.now + kept_s)

    def idle_passed(self, addr: PeerAddr) -> None:
        found = self.by_addr.get(addr)
        if found is not None and not found.attachments and not found.notifies:
            del self.by_addr[addr]
            self._ctx.emit(DisconnectPeer(addr))

    # --- releases and renewals --------------------------------------------------------------

    def notify(
        self,
        session: Session | None,
        addr: PeerAddr,
        message: peer.PeerRelease | peer.PeerRenew,
    ) -> None:
        notify = Notify(self._ctx.number(), session, message)
        try:
            if self.num_notifies >= self._ctx.config.max_notifies:
                raise Refusal(Code.OVERLOADED, "max_notifies is reached")
            found = self.reach(addr, probe=session is not None and session.probe)
        except Refusal as refusal:
            self._tell(notify, refusal.code)
            return
        found.notifies[notify.number] = notify
        self.num_notifies += 1
        self.idle_or_not(found)
        self._ctx.deadlines.set(
            ("notify", addr, notify.number), self._ctx.now + self._ctx.config.attach_timeout_s
        )
        if found.up:
            self._ctx.to_peer(addr, message)

    def notify_result(self, found: Peer, message: peer.NotifyResult) -> None:
        for notify in found.notifies.values():
            if notify.message.transfer_id == message.transfer_id and notify.what == message.what:
                ok = message.code == Code.OK
                self._answer(found, notify, Code.OK if ok else failure_code(message.code))
                return
        self._ctx.late("NotifyResult")

    def notify_passed(self, addr: PeerAddr, number: int) -> None:
        found = self.by_addr.get(addr)
        notify = found.notifies.get(number) if found is not None else None
        if found is not None and notify is not None:
            self._answer(found, notify, Code.DEADLINE if found.up else Code.PEER_UNREACHABLE)

    def _answer(self, found: Peer, notify: Notify, code: Code) -> None:
        if found.notifies.pop(notify.number, None) is None:
            return
        self.num_notifies -= 1
        self._ctx.deadlines.clear(("notify", found.addr, notify.number))
        self.idle_or_not(found)
        self._tell(notify, code)

    def _tell(self, notify: Notify, code: Code) -> None:
        transfer_id = notify.message.transfer_id
        if code is not Code.OK:
            self._ctx.refused(code, notify.what, transfer_id)
        if notify.session is not None:
            self._sessions.send(
                notify.session, local.NotifyDone(transfer_id, notify.what, str(code))
            )
