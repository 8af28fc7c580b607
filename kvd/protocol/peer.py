"""Daemon <-> daemon messages, over ZMQ. A consumer's DEALER asks a producer's ROUTER.

Every frame is an `Envelope`: protocol version and the sender's boot id travel with each message,
so that nothing from a daemon's earlier life is ever taken for its present one.
A pair of engines is attached once (geometry, memory and transport agreed); fetches ride on the
attachment.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvd.protocol.types import (
    U32,
    U63,
    Digest,
    Geometry,
    Id,
    LayerLayout,
    Packed,
    Port,
    Rank,
    Seconds,
    SegmentKind,
    Struct,
    Watermark,
)

MAX_FRAME = 8 * 2**20


class PeerMessage(Struct, frozen=True, tag_field="t", tag=lambda name: name):
    """Base of all messages between daemons."""


# --- consumer's daemon -> producer's daemon -------------------------------------------------


class PeerHello(PeerMessage, frozen=True):
    """First message on a connection; `host` identifies the machine as far as it can be known."""

    daemon_id: Id
    version: str
    host: str


class Attach(PeerMessage, frozen=True):
    """Binds a consumer engine's rank to a producer engine's: checked before any data moves.

    `transports`: what the consumer can use, best first. `any_engine`: the id may be of an earlier
    life of the engine; where just one other producer is registered, that one is meant. `device`:
    where the consumer's KV is, "cpu" or a GPU's UUID.
    """

    attach_id: Id
    engine_id: Id
    consumer_engine_id: Id
    consumer_epoch: U63
    rank: Rank
    geometry: Geometry
    transports: list[str]
    any_engine: bool = False
    device: str = "cpu"


class Detach(PeerMessage, frozen=True):
    attach_id: Id


class FetchReq(PeerMessage, frozen=True):
    fetch_id: Id
    attach_id: Id
    transfer_id: Id
    generation: U63 | None
    start: U63
    end: U63
    digest: Digest
    park_s: Seconds


class FetchGot(PeerMessage, frozen=True):
    """All that was valid so far has arrived: tokens `[start, tokens)` in every layer."""

    fetch_id: Id
    generation: U63
    tokens: U63


class FetchClose(PeerMessage, frozen=True):
    """The consumer is done with a fetch, one way or the other: its `code`, and bytes received.

    Sent only when the consumer's daemon reads nothing of it any more. `sole` (since 1.4): the
    consumer knows of no other fetch of this transfer.
    """

    fetch_id: Id
    code: str
    nbytes: U63
    sole: bool = False


class PeerRelease(PeerMessage, frozen=True):
    transfer_id: Id
    generation: U63 | None
    engine_id: Id
    any_engine: bool = False


class PeerRenew(PeerMessage, frozen=True):
    transfer_id: Id
    generation: U63 | None
    engine_id: Id
    any_engine: bool = False


class Heartbeat(PeerMessage, frozen=True):
    seq: U63


class NcclOpen(PeerMessage, frozen=True):
    """Asks the producer's daemon to join a communicator, in which the consumer's is rank 0.

    `chunk_nbytes`, `ring`: size and number of staging buffers that the consumer would have.
    `late`: it waits for the second NcclReady of chunks whose first one is `late`.
    """

    comm: Id
    unique_id: Annotated[bytes, Meta(min_length=128, max_length=128)]
    chunk_nbytes: U63
    ring: U32
    late: bool = False


class NcclWant(PeerMessage, frozen=True):
    """Grants one staging buffer: the producer may gather these blocks for it.

    `indices`: packed u32 block indices of the fetch that `ticket` admits; `nbytes` in all.
    """

    comm: Id
    seq: U63
    ticket: Annotated[bytes, Meta(min_length=16, max_length=16)]
    group: U32
    first_layer: U32
    num_layers: U32
    indices: Packed
    nbytes: U63


class NcclGo(PeerMessage, frozen=True):
    """The receive for `seq` is posted, so the send may be; without `send` nobody wants it."""

    comm: Id
    seq: U63
    send: bool


class NcclClose(PeerMessage, frozen=True):
    """The consumer's daemon ends the communicator; the producer's must end it too."""

    comm: Id


# --- producer's daemon -> consumer's daemon -------------------------------------------------


class PeerWelcome(PeerMessage, frozen=True):
    """`link`: path of the Unix socket over which daemons on one host pass memory."""

    daemon_id: Id
    version: str
    host: str
    link: str
    nonce: Annotated[bytes, Meta(min_length=16, max_length=16)]


class PeerRefused(PeerMessage, frozen=True):
    code: str
    detail: str


class SegmentInfo(Struct, frozen=True):
    """See `kvd.protocol.local.AddSegment`. Handles go only to those who are to map the memory."""

    segment: U32
    kind: SegmentKind
    nbytes: U63
    device: str
    handle: bytes = b""
    offset: U63 = 0
    base_nbytes: U63 = 0

    @property
    def has_fd(self) -> bool:
        """Whether a descriptor travels with it."""
        return self.kind == "memfd" or (self.kind == "vmm" and not self.handle)


class AttachOk(PeerMessage, frozen=True):
    """`transport` is the producer's choice among those offered.

    `data_port`: where `tcp` connects, on the host that the consumer already talks to.
    `engine_id`: the engine that was found, where any was asked for.
    `memory_key`: names the producer engine's memory on the same-host link.
    """

    attach_id: Id
    engine_epoch: U63
    transport: str
    num_blocks: U32
    segments: list[SegmentInfo]
    layers: list[LayerLayout]
    fence_slots: U32
    memory_key: U63
    data_port: Port | None = None
    engine_id: str = ""


class AttachRefused(PeerMessage, frozen=True):
    attach_id: Id
    code: str
    detail: str


class Grant(PeerMessage, frozen=True):
    """The producer agrees to serve a fetch from one generation.

    `blocks`: for each group, source block ids for indices [start // block_size, ...), as far as
    known; more come with Progress. `ticket` admits this fetch on a data connection. `report`: the
    producer wants FetchGot (since 1.1).
    """

    fetch_id: Id
    generation: U63
    ticket: Annotated[bytes, Meta(min_length=16, max_length=16)]
    fence_slot: U32
    fence_word: U63
    blocks: list[Packed]
    valid: list[Watermark]
    sealed: bool
    report: bool = False


class FetchRefused(PeerMessage, frozen=True):
    fetch_id: Id
    code: str
    detail: str


class Progress(PeerMessage, frozen=True):
    """More of a granted fetch became valid. `blocks` continue each group's list."""

    fetch_id: Id
    generation: U63
    blocks: list[Packed]
    valid: list[Watermark]
    sealed: bool


class FetchRevoked(PeerMessage, frozen=True):
    """The generation being fetched is gone. With `again` the fetch is parked for the next one."""

    fetch_id: Id
    generation: U63
    code: str
    again: bool


class NotifyResult(PeerMessage, frozen=True):
    transfer_id: Id
    what: str
    code: str


class EngineGone(PeerMessage, frozen=True):
    """A producer engine left: its attachments are void, its memory must be unmapped."""

    engine_id: Id
    engine_epoch: U63


class HeartbeatAck(PeerMessage, frozen=True):
    seq: U63


class NcclOpened(PeerMessage, frozen=True):
    """Answer to NcclOpen. With `code` "ok" both sides join now, with buffers of this size."""

    comm: Id
    code: str
    detail: str = ""
    chunk_nbytes: U63 = 0
    ring: U32 = 0


class NcclReady(PeerMessage, frozen=True):
    """`code` "ok": the bytes of `seq` are staged and were valid after they had been copied.

    With `late` they are not staged but will be sent from the engine's blocks: whether they were
    valid, a second one says once they are gone. Only for a consumer that opened with `late`.
    """

    comm: Id
    seq: U63
    code: str
    detail: str = ""
    late: bool = False


class NcclClosed(PeerMessage, frozen=True):
    """The producer's daemon ended the communicator, and why."""

    comm: Id
    code: str
    detail: str = ""


NcclToProducer = NcclOpen | NcclWant | NcclGo | NcclClose
NcclToConsumer = NcclOpened | NcclReady | NcclClosed
ToProducer = (
    PeerHello
    | Attach
    | Detach
    | FetchReq
    | FetchGot
    | FetchClose
    | PeerRelease
    | PeerRenew
    | Heartbeat
    | NcclToProducer
)
ToConsumer = (
    PeerWelcome
    | PeerRefused
    | AttachOk
    | AttachRefused
    | Grant
    | FetchRefused
    | Progress
    | FetchRevoked
    | NotifyResult
    | EngineGone
    | HeartbeatAck
    | NcclToConsumer
)


class ProducerEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """What a DEALER sends: `epoch` is the sending daemon's boot id."""

    major: U32
    minor: U32
    epoch: U63
    body: ToProducer


class ConsumerEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """What a ROUTER sends."""

    major: U32
    minor: U32
    epoch: U63
    body: ToConsumer
