"""Layouts from real tensors in the shapes of vLLM 0.20.1 and 0.32.0, checked byte by byte.

The oracle copies a block by indexing the tensor; the layout's regions, read from the shared
memory itself, must be the same bytes.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from connector_shim.errors import ClientError
from connector_shim.layout import (
    EngineLayout,
    block_axis,
    describe_kv_caches,
    unsupported_groups,
)
from kvd.protocol.codes import Code

NB, H, N, D = 7, 2, 16, 8


# Stand-ins named like vLLM's classes: the kind of a spec is its class's name.
@dataclass
class FullAttentionSpec:
    block_size: int = N
    num_kv_heads: int = H
    head_size: int = D


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 64


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    pass


@dataclass
class MambaSpec:
    block_size: int = N


@dataclass
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, Any]
    block_size: int = N


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any = field(default_factory=FullAttentionSpec)
    enable_kv_transfer: bool = True
    host_resident: bool = False


@dataclass
class Placed:
    """0.29 and later: where vLLM says that layers lie."""

    layers: list[str]
    block_stride: int


@dataclass
class Config:
    kv_cache_groups: list[Group]
    num_blocks: int = NB
    kv_cache_tensors: list[Any] = field(default_factory=list)


def fill(tensor: torch.Tensor) -> None:
    """Every element differs from its neighbours (as far as its type allows)."""
    values = torch.arange(tensor.numel(), dtype=torch.int64) * 2654435761 % 251
    flat = torch.empty(tensor.shape, dtype=torch.uint8)
    flat.view(-1).copy_(values.to(torch.uint8))
    tensor.copy_(flat.to(tensor.dtype))


Build = Callable[[], tuple[dict[str, torch.Tensor], Config, int]]


def old_flash() -> tuple[dict[str, torch.Tensor], Config, int]:
    """0.20.1 CPU and FlashAttention: [2, blocks, heads, tokens, dim], one storage a layer."""
    caches = {f"l{i}": torch.zeros(2, NB, H, N, D, dtype=torch.bfloat16) for i in range(3)}
    return caches, Config([Group(list(caches))]), 1


def old_flash_nhd() -> tuple[dict[str, torch.Tensor], Config, int]:
    """The same as NHD memory seen as HND: heads inside of tokens."""
    caches = {
        f"l{i}": torch.zeros(2, NB, N, H, D, dtype=torch.float16).permute(0, 1, 3, 2, 4)
        for i in range(2)
    }
    return caches, Config([Group(list(caches))]), 1


def old_flashinfer() -> tuple[dict[str, torch.Tensor], Config, int]:
    """0.20.1 FlashInfer and Triton: [blocks, 2, tokens, heads, dim]."""
    caches = {f"l{i}": torch.zeros(NB, 2, N, H, D, dtype=torch.float16) for i in range(2)}
    return caches, Config([Group(list(caches))]), 0


def old_mla() -> tuple[dict[str, torch.Tensor], Config, int]:
    caches = {f"l{i}": torch.zeros(NB, N, 72, dtype=torch.bfloat16) for i in range(2)}
    return caches, Config([Group(list(caches), MLAAttentionSpec())]), 0


def old_hybrid() -> tuple[dict[str, torch.Tensor], Config, int]:
    """Two groups over the same memory: a block id belongs to one group at a time."""
    shared = torch.zeros(2, NB, H, N, D, dtype=torch.bfloat16)
    caches = {"full": shared, "window": shared.view_as(shared)}
    groups = [Group(["full"]), Group(["window"], SlidingWindowSpec())]
    return caches, Config(groups), 1


def new_backing(order: str) -> Build:
    """0.29 and later: one storage for all layers, logical [B, H, N, C] in any physical order."""

    def build() -> tuple[dict[str, torch.Tensor], Config, int]:
        sizes = {"L": 3, "B": NB, "H": H, "N": N, "C": 2 * D}
        raw = torch.zeros(*(sizes[axis] for axis in order), dtype=torch.bfloat16)
        whole = raw.permute(*(order.index(axis) for axis in "LBHNC"))
        caches = {f"l{i}": whole[i] for i in range(3)}
        stride = caches["l0"].stride(0) * 2
        config = Config([Group(list(caches))], kv_cache_tensors=[Placed(list(caches), stride)])
        return caches, config, 0

    return build


def padded() -> tuple[dict[str, torch.Tensor], Config, int]:
    """Pages with unused bytes at their end."""
    raw = torch.zeros(NB, 600, dtype=torch.int16)
    caches = {"l0": raw[:, : H * N * D].view(NB, H, N, D)}
    return caches, Config([Group(["l0"])]), 0


SHAPES = {
    "old_flash": old_flash,
    "old_flash_nhd": old_flash_nhd,
    "old_flashinfer": old_flashinfer,
    "old_mla": old_mla,
    "old_hybrid": old_hybrid,
    "padded": padded,
    **{f"new_{o}": new_backing(o) for o in ("LBNHC", "LBHNC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")},
}


@pytest.fixture
def closing() -> Iterator[list[EngineLayout]]:
    layouts: list[EngineLayout] = []
    yield layouts
    for layout in layouts:
        layout.close()


def block_bytes(layout: EngineLayout, layer: int, block: int) -> list[bytes]:
    """The regions of a block, read from the descriptors that the daemon would get."""
    out = []
    for region in layout.layers[layer].regions:
        info = layout.segments[region.segment]
        with mmap.mmap(info.fd, info.nbytes, prot=mmap.PROT_READ) as memory:
            begin = region.offset + block * region.stride
            assert begin + region.nbytes <= info.nbytes
            out.append(memory[begin : begin + region.nbytes])
    return out


@pytest.mark.fd_margin(32)
@pytest.mark.parametrize("name", SHAPES)
def test_regions_are_the_block(name: str, closing: list[EngineLayout]) -> None:
    caches, config, axis = SHAPES[name]()
    for tensor in caches.values():
        fill(tensor)
    layout = describe_kv_caches(caches, config)
    closing.append(layout)
    assert [layer.name for layer in layout.layers] == list(caches)
    for index, tensor in enumerate(caches.values()):
        for block in range(NB):
            expected = tensor.select(axis, block).contiguous()
            found = block_bytes(layout, index, block)
            assert sum(map(len, found)) == expected.numel() * expected.element_size()
            # Both sides cut alike, so the order of whole runs is free; their bytes are not.
            assert sorted(found) == sorted(_runs(tensor.select(axis, block), len(found[0])))
        # What vLLM writes afterwards is seen through the descriptor, and the other way round.
        tensor.select(axis, 1).fill_(3)
        assert set(_values(block_bytes(layout, index, 1), tensor.dtype)) == {3.0}
    assert len({segment.segment for segment in layout.segments}) == len(layout.storages)


def _runs(block: torch.Tensor, nbytes: int) -> list[bytes]:
    """The block's elements in the order of their addresses, cut into runs of `nbytes`."""
    order = sorted(range(block.dim()), key=lambda a: -block.stride(a))
    data = block.permute(*order).contiguous().view(torch.uint8).numpy().tobytes()
    return [data[i : i + nbytes] for i in range(0, len(data), nbytes)]


