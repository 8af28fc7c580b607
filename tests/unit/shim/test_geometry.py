"""Case 8 at the shim: every property that two engines must share changes the fingerprint."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from connector_shim.geometry import build_geometry
from connector_shim.layout import EngineLayout, describe_kv_caches
from kvd.protocol.types import Geometry, Rank, mismatch
from tests.unit.shim.test_layout import Config, FullAttentionSpec, Group

DEFAULTS: dict[str, Any] = {
    "model": "org/model",
    "revision": None,
    "dtype": torch.bfloat16,
    "quantization": None,
    "cache_dtype": "auto",
    "calculate_kv_scales": False,
    "draft": None,
    "total_heads": 4,
    "heads": 2,
    "head_size": 32,
    "block_size": 16,
    "layers": 2,
    "permuted": False,
    "kv_dtype": torch.bfloat16,
    "tp_rank": 0,
    "tp_size": 2,
    "pp_size": 1,
    "model_name": "",
    "groups": 1,
}


@pytest.fixture
def closing() -> Iterator[list[EngineLayout]]:
    layouts: list[EngineLayout] = []
    yield layouts
    for layout in layouts:
        layout.close()


def geometry(closing: list[EngineLayout], **changes: Any) -> Geometry:
    v = SimpleNamespace(**{**DEFAULTS, **changes})
    spec = FullAttentionSpec(v.block_size, v.heads, v.head_size)
    names = [f"l{i}" for i in range(v.layers)]
    caches = {}
    for name in names:
        shape = (9, v.block_size, v.heads, 2 * v.head_size)
        tensor = torch.zeros(shape, dtype=v.kv_dtype).permute(0, 2, 1, 3)
        if v.permuted:
            shape = (9, v.heads, v.block_size, 2 * v.head_size)
            tensor = torch.zeros(shape, dtype=v.kv_dtype)
        caches[name] = tensor
    groups = [Group(names[g :: v.groups], spec) for g in range(v.groups)]
    config = Config(groups, num_blocks=9)
    layout = describe_kv_caches(caches, config)
    closing.append(layout)
    draft = None if v.draft is None else SimpleNamespace(method="eagle", model=v.draft)
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(
            model=v.model, revision=v.revision, dtype=v.dtype, quantization=v.quantization,
            get_total_num_kv_heads=lambda: v.total_heads,
        ),
        cache_config=SimpleNamespace(
            cache_dtype=v.cache_dtype, calculate_kv_scales=v.calculate_kv_scales
        ),
        speculative_config=draft,
    )  # fmt: skip
    rank = Rank(tp_rank=v.tp_rank, tp_size=v.tp_size, pp_size=v.pp_size)
    return build_geometry(vllm_config, config, layout, rank, v.model_name)


@pytest.mark.fd_margin(16)
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": "org/other"}, "model"),
        ({"model_name": "known-as"}, "model"),
        ({"revision": "abc"}, "revision"),
        ({"kv_dtype": torch.float16}, "kv_dtype"),
        ({"cache_dtype": "fp8_e4m3"}, "kv_dtype"),
        ({"dtype": torch.float16}, "scale_mode"),
        ({"quantization": "awq"}, "scale_mode"),
        ({"calculate_kv_scales": True}, "scale_mode"),
        ({"layers": 3}, "layers"),
        ({"groups": 2}, "layers[1]"),
        ({"total_heads": 8}, "total_kv_heads"),
        ({"heads": 1}, "kv_heads_per_rank"),
        ({"head_size": 64}, "head_size"),
        ({"block_size": 32}, "block_size"),
        ({"permuted": True}, "layout"),
        ({"draft": "org/draft"}, "draft_model"),
        ({"tp_size": 4}, "tp_size"),
        ({"tp_rank": 1}, "tp_rank"),
        ({"pp_size": 2}, "pp_size"),
    ],
)
def test_one_difference_is_refused_by_its_name(
    changes: dict[str, Any], field: str, closing: list[EngineLayout]
) -> None:
    ours, theirs = geometry(closing), geometry(closing, **changes)
    found = mismatch(ours, theirs)
    assert found is not None
    assert found[0] == field


@pytest.mark.fd_margin(16)
def test_equal_engines_agree(closing: list[EngineLayout]) -> None:
    assert mismatch(geometry(closing), geometry(closing)) is None


@pytest.mark.fd_margin(16)
def test_paths_differ_but_the_name_is_agreed(closing: list[EngineLayout]) -> None:
    a = geometry(closing, model="/data/m", model_name="llama")
    b = geometry(closing, model="/mnt/models/m", model_name="llama")
    assert mismatch(a, b) is None


@pytest.mark.fd_margin(16)
def test_mode_is_part_of_it(closing: list[EngineLayout]) -> None:
    ours = geometry(closing)
    assert ours.mode == "pull"
    theirs = Geometry(**{f: getattr(ours, f) for f in ours.__struct_fields__ if f != "mode"},
                      mode="push")  # fmt: skip
    found = mismatch(ours, theirs)
    assert found is not None
    assert found[0] == "mode"
