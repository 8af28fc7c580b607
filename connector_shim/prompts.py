"""What kvd reads from a vLLM request about its prompt."""

from __future__ import annotations

from typing import Any

from connector_shim.digests import MmItem, PromptDigest

_GOOD_ENDS = frozenset({"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED"})


def finished_well(request: Any) -> bool:
    """Whether the request ended with all of its KV computed (not aborted, not in error)."""
    return getattr(request.status, "name", "") in _GOOD_ENDS


def unfit(request: Any, *, consumer: bool = True) -> str:
    """Why this request's KV is neither offered nor fetched, "" if it may be."""
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        # Embeddings have no token ids, so nothing would bind the KV to its prompt.
        return "prompt_embeds"
    sampling = request.sampling_params
    if sampling is None:
        return "no_sampling_params"
    if consumer and getattr(sampling, "prompt_logprobs", None) is not None:
        # They need the prompt to be computed where they are asked for.
        return "prompt_logprobs"
    return ""


def prompt_digest(request: Any, tokens: int) -> PromptDigest:
    """Digest over the first `tokens` tokens, prompt and output, of a request."""
    lora = getattr(request, "lora_request", None)
    return PromptDigest(
        request.all_token_ids[:tokens],
        lora="" if lora is None else str(lora.lora_name),
        cache_salt=getattr(request, "cache_salt", None) or "",
        mm_items=_mm_items(request),
    )


def _mm_items(request: Any) -> list[MmItem]:
    return [
        (int(feature.mm_position.offset), str(feature.identifier))
        for feature in getattr(request, "mm_features", None) or ()
    ]
