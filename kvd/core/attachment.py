"""Consumer: one attachment, its states, and the table that `attachments.py` fills."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from kvd.core.context import Refusal
from kvd.core.peers import Peer
from kvd.core.sessions import Memory, Session
from kvd.core.transitions import Story, Table, new_story
from kvd.protocol import peer as wire
from kvd.protocol.types import PeerAddr

if TYPE_CHECKING:
    from kvd.core.fetch import Fetch


class AttachState(StrEnum):
    CONNECTING = "connecting"
    ASKED = "asked"
    OPENING = "opening"
    OPEN = "open"
    FAILED = "failed"
    """Remembered for a moment, so that not every fetch tries again."""
    CLOSING = "closing"
    """Broken or void, but jobs are still in flight on it."""
    CLOSED = "closed"


class AttachEvent(StrEnum):
    PEER_UP = "peer up"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    OPENED = "transport opened"
    BROKE = "transport failed"
    TIMED_OUT = "timed out"
    LOST = "lost"
    IDLE = "idle"
    QUIET = "last job ended"
    FORGOTTEN = "forgotten"


@dataclass(slots=True, eq=False)
class Attachment:
    id: str
    session: Session
    memory: Memory
    peer: Peer
    engine_id: str
    boot_id: int = 0
    """The peer's life in which it was asked."""
    offered: list[str] = field(default_factory=list)
    answer: wire.AttachOk | None = None
    failure: Refusal | None = None
    fetches: dict[Fetch, None] = field(default_factory=dict)
    """In the order in which they came."""
    ready: deque[Fetch] = field(default_factory=deque)
    queued: bool = False
    jobs: int = 0
    state: AttachState = AttachState.CONNECTING
    story: Story = field(default_factory=new_story)
    moving: bool = False

    @property
    def label(self) -> str:
        return self.id

    @property
    def key(self) -> tuple[int, PeerAddr, str]:
        return (self.session.id, self.peer.addr, self.engine_id)

    @property
    def transport(self) -> str:
        return self.answer.transport if self.answer is not None else ""


ATTACHMENTS: Table[Any, Attachment] = Table("attachment", AttachState.CONNECTING)
