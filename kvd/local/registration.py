"""What a shim tells about its memory, collected until `Register` closes it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field

from kvd.errors import MemoryRefused, ProtocolError
from kvd.protocol.local import AddFence, AddLayers, AddSegment, Register
from kvd.protocol.peer import SegmentInfo
from kvd.protocol.types import Geometry, LayerLayout

MAX_SEGMENTS = 1024
"""A storage of its own per KV layer is the most that engines do."""
MAX_LAYERS = 4096
MAX_FENCE_SLOTS = 2**20


@dataclass(slots=True)
class Registration:
    """Owns the descriptors until `take_segments` and `take_fence` hand them on, or `close`."""

    segments: list[tuple[SegmentInfo, int]] = field(default_factory=list)
    fence: tuple[int, int] | None = None
    layers: list[LayerLayout] = field(default_factory=list)
    geometry: Geometry | None = None
    num_blocks: int = 0

    def add(self, message: AddSegment | AddFence | AddLayers | Register, fds: list[int]) -> bool:
        """Takes one message in; True once the description is complete.

        Takes the descriptor that belongs to the message out of `fds`. Raises ProtocolError for
        what cannot follow, MemoryRefused for what is not supported.
        """
        match message:
            case AddSegment():
                self._add_segment(message, fds)
            case AddFence():
                if self.fence is not None:
                    raise ProtocolError("a second fence table")
                if not 1 <= message.slots <= MAX_FENCE_SLOTS:
                    raise MemoryRefused(
                        f"a fence table of {message.slots} slots, 1 to {MAX_FENCE_SLOTS} possible"
                    )
                self.fence = (_one_fd(fds, "AddFence"), message.slots)
            case AddLayers():
                if len(self.layers) + len(message.layers) > MAX_LAYERS:
                    raise MemoryRefused(f"more than {MAX_LAYERS} KV layers")
                self.layers.extend(message.layers)
            case Register():
                self.geometry = message.geometry
                self.num_blocks = message.num_blocks
                return True
        return False

    def _add_segment(self, message: AddSegment, fds: list[int]) -> None:
        if len(self.segments) >= MAX_SEGMENTS:
            raise MemoryRefused(f"more than {MAX_SEGMENTS} segments")
        if any(info.segment == message.segment for info, _ in self.segments):
            raise ProtocolError(f"segment {message.segment} is described twice")
        info = SegmentInfo(
            segment=message.segment,
            kind=message.kind,
            nbytes=message.nbytes,
            device=message.device,
            handle=message.handle,
            offset=message.offset,
            base_nbytes=message.base_nbytes,
        )
        self.segments.append((info, _one_fd(fds, "AddSegment") if info.has_fd else -1))

    def take_segments(self) -> list[tuple[SegmentInfo, int]]:
        """The segments with their descriptors, which the caller now owns."""
        segments, self.segments = self.segments, []
        return segments

    def take_fence(self) -> tuple[int, int] | None:
        """(fd, slots); the caller now owns the descriptor."""
        fence, self.fence = self.fence, None
        return fence

    def close(self) -> None:
        """Closes every descriptor that was not taken."""
        fds = [fd for _, fd in self.take_segments()]
        fence = self.take_fence()
        if fence is not None:
            fds.append(fence[0])
        for fd in (fd for fd in fds if fd >= 0):
            with contextlib.suppress(OSError):
                os.close(fd)


def _one_fd(fds: list[int], what: str) -> int:
    if len(fds) != 1:
        raise ProtocolError(f"{what} carries {len(fds)} file descriptors instead of one")
    return fds.pop()