def _values(runs: list[bytes], dtype: torch.dtype) -> list[float]:
    joined = bytearray(b"".join(runs))
    return [float(v) for v in torch.frombuffer(joined, dtype=dtype).to(torch.float32)]


@pytest.mark.parametrize(
    ("name", "segments", "regions"),
    [
        ("old_flash", 3, 2),
        ("old_flashinfer", 2, 1),
        ("old_mla", 2, 1),
        ("old_hybrid", 1, 2),
        ("new_LBHNC", 1, 1),
        ("new_LHBNC", 1, H),
        ("new_BLNHC", 1, 1),
    ],
)
def test_how_memory_is_cut(
    name: str, segments: int, regions: int, closing: list[EngineLayout]
) -> None:
    caches, config, _ = SHAPES[name]()
    layout = describe_kv_caches(caches, config)
    closing.append(layout)
    assert len(layout.segments) == segments
    assert {len(layer.regions) for layer in layout.layers} == {regions}


def test_physical_orders_have_different_names(closing: list[EngineLayout]) -> None:
    """NHD and HND of one shape hold the same number of bytes, and must never be mixed."""
    axes = set()
    for name in ("new_LBNHC", "new_LBHNC", "old_flash", "old_flash_nhd", "old_flashinfer"):
        caches, config, _ = SHAPES[name]()
        layout = describe_kv_caches(caches, config)
        closing.append(layout)
        axes.add(layout.axes)
    assert len(axes) == 5


def test_equal_extents_do_not_hide_the_order(closing: list[EngineLayout]) -> None:
    """As many heads as tokens in a block: only the place of an axis tells the orders apart."""
    axes = []
    for permuted in (False, True):
        tensor = torch.zeros(NB, 16, 16, 8)
        tensor = tensor.permute(0, 2, 1, 3) if permuted else tensor
        layout = describe_kv_caches({"l0": tensor}, Config([Group(["l0"])]))
        closing.append(layout)
        axes.append(layout.axes)
    assert axes[0] != axes[1]


