"""Value types shared by the local and the peer protocol.

All structs are array-like: a newer minor version may append fields with defaults, and an older
reader skips what it does not know.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Id = Annotated[str, Meta(min_length=1, max_length=512)]
Host = Annotated[str, Meta(min_length=1, max_length=255)]
Port = Annotated[int, Meta(ge=1, le=65535)]
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U63 = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=86_400)]
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]
Packed = Annotated[bytes, Meta(max_length=4 * 2**20)]
"""Block ids as little-endian unsigned 32-bit integers, one after the other."""

NULL_BLOCK = 2**32 - 1
"""Stands in a packed block list where an engine keeps nothing (a sliding window's past)."""


class Struct(msgspec.Struct, frozen=True, array_like=True):
    """Base of all wire values."""


class PeerAddr(Struct, frozen=True):
    """Where a daemon's ROUTER listens. IPv6 hosts are written without brackets.

    With `rank` (pp, tp) it is a bootstrap service instead: HTTP, to be asked where that rank's
    daemon listens now, and which engine is there.
    """

    host: Host
    port: Port
    rank: tuple[U32, U32] | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" + ("" if self.rank is None else " (bootstrap)")


class Rank(Struct, frozen=True):
    """One worker process of an engine: pipeline and tensor parallel position."""

    pp_rank: U32 = 0
    pp_size: U32 = 1
    tp_rank: U32 = 0
    tp_size: U32 = 1
    dp_rank: U32 = 0


class Region(Struct, frozen=True):
    """The bytes of one layer's block `b` that lie together: `[offset + b*stride, +nbytes)`.

    offset, stride and nbytes are bytes within the segment. A layer that keeps K and V apart has
    two regions; order matters and is part of the geometry.
    """

    segment: U32
    offset: U63
    stride: U63
    nbytes: U63


class LayerLayout(Struct, frozen=True):
    """Where one KV layer lies. `group` is the KV cache group whose block table addresses it."""

    name: Id
    group: U32
    regions: Annotated[list[Region], Meta(min_length=1, max_length=64)]


class Geometry(Struct, frozen=True, kw_only=True):
    """Everything two ranks must agree on. Compared field by field at the handshake.

    `layers` are (name, group, bytes per block of each region), in the order that layer indices
    count; `layout` names the order of axes within a block; `isa` the CPU's KV packing or "".
    """

    model: str
    revision: str = ""
    kv_dtype: str
    scale_mode: str = ""
    block_size: Annotated[int, Meta(ge=1, le=65536)]
    total_kv_heads: U32
    kv_heads_per_rank: U32
    head_size: U32
    tp_size: U32 = 1
    pp_size: U32 = 1
    pp_rank: U32 = 0
    tp_rank: U32 = 0
    layout: str
    isa: str = ""
    draft_model: str = ""
    mode: str = "pull"
    layers: list[tuple[str, int, list[int]]]


class Watermark(Struct, frozen=True):
    """Layers `[first_layer, first_layer + num_layers)` hold valid KV for tokens `[0, tokens)`."""

    first_layer: U32
    num_layers: U32
    tokens: U63


class Stages(Struct, frozen=True):
    """When a fetch passed each stage, in seconds after it was asked; -1 where it never did, or
    where this side cannot know."""

    granted: float = -1.0
    first_byte: float = -1.0
    """When the first piece of it was there: the first copy, or the first request that was sent."""
    last_byte: float = -1.0
    parked: float = -1.0
    """Put to the producer's daemon, where it waits until it is granted."""

    @classmethod
    def since(
        cls, start: float, *, granted: float, first_byte: float, last_byte: float, parked: float
    ) -> Stages:
        """From times on one clock, of which those below 0 are not known."""
        times = (granted, first_byte, last_byte, parked)
        return cls(*(when - start if when >= 0 else -1.0 for when in times))


Role = Literal["producer", "consumer", "both"]
SegmentKind = Literal["memfd", "cuda_ipc", "vmm"]


def mismatch(ours: Geometry, theirs: Geometry) -> tuple[str, str, str] | None:
    """First field in which two geometries differ, as (field, our value, their value)."""
    for field in Geometry.__struct_fields__:
        a, b = getattr(ours, field), getattr(theirs, field)
        if a == b:
            continue
        if field == "layers":
            for i, (x, y) in enumerate(zip(a, b, strict=False)):
                if x != y:
                    return f"layers[{i}]", repr(x), repr(y)
            return "layers", f"{len(a)} layers", f"{len(b)} layers"
        return field, repr(a), repr(b)
    return None
