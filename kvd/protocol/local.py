"""Shim <-> daemon messages, over AF_UNIX SOCK_SEQPACKET: one message a frame, at most 64 KiB.

Order on a session: Hello -> Welcome | Refused; then AddSegment (one fd each, or a handle),
AddFence (one fd), AddLayers (as many as needed), Register -> Registered | Refused; then the rest
in any order. Long lists are split over several frames: a list is complete when the closing
message (`Register`, `Extend`/`Seal`, `FetchGo`) names it. A fetch with short lists comes whole.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvd.protocol.types import (
    U32,
    U63,
    Digest,
    Geometry,
    Id,
    LayerLayout,
    Packed,
    PeerAddr,
    Rank,
    Role,
    Seconds,
    SegmentKind,
    Stages,
    Struct,
)

MAX_FRAME = 64 * 1024
MAX_TRACEPARENT = 64
"""W3C's has 55 characters."""
DOCTOR = "kvd-doctor"
"""`Hello.client` of one that only tries peers (`kvd doctor --peer`), and needs none of them."""


class LocalMessage(Struct, frozen=True, tag_field="t", tag=lambda name: name):
    """Base of all messages on the Unix socket."""


# --- shim -> daemon -------------------------------------------------------------------------


class Hello(LocalMessage, frozen=True):
    """First frame of a session. `epoch` is new at each start of the engine's process."""

    proto_major: U32
    proto_minor: U32
    engine_id: Id
    epoch: U63
    rank: Rank
    role: Role
    client: str


class AddSegment(LocalMessage, frozen=True):
    """One shareable piece of memory; memfd and vmm carry one fd in the same frame.

    Of a GPU: `device` is its UUID; `handle` is a CUDA IPC handle (64 bytes), or a fabric handle
    instead of the descriptor of vmm; the segment is `[offset, offset + nbytes)` of an allocation
    of `base_nbytes` bytes, which is what the handle or descriptor stands for.
    """

    segment: U32
    kind: SegmentKind
    nbytes: U63
    device: str = "cpu"
    handle: Annotated[bytes, Meta(max_length=256)] = b""
    offset: U63 = 0
    base_nbytes: U63 = 0


class AddFence(LocalMessage, frozen=True):
    """The fence table, `slots` 64-bit words in one memfd; carries one fd."""

    slots: U32


class AddLayers(LocalMessage, frozen=True):
    layers: list[LayerLayout]


class Register(LocalMessage, frozen=True):
    """Closes the description of memory: segments, fence table and layers are complete."""

    geometry: Geometry
    num_blocks: Annotated[int, Meta(ge=1, le=2**32 - 2)]


class Offer(LocalMessage, frozen=True):
    """Opens an offer: the producer will hold KV of `transfer_id` for consumers to fetch.

    `slot`/`word`: the fence table's slot and the value that it holds while this offer lives.
    `lease_s`: how long it is held if nobody fetches. `watched`: OfferRead is wanted (since 1.1).
    """

    transfer_id: Id
    generation: U63
    slot: U32
    word: U63
    lease_s: Seconds
    watched: bool = False


class OfferBlocks(LocalMessage, frozen=True):
    """Block ids of an offer: index `first` of group `group`'s block table and those after it."""

    transfer_id: Id
    generation: U63
    group: U32
    first: U32
    blocks: Packed


class OfferDigests(LocalMessage, frozen=True):
    """Prompt digests: 16 bytes for each token position in `positions` (packed u32)."""

    transfer_id: Id
    generation: U63
    positions: Packed
    digests: Packed


class Extend(LocalMessage, frozen=True):
    """Tokens `[0, tokens)` are now valid in these layers; `num_layers` 0 means all layers."""

    transfer_id: Id
    generation: U63
    tokens: U63
    first_layer: U32 = 0
    num_layers: U32 = 0


class Seal(LocalMessage, frozen=True):
    """The offer is complete: all layers are valid for `[0, tokens)`, and no more will come."""

    transfer_id: Id
    generation: U63
    tokens: U63


class Revoke(LocalMessage, frozen=True):
    """The producer takes an offer back (its fence word is flipped already)."""

    transfer_id: Id
    generation: U63


class RevokeAll(LocalMessage, frozen=True):
    """All offers of this session are taken back."""