def test_layers_that_share_their_kv_appear_once(closing: list[EngineLayout]) -> None:
    tensor = torch.zeros(2, NB, H, N, D)
    layout = describe_kv_caches({"l0": tensor, "l5": tensor}, Config([Group(["l0", "l5"])]))
    closing.append(layout)
    assert [layer.name for layer in layout.layers] == ["l0"]


# --- the block axis -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "blocks", "stride", "axis"),
    [
        ((2, 7, 4, 16, 8), 7, None, 1),
        ((7, 4, 16, 8), 7, None, 0),
        ((16, 4, 16, 8), 16, 4 * 16 * 8, 0),
        ((1, 4, 16, 8), 1, 512, 0),
    ],
)
def test_the_block_axis(shape: tuple[int, ...], blocks: int, stride: int | None, axis: int) -> None:
    assert block_axis("l", shape, torch.zeros(shape).stride(), blocks, stride) == axis


@pytest.mark.parametrize(
    ("shape", "blocks", "stride", "words"),
    [
        ((2, 2, 4, 16, 8), 2, None, "more than one axis"),
        ((16, 4, 16, 8), 16, None, "more than one axis"),
        ((7, 4, 16, 8), 9, None, "no axis"),
        ((7, 4, 16, 8), 7, 999, "no axis"),
    ],
)
def test_an_unclear_block_axis_is_refused_by_name(
    shape: tuple[int, ...], blocks: int, stride: int | None, words: str
) -> None:
    with pytest.raises(ClientError, match=words) as caught:
        block_axis("model.layers.3", shape, torch.zeros(shape).stride(), blocks, stride)
    assert "model.layers.3" in caught.value.detail


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("caches", "words"),
    [
        ({"mamba": [torch.zeros(NB, 4)]}, "layer mamba has several state tensors"),
        ({"l0": torch.zeros(NB, 4, device="meta")}, "META memory is not supported"),
        ({"stray": torch.zeros(NB, 4)}, "layer stray is in no KV cache group"),
        ({}, "no KV cache"),
        ({"l0": torch.zeros(1, 4).expand(NB, 4)}, "zero stride"),
        ({"l0": torch.zeros(NB, 70, 3)[:, :, :2]}, "70 pieces"),
    ],
)
def test_refused_by_name_and_nothing_stays_open(caches: dict[str, Any], words: str) -> None:
    opened: list[int] = []

    def share(storage: torch.UntypedStorage) -> int:
        opened.append(os.memfd_create("share"))
        return opened[-1]

    known = ("good", "l0")
    config = Config([Group([*known, "mamba"])])
    caches = {"good": torch.zeros(NB, H, N, D), **caches} if caches else {}
    with pytest.raises(ClientError, match=words):
        describe_kv_caches(caches, config, share)
    assert len(opened) == sum(t.device.type == "cpu" for n, t in caches.items() if n in known)
    for fd in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_memory_that_cannot_be_shared() -> None:
    def no_room(storage: torch.UntypedStorage) -> int:
        raise ClientError(Code.NO_SPACE, "too small")

    with pytest.raises(ClientError, match="too small"):
        describe_kv_caches({"l0": torch.zeros(NB, H, N, D)}, Config([Group(["l0"])]), no_room)


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([Group(["a"]), Group(["b"], SlidingWindowSpec())], ""),
        ([Group(["a"], UniformTypeKVCacheSpecs({"a": FullAttentionSpec()}))], ""),
        ([Group(["a"]), Group(["b"], MambaSpec())], "group 1 is a MambaSpec"),
        ([Group(["a"], UniformTypeKVCacheSpecs({"a": MambaSpec()}))], "group 0 is a MambaSpec"),
        ([Group(["a"], enable_kv_transfer=False)], "not open to KV transfer"),
        ([Group(["a"], host_resident=True)], "not open to KV transfer"),
        ([Group(["a"]), Group(["b"], FullAttentionSpec(block_size=32))], "different block sizes"),
        ([], "no KV cache"),
    ],
)
def test_groups_that_cannot_be_moved_by_position(groups: list[Group], words: str) -> None:
    reason = unsupported_groups(Config(groups))
    assert words in reason
    assert bool(reason) == bool(words)


def test_states_of_several_tokens_are_refused() -> None:
    spec = MLAAttentionSpec()
    spec.tokens_per_state = 4  # type: ignore[attr-defined]
    assert "more than one token" in unsupported_groups(Config([Group(["a"], spec)]))
