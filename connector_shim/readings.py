"""What the scheduler half reads from requests, blocks and params; nothing here keeps state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from connector_shim.params import ParamsError, wants
from kvd.protocol.local import MAX_TRACEPARENT


def fetch_end(prompt_tokens: int, remote_tokens: int | None, block_size: int) -> int:
    """The token position where a fetch ends: a block boundary, or the producer's own end.

    A producer that holds more than this prompt (it generated some tokens, say) is asked for whole
    blocks only, because the rest of its last block belongs to tokens of its own.
    """
    if remote_tokens is None:
        return prompt_tokens
    if remote_tokens <= prompt_tokens:
        return remote_tokens
    return prompt_tokens // block_size * block_size


def valid_tokens(request: Any) -> int:
    """How many tokens of a finished request have KV: never the last one that was sampled."""
    with_kv = max(request.num_prompt_tokens, request.num_tokens - 1)
    return int(min(request.num_computed_tokens, with_kv))


def fresh_blocks(blocks: Any) -> list[list[int]]:
    """Per group, ids of the blocks that hold nothing yet; all of them where none does."""
    tables = []
    for table in blocks.blocks:
        real = [block for block in table if not block.is_null]
        fresh = [block.block_id for block in real if block.block_hash is None]
        tables.append(fresh or [block.block_id for block in real])
    return tables


def clear_flag(params: Any) -> bool:
    """Take do_remote_prefill out of the params, so that KV is asked for once; was it set?"""
    try:
        if not wants(params, "do_remote_prefill"):
            return False
        params["do_remote_prefill"] = False
    except (ParamsError, TypeError):
        return False
    return True


def has_siblings(request: Any) -> bool:
    """Whether it is one of several that a request with `n` > 1 was made into.

    All of these have the params of the one, and an index and "_" before its id. (vLLM's
    v1/engine/parallel_sampling.py, 0.20 to 0.32; `sampling_params.n` is 1 in each. An id that the
    API server makes up begins with a word.)
    """
    index, mark, _ = str(request.request_id).partition("_")
    return bool(mark) and index.isdecimal()


def traceparent(request: Any) -> str:
    """W3C trace context of a request; empty where it has none, or none that could be one."""
    headers = getattr(request, "trace_headers", None)
    if not isinstance(headers, Mapping):
        return ""
    value = headers.get("traceparent")
    if not isinstance(value, str) or not value.isascii() or len(value) > MAX_TRACEPARENT:
        return ""
    return value
