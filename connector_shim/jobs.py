"""What the scheduler half asks of the worker halves in one step, and what they tell it back.

Plain values: they travel over vLLM's own link between scheduler and workers. Block ids are packed
(little-endian u32, `NULL_BLOCK` where the engine keeps nothing), so that a step's metadata stays
small and holds no reference to a list that vLLM goes on changing.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvd.protocol.types import NULL_BLOCK

RankId = tuple[int, int]
"""(pp_rank, tp_rank)."""
Address = tuple[str, int]
"""(host, port) of a daemon."""
RankTable = tuple[tuple[RankId, Address], ...]


def pack_u32(values: Iterable[int]) -> bytes:
    """Pack as little-endian u32. Raises OverflowError when a value does not fit."""
    packed = array("I", values)
    if sys.byteorder == "big":  # pragma: no cover
        packed.byteswap()
    return packed.tobytes()


def unpack_u32(data: bytes) -> list[int]:
    """The inverse of `pack_u32`. Raises ValueError when the length is not a multiple of four."""
    packed = array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":  # pragma: no cover
        packed.byteswap()
    return packed.tolist()


def pack_blocks(block_ids: Iterable[int | None]) -> bytes:
    """Pack a block table; None is a place where the engine keeps nothing."""
    return pack_u32(NULL_BLOCK if block is None else block for block in block_ids)


@dataclass(frozen=True, slots=True)
class FetchJob:
    """Fetch tokens `[start, end)` of a transfer into `blocks` (packed, one table per group).

    `bootstrap`: whom each rank asks where its producer is, instead of `ranks`.
    Index 0 of each table holds token `start`. `doomed`: the scheduler half found that this cannot
    work after the blocks were given; the worker reports it failed and asks nobody.
    """

    req_id: str
    fetch_id: str
    transfer_id: str
    generation: int | None
    engine_id: str
    ranks: RankTable
    start: int
    end: int
    blocks: tuple[bytes, ...]
    digest: bytes
    doomed: str = ""
    bootstrap: Address | None = None
    traceparent: str = ""
    """W3C trace context of the request, where vLLM was given one."""
    sole: bool = False
    """This engine knows of no other request that fetches the transfer."""


@dataclass(frozen=True, slots=True)
class OfferJob:
    """Offer tokens `[0, tokens)` held in `blocks` (packed, one table per group, from token 0).

    `positions` (packed u32) and `digests` (16 bytes each) bind the offer to its prompt.
    """

    req_id: str
    transfer_id: str
    generation: int
    tokens: int
    blocks: tuple[bytes, ...]
    positions: bytes
    digests: bytes


@dataclass(frozen=True, slots=True)
class ReleaseJob:
    """Tell the producer that this consumer needs nothing (more) of a transfer."""

    transfer_id: str
    generation: int | None
    engine_id: str
    ranks: RankTable
    bootstrap: Address | None = None


@dataclass(frozen=True, slots=True)
class RenewJob(ReleaseJob):
    """Tell the producer that this consumer still means to fetch: its request waits for its turn."""


StreamKey = tuple[str, int]
"""(transfer_id, generation) of an offer that grows while prefill computes."""


@dataclass(frozen=True, slots=True)
class StreamOpen:
    """Open an offer that holds nothing yet. `positions` and `digests` as in `OfferJob`."""

    req_id: str
    key: StreamKey
    positions: bytes
    digests: bytes


@dataclass(frozen=True, slots=True)
class StreamStep:
    """One step of a stream.

    `blocks`: (group, index in the group's table, packed ids) of the blocks that were added.
    `tokens`: how many tokens are valid in every layer once this step's forward has run.
    """

    key: StreamKey
    blocks: tuple[tuple[int, int, bytes], ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class FinishJob:
    """A streamed request has ended, and vLLM holds its blocks until finished_sending.

    `tokens`: how many its offer holds in the end; None takes the offer back.
    """

    req_id: str
    key: StreamKey
    tokens: int | None


@dataclass(frozen=True, slots=True)
class StepJobs:
    """Everything for one step. `seq` grows by one each step, so that none is acted on twice.

    `cancels` are request ids whose fetch is not wanted any more; they come after the fetches of
    the same step. `revokes` come before everything else: this step's forward may write there.
    """

    seq: int
    fetches: tuple[FetchJob, ...] = ()
    offers: tuple[OfferJob, ...] = ()
    cancels: tuple[str, ...] = ()
    releases: tuple[ReleaseJob, ...] = ()
    renews: tuple[RenewJob, ...] = ()
    revoke_all: bool = False
    revokes: tuple[StreamKey, ...] = ()
    opens: tuple[StreamOpen, ...] = ()
    steps: tuple[StreamStep, ...] = ()
    finishes: tuple[FinishJob, ...] = ()


@dataclass(frozen=True, slots=True)
class RankState:
    """One rank's daemon as its worker sees it. `phase`: "up", "pending" (on its way) or "down".

    `pid`: the process of a daemon that is not down, 0 where it cannot be seen; as counted in
    `pid_space`.
    """

    phase: str
    host: str = ""
    port: int = 0
    detail: str = ""
    pid: int = 0
    pid_space: str = ""

    @property
    def up(self) -> bool:
        return self.phase == "up"


@dataclass(slots=True)
class Drained:
    """What one step has to tell vLLM: request ids, and block ids that hold no valid KV."""

    sending: set[str] = field(default_factory=set)
    recving: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid_blocks: set[int] = field(default_factory=set)
