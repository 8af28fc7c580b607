"""An engine of the world: its shim, its fence words, and the tags that its blocks hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from kvd.core import events as ev
from kvd.core.packed import NULL, pack
from kvd.protocol import local
from kvd.protocol.types import Geometry, LayerLayout, Region

if TYPE_CHECKING:
    from tests.unit.core.world import Node

BLOCK = 16
NBYTES = 1024
"""Bytes of one block in one layer."""

Tag = tuple[str, int, int]
Place = tuple[int, int, int]
"""(group, global layer, block id)."""

T = TypeVar("T")


def digest(prompt: str, position: int) -> bytes:
    return f"{prompt}:{position}".encode().ljust(16, b".")[:16]


def geometry(groups: Sequence[int], **changes: object) -> Geometry:
    fields: dict[str, object] = {
        "model": "m",
        "kv_dtype": "bf16",
        "block_size": BLOCK,
        "total_kv_heads": 2,
        "kv_heads_per_rank": 2,
        "head_size": 8,
        "layout": "NHD",
        "layers": [(f"l{i}", group, [NBYTES]) for i, group in enumerate(groups)],
    }
    fields.update(changes)
    return Geometry(**fields)  # type: ignore[arg-type]


def layouts(groups: Sequence[int], nbytes: int = NBYTES) -> tuple[LayerLayout, ...]:
    return tuple(
        LayerLayout(f"l{i}", group, [Region(0, i * nbytes, nbytes * len(groups), nbytes)])
        for i, group in enumerate(groups)
    )


@dataclass(eq=False)
class Engine:
    """One shim and its memory."""

    node: Node
    session: int
    engine_id: str
    groups: tuple[int, ...]
    num_blocks: int
    epoch: int
    inbox: list[local.ToShim] = field(default_factory=list)
    memory: dict[Place, Tag] = field(default_factory=dict)
    fence: dict[int, int] = field(default_factory=dict)
    released: bool = False
    alive: bool = True

    def say(self, message: local.FromShim) -> None:
        self.node.run(ev.ShimMessage(self.session, message))

    def took(self, kind: type[T]) -> list[T]:
        """Take the messages of one kind out of the inbox."""
        found: list[T] = [message for message in self.inbox if isinstance(message, kind)]
        self.inbox = [message for message in self.inbox if not isinstance(message, kind)]
        return found

    def close(self) -> None:
        self.alive = False
        self.node.run(ev.SessionClosed(self.session))

    @property
    def num_groups(self) -> int:
        return max(self.groups) + 1

    # --- producing --------------------------------------------------------------------------

    def open_offer(
        self,
        transfer: str,
        generation: int = 1,
        *,
        slot: int = 0,
        word: int | None = None,
        lease: float = 30.0,
        watched: bool = False,
    ) -> None:
        self.fence[slot] = word or next(self.node.world.words)
        self.say(local.Offer(transfer, generation, slot, self.fence[slot], lease, watched))

    def give_blocks(
        self, transfer: str, generation: int, blocks: Sequence[Sequence[int]], first: int = 0
    ) -> None:
        for group, ids in enumerate(blocks):
            if ids:
                self.say(local.OfferBlocks(transfer, generation, group, first, pack(list(ids))))

    def give_digests(
        self, transfer: str, generation: int, positions: Sequence[int], prompt: str = ""
    ) -> None:
        packed = b"".join(digest(prompt or transfer, position) for position in positions)
        self.say(local.OfferDigests(transfer, generation, pack(list(positions)), packed))

    def compute(
        self,
        transfer: str,
        generation: int,
        blocks: Sequence[Sequence[int]],
        *,
        layers: Sequence[int] | None = None,
    ) -> None:
        """Fill blocks of a generation, as prefill does."""
        for layer, group in enumerate(self.groups):
            if layers is None or layer in layers:
                for index, block in enumerate(blocks[group]):
                    self.memory[group, layer, block] = (transfer, generation, index)

    def offer(
        self,
        transfer: str,
        generation: int = 1,
        *,
        tokens: int,
        blocks: Sequence[Sequence[int]] | None = None,
        slot: int = 0,
        lease: float = 30.0,
        prompt: str = "",
    ) -> list[list[int]]:
        """A whole offer of finished prefill; returns its blocks."""
        need = -(-tokens // BLOCK)
        if blocks is None:
            blocks = [list(range(need)) for _ in range(self.num_groups)]
        self.compute(transfer, generation, blocks)
        self.open_offer(transfer, generation, slot=slot, lease=lease)
        self.give_blocks(transfer, generation, blocks)
        marks = sorted({*range(BLOCK, tokens + 1, BLOCK), tokens})
        self.give_digests(transfer, generation, marks, prompt)
        self.say(local.Seal(transfer, generation, tokens))
        return [list(ids) for ids in blocks]

    # --- consuming --------------------------------------------------------------------------

    def fetch(
        self,
        fetch_id: str,
        transfer: str,
        remote: Engine,
        *,
        end: int,
        start: int = 0,
        blocks: Sequence[Sequence[int]] | None = None,
        generation: int | None = None,
        deadline: float = 60.0,
        park: float = 5.0,
        prompt: str = "",
        go: bool = True,
        whole: bool = True,
        sole: bool = False,
    ) -> list[list[int]]:
        """`whole`: in one message, unless `go` is to come later."""
        need = -(-end // BLOCK) - start // BLOCK
        if blocks is None:
            blocks = [list(range(need)) for _ in range(self.num_groups)]
        whole = whole and go
        self.say(
            local.Fetch(
                fetch_id=fetch_id,
                transfer_id=transfer,
                generation=generation,
                remote=remote.node.addr,
                engine_id=remote.engine_id,
                start=start,
                end=end,
                digest=digest(prompt or transfer, end),
                deadline_s=deadline,
                park_s=park,
                blocks=[pack(list(ids)) for ids in blocks] if whole else None,
                sole=sole,
            )
        )
        for group, ids in enumerate(blocks):
            if ids and not whole:
                self.say(local.FetchBlocks(fetch_id, group, 0, pack(list(ids))))
        if go and not whole:
            self.say(local.FetchGo(fetch_id))
        return [list(ids) for ids in blocks]

    def done(self, fetch_id: str) -> local.FetchDone:
        """The one FetchDone of a fetch; it must have been told by now."""
        found = [
            message
            for message in self.inbox
            if isinstance(message, local.FetchDone) and message.fetch_id == fetch_id
        ]
        assert len(found) == 1, (fetch_id, found)
        self.inbox.remove(found[0])
        return found[0]

    def ended(self, transfer: str) -> list[tuple[int, str]]:
        return [
            (message.generation, message.reason)
            for message in self.inbox
            if isinstance(message, local.OfferEnded) and message.transfer_id == transfer
        ]

    def tags(self, blocks: Sequence[Sequence[int]]) -> set[tuple[str, int]]:
        """(transfer, generation) of everything in these blocks; indices are checked."""
        out: set[tuple[str, int]] = set()
        for layer, group in enumerate(self.groups):
            for block in blocks[group]:
                if block != NULL:
                    transfer, generation, _ = self.memory.get((group, layer, block), ("", -1, -1))
                    out.add((transfer, generation))
        return out
