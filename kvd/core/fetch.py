"""Consumer: one fetch, its states, and the table that `fetch_moves.py` fills."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from kvd.core.context import Refusal
from kvd.core.manifest import Manifest
from kvd.core.sessions import Session
from kvd.core.transitions import Story, Table, new_story
from kvd.protocol import local, peer

if TYPE_CHECKING:
    from kvd.core.attachment import Attachment


class FetchState(StrEnum):
    ASSEMBLING = "assembling"
    CONNECTING = "connecting"
    ATTACHING = "attaching"
    ASKED = "asked"
    MOVING = "moving"
    VOIDING = "voiding"
    """The generation is gone; its jobs must end before the next one may be copied."""
    FENCED = "fenced"
    """A dead fence word was met; the producer is about to say why."""
    DRAINING = "draining"
    """Failed, but jobs are still in flight."""
    TOLD = "told"


class FetchEvent(StrEnum):
    GO = "go"
    PEER_UP = "peer up"
    ATTACHED = "attached"
    GRANTED = "granted"
    PROGRESS = "progress"
    AGAIN = "revoked, again"
    JOB_DONE = "job done"
    JOB_FAILED = "job failed"
    JOB_FENCED = "job fenced"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Fetch:
    session: Session
    message: local.Fetch
    count: int
    """Blocks of each group in the range."""
    dst: list[bytearray]
    deadline: float
    asked_at: float
    """When it was told to go."""
    reserved: list[set[int]] = field(default_factory=list)
    attachment: Attachment | None = None
    asked: bool = False
    """The producer has heard of it, and will hear its end."""
    generation: int | None = None
    ticket: bytes = b""
    fence_slot: int = 0
    fence_word: int = 0
    manifest: Manifest | None = None
    incoming: tuple[peer.Grant, Manifest] | None = None
    """A grant that came while jobs of the generation before were still in flight."""
    void: bool = False
    """Nothing that arrived so far may count."""
    failure: Refusal | None = None
    jobs: int = 0
    queued: bool = False
    received: int = 0
    early: int = 0
    """Bytes that had arrived when the producer said that the last of the range is valid."""
    reports: bool = False
    """The producer wants to hear how far it has got."""
    reported: int = 0
    parked_at: float = -1.0
    """When the producer's daemon was asked, the first time."""
    granted_at: float = -1.0
    first_byte: float = -1.0
    last_byte: float = -1.0
    state: FetchState = FetchState.ASSEMBLING
    story: Story = field(default_factory=new_story)
    moving: bool = False

    @property
    def id(self) -> str:
        return self.message.fetch_id

    @property
    def label(self) -> str:
        return f"{self.id} of {self.message.transfer_id}"

    @property
    def engine_id(self) -> str:
        return self.message.engine_id

    @property
    def copies(self) -> bool:
        return self.state is FetchState.MOVING


FETCHES: Table[Any, Fetch] = Table("fetch", FetchState.ASSEMBLING)
