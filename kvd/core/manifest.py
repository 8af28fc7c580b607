"""Consumer: which bytes of a fetch may be copied, are being copied, and have arrived.

Kept for each layer of each group as a set of block indices (an int's bits), so that nothing is
done per block and layer. A fetch is complete when every layer holds every required block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvd.core.context import Refusal
from kvd.core.instructions import Piece
from kvd.core.packed import (
    NULL,
    bitmap,
    gather,
    has_null,
    indices,
    lowest_runs,
    ones,
    present,
    unpack,
)
from kvd.core.sessions import Group
from kvd.protocol.codes import Code
from kvd.protocol.types import Watermark


@dataclass(frozen=True, slots=True)
class Part:
    """Blocks `mask` in positions `[low, high)` of a group's layers."""

    group: int
    low: int
    high: int
    mask: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One job's worth of copying."""

    pieces: tuple[Piece, ...]
    parts: tuple[Part, ...]
    nbytes: int


class _GroupManifest:
    """One group: sets are indexed by the position of a layer within the group."""

    def __init__(self, index: int, group: Group, dst: bytes, count: int) -> None:
        self.index = index
        self.group = group
        self.dst = dst
        self.count = count
        self.src = bytearray()
        self.required = present(dst) if group.layers else 0
        size = len(group.layers)
        self.tokens = [0] * size
        self.reach = [0] * size
        """How many leading blocks may be copied."""
        self.pending = [0] * size
        """May be copied, and nobody does yet."""
        self.done = [0] * size
        self.missing = size if self.required else 0
        """Layers that do not hold every required block yet."""
        self.prefix = (0, *accumulate(group.nbytes))

    def add_source(self, packed: bytes, num_blocks: int) -> None:
        if len(packed) % 4 or len(self.src) + len(packed) > 4 * self.count:
            raise Refusal(Code.BAD_MESSAGE, f"group {self.index}: a source block list does not fit")
        base = len(self.src) // 4
        nulls = has_null(packed)
        ids = unpack(packed)
        for i, block in enumerate(ids if max(ids) >= num_blocks else ()):
            if block < num_blocks:
                continue
            if block != NULL:
                raise Refusal(Code.BAD_MESSAGE, f"source block {block} of {num_blocks}")
            if nulls and self.required >> (base + i) & 1:
                raise Refusal(
                    Code.RANGE_NOT_HELD, f"group {self.index} keeps nothing at index {base + i}"
                )
        self.src += packed

    def next_run(self) -> tuple[int, int] | None:
        """The first layers that may copy the same blocks, as positions `[low, high)`."""
        pending = self.pending
        for low, mask in enumerate(pending):
            if mask:
                high = low + 1
                while high < len(pending) and pending[high] == mask:
                    high += 1
                return low, high
        return None


