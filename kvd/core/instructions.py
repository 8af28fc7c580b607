"""Everything that the core can ask of the shell. Carried out in order."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.protocol import local
from kvd.protocol.peer import AttachOk, ToConsumer, ToProducer
from kvd.protocol.types import PeerAddr, Watermark


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks of one group in a run of layers, to be copied whole.

    `src[i]` and `dst[i]` are the producer's and the consumer's id of block index `first + i`,
    packed u32. Layers are the group's among `[first_layer, first_layer + num_layers)`. NULL
    blocks never appear in a piece.
    """

    group: int
    first_layer: int
    num_layers: int
    indices: bytes
    """Packed u32 block indices, counted from the fetch's first block."""
    src: bytes
    dst: bytes


@dataclass(frozen=True, slots=True)
class SendShim:
    session: int
    message: local.ToShim


@dataclass(frozen=True, slots=True)
class ReleaseSession:
    """No job of ours touches the session's memory any more: unmap it, close its socket."""

    session: int


@dataclass(frozen=True, slots=True)
class ConnectPeer:
    """Answered by PeerUp or PeerDown. Keeps trying until DisconnectPeer.

    For a peer that is being connected to it means: without a pause, now.
    """

    peer: PeerAddr


@dataclass(frozen=True, slots=True)
class DisconnectPeer:
    peer: PeerAddr


@dataclass(frozen=True, slots=True)
class SendPeer:
    """To a producer's daemon; dropped if it is down (PeerDown was or will be an event)."""

    peer: PeerAddr
    message: ToProducer


@dataclass(frozen=True, slots=True)
class SendClient:
    """To a consumer's daemon."""

    client: int
    message: ToConsumer


@dataclass(frozen=True, slots=True)
class OpenTransport:
    """Answered by TransportOpened or TransportFailed."""

    attach_id: str
    peer: PeerAddr
    session: int
    answer: AttachOk


@dataclass(frozen=True, slots=True)
class CloseTransport:
    """No pull runs on it any more. Exactly one follows each OpenTransport, failed ones too."""

    attach_id: str


@dataclass(frozen=True, slots=True)
class StartPull:
    """Copy pieces into the session's blocks. Answered by PullDone or PullFailed, always."""

    job: int
    attach_id: str
    session: int
    fetch_id: str
    ticket: bytes
    fence_slot: int
    fence_word: int
    pieces: tuple[Piece, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class StopPulls:
    """Stop the fetch's jobs as soon as may be. They are still answered, each.

    Concerns only jobs started before it: the same fetch may start new ones later, once all of
    these were answered.
    """

    fetch_id: str


@dataclass(frozen=True, slots=True)
class OpenTicket:
    """Let a consumer read these blocks over a data connection.

    `blocks[g]` are packed source ids; entry i is block index `first_index + i` of the producer's
    table and index i of the fetch. `valid` are in producer tokens, as in the grant.
    """

    ticket: bytes
    session: int
    fence_slot: int
    fence_word: int
    first_index: int
    blocks: tuple[bytes, ...]
    valid: tuple[Watermark, ...]


@dataclass(frozen=True, slots=True)
class ExtendTicket:
    """`blocks[g]` are appended to the ticket's lists; `valid` replaces its watermarks."""

    ticket: bytes
    blocks: tuple[bytes, ...]
    valid: tuple[Watermark, ...]


@dataclass(frozen=True, slots=True)
class CloseTicket:
    ticket: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """Something an operator wants to see: one log line, and counters.

    Kinds and fields: `fetch_done` (code, fetch_id, transfer_id, generation, engine_id,
    transport, tokens, nbytes, early_bytes, seconds, stages); `fetch_served` (code, fetch_id,
    transfer_id, nbytes, transport, seconds, stages: both since the request came); `offer_ended`
    (reason, transfer_id, generation, engine_id, fetches);
    `refused` (code, what, detail); `attached` / `attach_failed` (attach_id, peer, transport,
    code, detail); `late` (what).
    """

    kind: str
    fields: dict[str, object] = field(default_factory=dict)


Instruction = (
    SendShim
    | ReleaseSession
    | ConnectPeer
    | DisconnectPeer
    | SendPeer
    | SendClient
    | OpenTransport
    | CloseTransport
    | StartPull
    | StopPulls
    | OpenTicket
    | ExtendTicket
    | CloseTicket
    | Record
)
