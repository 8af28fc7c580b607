"""What one worker tells vLLM about its transfers: the rules whose breach kills EngineCore.

R1 finished_recving once for each request whose blocks were given for a load, also when it failed,
   was cancelled or found no daemon; never before the last byte that could land has landed.
R2 finished_sending once for each request whose blocks are held for consumers; nothing else.
R3 a release (notify only) is never reported.
R4 errors in the same step as the completion: bad block ids with one KV cache group, the request's
   id in `failed` (and in `recving` too) with several.
R5 each worker reports every id for itself; vLLM counts the workers.
R6 after `shutdown` nothing is reported.

A call that does not fit what is tracked (an end of something unknown, an end told twice) changes
nothing and is answered with False, for the caller to count.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from connector_shim.jobs import Drained, unpack_u32
from kvd.protocol.types import NULL_BLOCK

Key = TypeVar("Key")
HoldKey = tuple[str, int]
"""(transfer_id, generation)."""


class _Pairs(Generic[Key]):
    """A one-to-one table between request ids and the names that the daemon uses."""

    def __init__(self) -> None:
        self.by_req: dict[str, Key] = {}
        self.by_key: dict[Key, str] = {}

    def add(self, req_id: str, key: Key) -> bool:
        if req_id in self.by_req or key in self.by_key:
            return False
        self.by_req[req_id] = key
        self.by_key[key] = req_id
        return True

    def pop_key(self, key: Key) -> str | None:
        req_id = self.by_key.pop(key, None)
        if req_id is not None:
            del self.by_req[req_id]
        return req_id


class Reports:
    """`num_groups`: KV cache groups of the engine, which decides how a failure is told."""

    def __init__(self, num_groups: int) -> None:
        self._by_id = num_groups > 1
        self._receives: _Pairs[str] = _Pairs()
        self._blocks: dict[str, tuple[bytes, ...]] = {}
        self._holds: _Pairs[HoldKey] = _Pairs()
        self._due = Drained()
        self._shut = False

    # --- receiving --------------------------------------------------------------------------

    def receive_started(self, req_id: str, fetch_id: str, blocks: tuple[bytes, ...]) -> bool:
        """`blocks`: packed destination block ids of each group."""
        if self._shut or req_id in self._due.recving or not self._receives.add(req_id, fetch_id):
            return False
        self._blocks[fetch_id] = blocks
        return True

    def receive_ended(self, fetch_id: str, *, ok: bool, bad: list[bytes] | None = None) -> bool:
        """The fetch is over and no byte of it can land any more.

        `bad`: for each group a bitmap of the destination blocks without valid KV (bit i of byte
        i // 8 is index i). A failure without a usable bitmap, or with an empty one, condemns all.
        """
        req_id = self._receives.pop_key(fetch_id)
        if req_id is None:
            return False
        blocks = self._blocks.pop(fetch_id)
        if self._shut:
            return True
        condemned = _condemned(blocks, ok, bad)
        if condemned and not self._by_id:
            self._due.invalid_blocks |= condemned
        elif condemned or not ok:
            self._due.failed.add(req_id)
        self._due.recving.add(req_id)
        return True

    def fetch_of(self, req_id: str) -> str | None:
        """The fetch that a request is waiting for."""
        return self._receives.by_req.get(req_id)

    # --- sending ----------------------------------------------------------------------------

    def hold_started(self, req_id: str, key: HoldKey) -> bool:
        """The request's blocks are held for consumers."""
        if self._shut or req_id in self._due.sending:
            return False
        return self._holds.add(req_id, key)

    def hold_ended(self, key: HoldKey) -> bool:
        """The blocks may be used again: the offer's fence word has been flipped."""
        req_id = self._holds.pop_key(key)
        if req_id is None:
            return False
        if not self._shut:
            self._due.sending.add(req_id)
        return True

    # --- telling ----------------------------------------------------------------------------

    def drain(self) -> Drained:
        """Everything due since the last call, once."""
        due, self._due = self._due, Drained()
        return due

    def shutdown(self) -> None:
        """Nothing is told from now on."""
        self._shut = True
        self._due = Drained()

    @property
    def receiving(self) -> int:
        return len(self._receives.by_req)

    @property
    def holding(self) -> int:
        return len(self._holds.by_req)


def _condemned(blocks: tuple[bytes, ...], ok: bool, bad: list[bytes] | None) -> set[int]:
    tables = [unpack_u32(packed) for packed in blocks]
    marked: set[int] = set()
    if bad is not None and len(bad) == len(tables):
        for table, bitmap in zip(tables, bad, strict=True):
            if len(bitmap) < -(-len(table) // 8):
                marked.clear()
                ok = False
                break
            marked.update(b for i, b in enumerate(table) if bitmap[i // 8] >> (i % 8) & 1)
        marked.discard(NULL_BLOCK)
    elif bad is not None:
        ok = False
    if not ok and not marked:
        marked = {block for table in tables for block in table} - {NULL_BLOCK}
    return marked
