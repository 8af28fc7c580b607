"""Producer: one request of a consumer's daemon, from FetchReq to FetchClose."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvd.core.clients import Client, ClientAttachment
from kvd.core.offers import Offer
from kvd.protocol import peer
from kvd.protocol.types import Stages


class RequestState(StrEnum):
    PARKED = "parked"
    """Its transfer (or generation) is not offered yet."""
    HELD = "held"
    """Its offer is there, but the prompt digest at its end is not known yet."""
    GRANTED = "granted"


@dataclass(slots=True, eq=False)
class Request:
    """One FetchReq of a client, until its FetchClose."""

    client: Client
    attachment: ClientAttachment
    message: peer.FetchReq
    asked_at: float
    """When it came."""
    state: RequestState = RequestState.PARKED
    offer: Offer | None = None
    ticket: bytes = b""
    nbytes: int = 0
    """What it takes of its peer's `max_bytes_per_peer`, while it is granted."""
    sent: list[int] = field(default_factory=list)
    """For each group, how many block ids the consumer has been told."""
    got: int = 0
    """Tokens that the consumer says it has; only where it was asked to say."""
    parked_at: float = -1.0
    """When it began to wait, for its offer or for a digest of it; one that did not has none."""
    granted_at: float = -1.0
    """The last time: what came of a generation before does not count, nor what was read of it."""
    first_byte: float = -1.0
    last_byte: float = -1.0
    """When the first and the last piece was sent, where this daemon is the one that sends."""

    def waits(self, now: float) -> None:
        if self.parked_at < 0:
            self.parked_at = now

    def granted(self, now: float) -> None:
        self.granted_at = now
        self.first_byte = self.last_byte = -1.0

    def read(self, now: float) -> None:
        self.last_byte = now
        if self.first_byte < 0:
            self.first_byte = now

    @property
    def stages(self) -> Stages:
        return Stages.since(
            self.asked_at,
            granted=self.granted_at,
            first_byte=self.first_byte,
            last_byte=self.last_byte,
            parked=self.parked_at,
        )

    @property
    def key(self) -> tuple[int, str]:
        return (self.client.id, self.message.fetch_id)

    @property
    def first_index(self) -> int:
        return self.message.start // self._block_size

    @property
    def stop_index(self) -> int:
        return -(-self.message.end // self._block_size)

    @property
    def _block_size(self) -> int:
        memory = self.attachment.session.memory
        assert memory is not None
        return memory.block_size
