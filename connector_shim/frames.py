"""Splitting what the client says into messages that fit into frames.

Packed lists are little-endian; so is every machine that gets as far as here (`fence.py` refuses
the others).
"""

from __future__ import annotations

import array
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from connector_shim.errors import ClientError
from connector_shim.fence import FenceTable
from connector_shim.memory import MemoryDescription
from connector_shim.wire import Frame, encode
from kvd.protocol import local
from kvd.protocol.codes import Code
from kvd.protocol.types import NULL_BLOCK, LayerLayout

BLOCKS_PER_FRAME = 8_192
DIGESTS_PER_FRAME = 2_048
LAYER_BYTES_PER_FRAME = 32 * 1024
DIGEST_SIZE = 16
WHOLE_FETCH_MINOR = 3
"""First minor version of the protocol in which a Fetch may bring its blocks."""


def pack_blocks(blocks: Sequence[int], *, group: int, num_blocks: int) -> bytes:
    """Little-endian u32 ids; NULL_BLOCK stays. Raises ClientError BAD_MEMORY for other ids."""
    try:
        packed = array.array("I", blocks)
    except (TypeError, OverflowError) as exc:
        raise ClientError(Code.BAD_MEMORY, f"block ids of group {group}: {exc}") from exc
    if packed and max(packed) >= num_blocks:
        for block in packed:
            if block >= num_blocks and block != NULL_BLOCK:
                raise ClientError(
                    Code.BAD_MEMORY,
                    f"block {block} of group {group} is not one of {num_blocks} blocks",
                )
    return packed.tobytes()


def registration_frames(memory: MemoryDescription, fence: FenceTable) -> list[Frame]:
    """AddSegment, AddFence, AddLayers and Register, in order."""
    frames = [
        encode(
            local.AddSegment(
                segment=s.segment,
                kind=s.kind,
                nbytes=s.nbytes,
                device=s.device,
                handle=s.handle,
                offset=s.offset,
                base_nbytes=s.base_nbytes,
            ),
            *((s.fd,) if s.fd >= 0 else ()),
        )
        for s in memory.segments
    ]
    frames.append(encode(local.AddFence(slots=fence.slots), fence.fd))
    frames += [encode(local.AddLayers(layers=part)) for part in _parts(memory.layers)]
    frames.append(encode(local.Register(geometry=memory.geometry, num_blocks=memory.num_blocks)))
    return frames


def _parts(layers: Sequence[LayerLayout]) -> Iterator[list[LayerLayout]]:
    part: list[LayerLayout] = []
    size = 0
    for layer in layers:
        needed = len(msgspec.msgpack.encode(layer))
        if part and size + needed > LAYER_BYTES_PER_FRAME:
            yield part
            part, size = [], 0
        part.append(layer)
        size += needed
    yield part


def offer_block_frames(
    transfer_id: str, generation: int, group: int, first: int, packed: bytes
) -> list[Frame]:
    step = 4 * BLOCKS_PER_FRAME
    return [
        encode(
            local.OfferBlocks(
                transfer_id=transfer_id,
                generation=generation,
                group=group,
                first=first + start // 4,
                blocks=packed[start : start + step],
            )
        )
        for start in range(0, len(packed), step)
    ]


def digest_frames(transfer_id: str, generation: int, digests: Mapping[int, bytes]) -> list[Frame]:
    positions = sorted(digests)
    for position in positions:
        if len(digests[position]) != DIGEST_SIZE or not 0 <= position < 2**32:
            raise ClientError(
                Code.BAD_MESSAGE,
                f"a digest of {len(digests[position])} bytes at position {position}; "
                f"{DIGEST_SIZE} bytes and a token position are needed",
            )
    return [
        encode(
            local.OfferDigests(
                transfer_id=transfer_id,
                generation=generation,
                positions=array.array("I", positions[start : start + DIGESTS_PER_FRAME]).tobytes(),
                digests=b"".join(digests[p] for p in positions[start : start + DIGESTS_PER_FRAME]),
            )
        )
        for start in range(0, len(positions), DIGESTS_PER_FRAME)
    ]


def fetch_frames(message: local.Fetch, groups: Sequence[bytes], *, minor: int) -> list[Frame]:
    """One Fetch, or where that is too long, or the daemon's protocol (`minor`) too old, Fetch, its
    blocks and FetchGo; `groups` are packed ids."""
    if minor >= WHOLE_FETCH_MINOR and sum(map(len, groups)) <= 4 * BLOCKS_PER_FRAME:
        return [encode(msgspec.structs.replace(message, blocks=list(groups)))]
    step = 4 * BLOCKS_PER_FRAME
    frames = [encode(message)]
    for group, packed in enumerate(groups):
        frames += [
            encode(
                local.FetchBlocks(
                    fetch_id=message.fetch_id,
                    group=group,
                    first=start // 4,
                    blocks=packed[start : start + step],
                )
            )
            for start in range(0, len(packed), step)
        ]
    frames.append(encode(local.FetchGo(fetch_id=message.fetch_id)))
    return frames