class Manifest:
    """Made when a grant comes, for one generation; `dst` are packed ids for each group."""

    def __init__(
        self,
        groups: Sequence[Group],
        dst: Sequence[bytes],
        *,
        start: int,
        end: int,
        block_size: int,
        source_blocks: int,
    ) -> None:
        self._first = start // block_size
        self._count = -(-end // block_size) - self._first
        self._end = end
        self._block_size = block_size
        self._source_blocks = source_blocks
        self._num_layers = sum(len(group.layers) for group in groups)
        self._groups = [
            _GroupManifest(i, group, dst[i], self._count) for i, group in enumerate(groups)
        ]
        self.pending_nbytes = 0

    def extend(self, blocks: Sequence[bytes], valid: Sequence[Watermark]) -> None:
        """More source blocks, more valid tokens. Raises Refusal when that cannot be."""
        if len(blocks) != len(self._groups):
            raise Refusal(Code.BAD_MESSAGE, f"{len(blocks)} groups of {len(self._groups)}")
        for mark in valid:
            if mark.first_layer + mark.num_layers > self._num_layers:
                raise Refusal(Code.BAD_MESSAGE, f"a watermark beyond layer {self._num_layers}")
        for group, packed in zip(self._groups, blocks, strict=True):
            if packed:
                group.add_source(packed, self._source_blocks)
                self._advance(group, 0, len(group.tokens))
            for mark in valid:
                layers = group.group.layers
                low = bisect_left(layers, mark.first_layer)
                high = bisect_left(layers, mark.first_layer + mark.num_layers, low)
                for i in range(low, high):
                    group.tokens[i] = max(group.tokens[i], mark.tokens)
                self._advance(group, low, high)

    @property
    def offered(self) -> bool:
        """Whether the producer has said that the whole range is valid in every layer."""
        return self.valid >= self._end

    @property
    def valid(self) -> int:
        """Tokens that every layer is said to hold, up to the range's end."""
        return min(
            (min(group.tokens, default=self._end) for group in self._groups), default=self._end
        )

    def _advance(self, group: _GroupManifest, low: int, high: int) -> None:
        known = len(group.src) // 4
        for i in range(low, high):
            tokens = group.tokens[i]
            if tokens >= self._end:
                reach = known
            else:
                reach = min(known, max(0, tokens // self._block_size - self._first))
            before = group.reach[i]
            if reach > before:
                news = (ones(reach - before) << before) & group.required
                group.reach[i] = reach
                group.pending[i] |= news
                self.pending_nbytes += news.bit_count() * group.group.nbytes[i]

    def plan(self, budget: int, limit: int, max_blocks: int) -> Plan | None:
        """Take about `budget` bytes of what may be copied, never more than `limit`, in at most
        `max_blocks` blocks of all pieces together.

        The exception is one block of one layer, which is the least. Runs of blocks over as many
        layers as may be come first: a copy then takes one block over all of them at once.
        """
        pieces: list[Piece] = []
        parts: list[Part] = []
        nbytes = 0
        for group in self._groups:
            while nbytes < budget and max_blocks > 0:
                run = group.next_run()
                if run is None:
                    break
                low, high = run
                room = budget - nbytes
                size = group.prefix[high] - group.prefix[low]
                if size > room:
                    if pieces:
                        return self._planned(pieces, parts, nbytes)
                    while high - low > 1 and size > limit:
                        high -= 1
                        size = group.prefix[high] - group.prefix[low]
                most = min(max(1, room // size), max_blocks)
                mask, runs = lowest_runs(group.pending[low], most)
                for i in range(low, high):
                    group.pending[i] &= ~mask
                nbytes += size * mask.bit_count()
                max_blocks -= mask.bit_count()
                parts.append(Part(group.index, low, high, mask))
                pieces.append(self._piece(group, low, high, runs))
        return self._planned(pieces, parts, nbytes) if pieces else None

    def _planned(self, pieces: list[Piece], parts: list[Part], nbytes: int) -> Plan:
        self.pending_nbytes -= nbytes
        return Plan(tuple(pieces), tuple(parts), nbytes)

    def _piece(
        self, group: _GroupManifest, low: int, high: int, runs: list[tuple[int, int]]
    ) -> Piece:
        layers = group.group.layers
        return Piece(
            group=group.index,
            first_layer=layers[low],
            num_layers=layers[high - 1] + 1 - layers[low],
            indices=b"".join(indices(start, stop) for start, stop in runs),
            src=gather(group.src, runs),
            dst=gather(group.dst, runs),
        )

    def arrived(self, plan: Plan) -> None:
        """Every byte of a plan is in place, and was valid to the end of its copy."""
        for part in plan.parts:
            group = self._groups[part.group]
            for i in range(part.low, part.high):
                group.done[i] |= part.mask
                if group.done[i] == group.required:
                    group.missing -= 1

    @property
    def complete(self) -> bool:
        return not any(group.missing for group in self._groups)

    @property
    def tokens(self) -> int:
        """Tokens in the leading blocks that are complete in every layer of every group."""
        count = self._count
        for group in self._groups:
            lacking = self._lacking(group)
            if lacking:
                count = min(count, (lacking & -lacking).bit_length() - 1)
        start = self._first * self._block_size
        return max(0, min(self._end, start + count * self._block_size) - start)

    def bad(self) -> list[bytes]:
        """For each group the bitmap of destination blocks that are not complete."""
        return [bitmap(self._lacking(group), self._count) for group in self._groups]

    def _lacking(self, group: _GroupManifest) -> int:
        if not group.missing:
            return 0
        held = group.required
        for mask in group.done:
            held &= mask
        return group.required & ~held

    def check(self) -> None:
        """Invariants, for tests: nothing is pending and done, and the counters are right."""
        pending = 0
        for group in self._groups:
            for i, nbytes in enumerate(group.group.nbytes):
                assert not group.pending[i] & group.done[i]
                assert group.pending[i] | group.done[i] == group.required & (
                    group.pending[i] | group.done[i]
                )
                pending += group.pending[i].bit_count() * nbytes
            missing = sum(done != group.required for done in group.done)
            assert group.missing == missing, (group.missing, missing)
        assert pending == self.pending_nbytes
