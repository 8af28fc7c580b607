"""What the scheduler half promises for a request, and the jobs that it makes of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from connector_shim.jobs import FetchJob, OfferJob, RankTable, pack_blocks, pack_u32
from connector_shim.params import RemotePrefill
from connector_shim.prompts import prompt_digest
from connector_shim.readings import has_siblings, traceparent
from connector_shim.streams import NULL_BLOCK_ID


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What the scheduler half must know of its engine.

    `block_sizes`: tokens per block of each KV cache group; `num_blocks` counts the whole pool.
    """

    engine_id: str
    block_sizes: tuple[int, ...]
    num_blocks: int
    pp_size: int = 1
    tp_size: int = 1
    full_attention: bool = True
    """Every group keeps all blocks of a request until it ends: no sliding window, no state."""

    @property
    def block_size(self) -> int:
        """Tokens after which a block ends in every group."""
        return lcm(*self.block_sizes)


@dataclass(frozen=True, slots=True)
class Plan:
    """What was promised for a request when the scheduler last asked: to load `[start, end)`."""

    start: int
    end: int
    remote: RemotePrefill


def fetch_job(
    shape: EngineShape,
    request: Any,
    blocks: Any,
    num_tokens: int,
    plan: Plan | None,
    fetch_id: str,
) -> FetchJob:
    """Load `num_tokens` of the plan into `blocks`. Raises ValueError for what cannot be meant."""
    if plan is None:
        raise ValueError(f"{num_tokens} tokens to load that kvd did not promise")
    end = plan.start + num_tokens
    # The scheduler may have cut what was promised, but only at a block boundary.
    if end > plan.end or (end != plan.end and end % shape.block_size):
        raise ValueError(f"{num_tokens} tokens to load of [{plan.start}, {plan.end})")
    tables = []
    for group, (table, size) in enumerate(zip(blocks.blocks, shape.block_sizes, strict=True)):
        first, last = plan.start // size, -(-end // size)
        wanted = list(table[first:last])
        if len(wanted) != last - first:
            raise ValueError(f"group {group} has {len(table)} blocks, {last} are needed")
        if any(b.block_hash is not None and not b.is_null for b in wanted):
            raise ValueError(f"group {group}: a block to be written is shared already")
        tables.append(pack_blocks(None if b.is_null else b.block_id for b in wanted))
    return FetchJob(
        req_id=request.request_id,
        fetch_id=fetch_id,
        transfer_id=plan.remote.transfer_id,
        generation=plan.remote.generation,
        engine_id=plan.remote.engine_id,
        ranks=plan.remote.ranks,
        start=plan.start,
        end=end,
        blocks=tuple(tables),
        digest=prompt_digest(request, end).at([end])[0],
        bootstrap=plan.remote.bootstrap,
        traceparent=traceparent(request),
        sole=not has_siblings(request),
    )


def offer_job(
    shape: EngineShape,
    request: Any,
    key: tuple[str, int],
    tokens: int,
    tables: Sequence[Sequence[int]],
) -> OfferJob:
    """Offer `[0, tokens)` of a request, which lie in `tables` (block ids, one table per group)."""
    digest = prompt_digest(request, tokens)
    positions = digest.boundaries(shape.block_size, tokens)
    return OfferJob(
        req_id=request.request_id,
        transfer_id=key[0],
        generation=key[1],
        tokens=tokens,
        blocks=tuple(
            pack_blocks(None if block == NULL_BLOCK_ID else block for block in table)
            for table in tables
        ),
        positions=pack_u32(positions),
        digests=b"".join(digest.at(positions)),
    )


def missing_ranks(shape: EngineShape, ranks: RankTable) -> str:
    """Which rank of ours has no counterpart; empty when all have."""
    named = {rank for rank, _ in ranks}
    for pp in range(shape.pp_size):
        for tp in range(shape.tp_size):
            if (pp, tp) not in named:
                return f"the params name no producer for rank pp={pp} tp={tp}"
    return ""
