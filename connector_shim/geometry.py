"""The fingerprint that both engines must share before a byte moves."""

from __future__ import annotations

from typing import Any

from connector_shim.layout import EngineLayout, layer_specs
from connector_shim.memory import geometry_layers
from kvd.protocol.types import Geometry, Rank


def build_geometry(
    vllm_config: Any, kv_cache_config: Any, layout: EngineLayout, rank: Rank, model_name: str = ""
) -> Geometry:
    """What this rank's KV is, from vLLM's configuration and from the real tensors."""
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    specs = [
        spec
        for group in kv_cache_config.kv_cache_groups
        for spec in layer_specs(group.kv_cache_spec)
    ]
    block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
    return Geometry(
        model=model_name or str(model.model),
        revision=str(getattr(model, "revision", None) or ""),
        kv_dtype=f"{cache.cache_dtype}/{layout.dtypes}",
        scale_mode=scale_mode(model, cache),
        block_size=block_size,
        total_kv_heads=int(model.get_total_num_kv_heads()),
        kv_heads_per_rank=max(int(spec.num_kv_heads) for spec in specs),
        head_size=max(int(spec.head_size) for spec in specs),
        tp_size=rank.tp_size,
        pp_size=rank.pp_size,
        pp_rank=rank.pp_rank,
        tp_rank=rank.tp_rank,
        layout=layout.axes,
        isa=cpu_isa(vllm_config, specs),
        draft_model=draft_model(vllm_config),
        mode="pull",
        layers=geometry_layers(layout.layers),
    )


def scale_mode(model: Any, cache: Any) -> str:
    """How values became KV: the model's dtype and quantization, and where KV scales come from."""
    dtype = str(model.dtype).removeprefix("torch.")
    quantization = getattr(model, "quantization", None) or "none"
    scales = "dynamic" if getattr(cache, "calculate_kv_scales", False) else "static"
    return f"{dtype}/{quantization}/{scales}"


def draft_model(vllm_config: Any) -> str:
    """The draft model of speculative decoding, whose KV layers lie beside the model's own."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return ""
    method = getattr(speculative, "method", None) or ""
    return f"{method}:{getattr(speculative, 'model', None) or ''}"


def cpu_isa(vllm_config: Any, specs: list[Any]) -> str:
    """The instruction set that vLLM's CPU attention packs KV for; "" where it cannot be known.

    The packing of K within a block depends on it, so two engines must agree.
    """
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:
        return ""
    found: dict[str, None] = {}
    for spec in specs:
        arguments: list[Any] = [vllm_config.model_config.dtype, spec.block_size, spec.head_size]
        if "kv_cache_dtype" in _get_attn_isa.__code__.co_varnames[: _argcount(_get_attn_isa)]:
            arguments.append(vllm_config.cache_config.cache_dtype)
        try:
            isa = str(_get_attn_isa(*arguments))
        except NotImplementedError:  # vLLM itself cannot run this here
            isa = "none"
        found[isa] = None
    return ",".join(found)


def _argcount(function: Any) -> int:
    return int(function.__code__.co_argcount)