class Fetch(LocalMessage, frozen=True):
    """Asks for tokens `[start, end)` of a transfer.

    `blocks` has each group's destination ids, and the fetch starts at once (since 1.3); with None
    `FetchBlocks` follow, and `FetchGo` starts it. `start` is a multiple of the block size; `end`
    too, or the offer's own end. `digest` is the prompt digest at `end`. `generation` None takes
    whatever generation is offered. The clock of `deadline_s` starts when the fetch does; `park_s`
    is how long an unknown transfer is waited for. `sole` (since 1.4): the consumer knows of no
    other fetch of this transfer, so its producer need not hold it once this one has come through.
    """

    fetch_id: Id
    transfer_id: Id
    generation: U63 | None
    remote: PeerAddr
    engine_id: Id
    start: U63
    end: U63
    digest: Digest
    deadline_s: Seconds
    park_s: Seconds
    traceparent: Annotated[str, Meta(max_length=MAX_TRACEPARENT)] = ""
    """W3C trace context of the request, for the daemon's own span of the fetch."""
    blocks: list[Packed] | None = None
    sole: bool = False


class FetchBlocks(LocalMessage, frozen=True):
    """Destination block ids; index 0 is the block that holds token `start`."""

    fetch_id: Id
    group: U32
    first: U32
    blocks: Packed


class FetchGo(LocalMessage, frozen=True):
    fetch_id: Id


class Cancel(LocalMessage, frozen=True):
    """Stop a fetch. FetchDone still comes, when no byte can land any more."""

    fetch_id: Id


class Release(LocalMessage, frozen=True):
    """The consumer does not need this transfer (it holds everything, or gave up)."""

    transfer_id: Id
    generation: U63 | None
    remote: PeerAddr
    engine_id: Id


class Renew(LocalMessage, frozen=True):
    """The consumer still means to fetch this transfer: restart its lease."""

    transfer_id: Id
    generation: U63 | None
    remote: PeerAddr
    engine_id: Id


class Ping(LocalMessage, frozen=True):
    seq: U63


class Bye(LocalMessage, frozen=True):
    """The shim closes in order; the daemon stops its copies, then closes the socket."""


# --- daemon -> shim -------------------------------------------------------------------------


class Welcome(LocalMessage, frozen=True):
    """`boot_id` is new at each start of the daemon; `advertise` is what peers may connect to."""

    proto_major: U32
    proto_minor: U32
    daemon_id: Id
    boot_id: U63
    advertise: PeerAddr
    version: str
    draining: bool = False


class Refused(LocalMessage, frozen=True):
    """The session is refused and will be closed."""

    code: str
    detail: str


class Registered(LocalMessage, frozen=True):
    nbytes: U63


class OfferEnded(LocalMessage, frozen=True):
    """The daemon holds the offer no longer: released | expired | revoked | an error code.

    The shim flips the fence word before it lets the blocks go.
    """

    transfer_id: Id
    generation: U63
    reason: str


class OfferRead(LocalMessage, frozen=True):
    """Of a watched offer: `readers` fetches lack some of it, and all have tokens `[0, tokens)`.

    Sent when that changes; before the first one there is no reader.
    """

    transfer_id: Id
    generation: U63
    readers: U32
    tokens: U63


class FetchDone(LocalMessage, frozen=True):
    """The end of a fetch, told once, when no byte can land any more.

    `bad`: for each group a bitmap (bit i of byte i//8 = block index i) of the destination
    blocks that do not hold valid KV in every layer; all zero when `code` is "ok".
    """

    fetch_id: Id
    code: str
    detail: str
    generation: U63
    bad: list[bytes]
    tokens: U63
    nbytes: U63
    transport: str
    stages: Stages


class NotifyDone(LocalMessage, frozen=True):
    """Answer to Release and Renew."""

    transfer_id: Id
    what: str
    code: str


class Pong(LocalMessage, frozen=True):
    seq: U63


class State(LocalMessage, frozen=True):
    """Sent when it changes: a draining daemon takes no new offers and fetches."""

    draining: bool


FromShim = (
    Hello
    | AddSegment
    | AddFence
    | AddLayers
    | Register
    | Offer
    | OfferBlocks
    | OfferDigests
    | Extend
    | Seal
    | Revoke
    | RevokeAll
    | Fetch
    | FetchBlocks
    | FetchGo
    | Cancel
    | Release
    | Renew
    | Ping
    | Bye
)
ToShim = (
    Welcome | Refused | Registered | OfferEnded | OfferRead | FetchDone | NotifyDone | Pong | State
)
