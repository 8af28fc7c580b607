"""Producer: one request of a consumer's daemon, from FetchReq to FetchClose."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from kvd.core.clients import Client, ClientAttachment
from kvd.core.offers import Offer
from kvd.protocol import peer


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
    state: RequestState = RequestState.PARKED
    offer: Offer | None = None
    ticket: bytes = b""
    nbytes: int = 0
    """What it takes of its peer's `max_bytes_per_peer`, while it is granted."""
    sent: list[int] = field(default_factory=list)
    """For each group, how many block ids the consumer has been told."""
    got: int = 0
    """Tokens that the consumer says it has; only where it was asked to say."""

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
