"""Two engines' memories with bytes that say where they came from, and a way to gate a copy."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvd.core.instructions import Piece
from kvd.memory.engine import EngineMemory
from kvd.protocol.peer import SegmentInfo
from kvd.protocol.types import LayerLayout, Region
from kvd.transport.base import PullJob

Bytes = NDArray[np.uint8]

SLOTS = 64
WORD = 0x0123_4567_89AB
SLOT = 3
TICKET = b"ticket-of-tests!"
UNTOUCHED = 0xEE

STYLES = ("layers", "segments", "apart", "interleaved", "gaps")


@dataclass(frozen=True, slots=True)
class Shape:
    """`layers[i]`: (group, bytes of each region)."""

    layers: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def num_groups(self) -> int:
        return max(group for group, _ in self.layers) + 1

    def of_group(self, group: int) -> list[int]:
        return [i for i, (g, _) in enumerate(self.layers) if g == group]


def place(shape: Shape, num_blocks: int, style: str) -> tuple[list[LayerLayout], list[int]]:
    """Layouts of all layers in one of several styles, and the segments' sizes."""
    sizes: dict[int, int] = {}
    layers: list[LayerLayout] = []
    together = sum(sum(regions) for _, regions in shape.layers)
    inner = 0
    for index, (group, nbytes) in enumerate(shape.layers):
        regions = []
        for r, n in enumerate(nbytes):
            segment = {"segments": index, "apart": r}.get(style, 0)
            at = sizes.get(segment, 0)
            stride = n
            if style == "interleaved":
                at, stride = inner, together
                inner += n
                sizes[segment] = together * num_blocks
            else:
                if style == "gaps":
                    at, stride = at + 8 * (index + 1), n + 16
                sizes[segment] = at + (num_blocks - 1) * stride + n
            regions.append(Region(segment=segment, offset=at, stride=stride, nbytes=n))
        layers.append(LayerLayout(name=f"layer.{index}", group=group, regions=regions))
    return layers, [sizes[s] for s in sorted(sizes)]


def pattern(layer: int, region: int, block: int, nbytes: int) -> Bytes:
    """Bytes that differ by layer, region, block and offset; never UNTOUCHED."""
    at = np.arange(nbytes, dtype=np.int64)
    mixed = (layer * 7919 + region * 104_729 + block * 1_299_709 + at * (2 * block + 3)) % 2_147_483
    return (mixed % 231).astype(np.uint8)


class Side:
    """One engine: its own writable mappings, its fence table, and descriptors for EngineMemory."""

    def __init__(self, shape: Shape, num_blocks: int, style: str) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.layers, sizes = place(shape, num_blocks, style)
        self._maps: list[mmap.mmap] = []
        self._fds: list[int] = []
        self.segments: list[Bytes] = []
        self.infos = self.make_segments(sizes)
        self.fence: NDArray[np.uint64] = self.shared(8 * SLOTS).view(np.uint64)
        self.fence[SLOT] = WORD
        self._opened: list[EngineMemory] = []

    def make_segments(self, sizes: list[int]) -> list[SegmentInfo]:
        """Fills `segments`, and describes them."""
        self.segments = [self.shared(size) for size in sizes]
        return [
            SegmentInfo(segment=i, kind="memfd", nbytes=size, device="cpu")
            for i, size in enumerate(sizes)
        ]

    def shared(self, nbytes: int) -> Bytes:
        """Memory with a descriptor of its own."""
        fd = os.memfd_create("kvd-test", os.MFD_CLOEXEC)
        os.ftruncate(fd, nbytes)
        self._fds.append(fd)
        mapped = mmap.mmap(fd, nbytes)
        self._maps.append(mapped)
        return np.frombuffer(mapped, np.uint8)

    def descriptors(self) -> list[int]:
        """Open for writing, the fence table's last; they stay the side's."""
        return list(self._fds)

    def block(self, layer: int, region: int, block: int) -> Bytes:
        """The bytes of one block, as their owner sees them."""
        where = self.layers[layer].regions[region]
        at = where.offset + block * where.stride
        return self.segments[where.segment][at : at + where.nbytes]

    def fill(self) -> None:
        for i, (_, regions) in enumerate(self.shape.layers):
            for r, n in enumerate(regions):
                for b in range(self.num_blocks):
                    self.block(i, r, b)[:] = pattern(i, r, b, n)

    def wipe(self) -> None:
        for segment in self.segments:
            segment[:] = UNTOUCHED

    def snapshot(self) -> list[Bytes]:
        return [segment.copy() for segment in self.segments]

    def rewrite(self, contents: Sequence[Bytes | int]) -> None:
        """Each segment's bytes, all given or all the same."""
        for segment, content in zip(self.segments, contents, strict=True):
            segment[:] = content

    def same_as(self, snapshot: Sequence[Bytes]) -> bool:
        return all(np.array_equal(a, b) for a, b in zip(self.segments, snapshot, strict=True))

    def untouched(self) -> bool:
        return all(bool((segment == UNTOUCHED).all()) for segment in self.segments)

    def open(self, *, writable: bool) -> EngineMemory:
        return self.open_fds([os.dup(fd) for fd in self._fds], writable=writable)

    def open_shared(self, owner: EngineMemory) -> EngineMemory:
        """As a peer's daemon opens it: from the descriptors that `share` made."""
        return self.open_fds(owner.share(), writable=False)

    def open_fds(
        self,
        fds: list[int],
        *,
        writable: bool,
        opener: Callable[..., EngineMemory] = EngineMemory.open,
    ) -> EngineMemory:
        own = iter(fds)
        memory = opener(
            segments=[(info, next(own) if info.has_fd else -1) for info in self.infos],
            layers=self.layers,
            num_blocks=self.num_blocks,
            fence=(fds[-1], SLOTS),
            writable=writable,
        )
        self._opened.append(memory)
        return memory

    def close(self) -> None:
        """Closes everything, and shows that nothing kept a mapping alive."""
        for memory in self._opened:
            memory.close_when_unpinned()
        stuck = [memory for memory in self._opened if not memory.wait_closed_blocking(5.0)]
        for fd in self._fds:
            os.close(fd)
        self.segments.clear()
        del self.fence
        for mapped in self._maps:
            mapped.close()
        assert not stuck, "memory stayed mapped after its last pin"


@dataclass(slots=True)
class Rig:
    """A producer's and a consumer's side of one shape."""

    src: Side
    dst: Side
    _jobs: int = field(default=0)

    @classmethod
    def make(
        cls,
        shape: Shape,
        num_blocks: tuple[int, int],
        styles: tuple[str, str] = ("layers",) * 2,
        side: Callable[[Shape, int, str], Side] = Side,
    ) -> Rig:
        src, dst = (side(shape, n, s) for n, s in zip(num_blocks, styles, strict=True))
        src.fill()
        dst.wipe()
        return cls(src, dst)

    def close(self) -> None:
        self.src.close()
        self.dst.close()

    def piece(
        self,
        group: int,
        src: Sequence[int],
        dst: Sequence[int],
        layers: tuple[int, int] | None = None,
        indices: Sequence[int] | None = None,
    ) -> Piece:
        first, num = layers if layers is not None else (0, len(self.src.shape.layers))
        return Piece(
            group=group,
            first_layer=first,
            num_layers=num,
            indices=pack(range(len(src)) if indices is None else indices),
            src=pack(src),
            dst=pack(dst),
        )

    def nbytes(self, piece: Piece) -> int:
        stop = piece.first_layer + piece.num_layers
        layers = self.src.shape.layers[piece.first_layer : stop]
        return len(piece.src) // 4 * sum(sum(r) for g, r in layers if g == piece.group)

    def job(
        self,
        *pieces: Piece,
        fetch_id: str = "fetch",
        word: int = WORD,
        slot: int = SLOT,
        ticket: bytes = TICKET,
    ) -> PullJob:
        self._jobs += 1
        return PullJob(
            job=self._jobs,
            fetch_id=fetch_id,
            ticket=ticket,
            fence_slot=slot,
            fence_word=word,
            pieces=pieces,
            nbytes=sum(self.nbytes(piece) for piece in pieces),
        )

    def wrong_blocks(self, *pieces: Piece) -> list[tuple[int, int, int]]:
        """(layer, region, destination block) whose bytes are not what they should be, looking at
        all of the consumer's blocks: those of the pieces hold their source's, others nothing."""
        expected: dict[tuple[int, int], int] = {}
        for piece in pieces:
            for layer in range(piece.first_layer, piece.first_layer + piece.num_layers):
                if self.src.shape.layers[layer][0] == piece.group:
                    ids = zip(unpack(piece.src), unpack(piece.dst), strict=True)
                    expected.update({(layer, b): a for a, b in ids})
        wrong = []
        for layer, (_, regions) in enumerate(self.src.shape.layers):
            for r, n in enumerate(regions):
                for b in range(self.dst.num_blocks):
                    a = expected.get((layer, b))
                    want = UNTOUCHED if a is None else pattern(layer, r, a, n)
                    if not bool((self.dst.block(layer, r, b) == want).all()):
                        wrong.append((layer, r, b))
        return wrong


def pack(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, dtype="<u4").tobytes()


def unpack(packed: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(packed, "<u4").tolist()
    return ids
