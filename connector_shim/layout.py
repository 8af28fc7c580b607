"""From vLLM's KV tensors to layouts: where every block of every layer lies, from real strides.

Nothing is guessed from names or backends. The block axis is the one whose extent is the number of
blocks and, where vLLM states how far apart blocks lie, whose stride is that; if more than one
axis fits, the layer is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from connector_shim.device_memory import DeviceExporter
from connector_shim.errors import ClientError
from connector_shim.memory import Segment, layout_string, regions_of, share_cpu_storage
from kvd.protocol.codes import Code
from kvd.protocol.types import LayerLayout

_SUPPORTED_SPECS = frozenset(
    {
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "SlidingWindowSpec",
        "ChunkedLocalAttentionSpec",
    }
)


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """All layers of one worker. `axes` names the order of axes within a block, per kind of layer.

    The file descriptors of `segments` belong to whoever made it; `storages` must stay referenced
    as long as the daemon may use them.
    """

    segments: tuple[Segment, ...]
    layers: tuple[LayerLayout, ...]
    storages: tuple[torch.UntypedStorage, ...]
    axes: str
    dtypes: str

    def close(self) -> None:
        """Closes the descriptors."""
        for segment in self.segments:
            if segment.fd >= 0:
                os.close(segment.fd)


def unsupported_groups(kv_cache_config: Any) -> str:
    """Why these KV cache groups cannot be moved by token position, "" if they can."""
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return "the model has no KV cache"
    for index, group in enumerate(groups):
        if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
            return f"KV cache group {index} is not open to KV transfer"
        for spec in layer_specs(group.kv_cache_spec):
            kind = type(spec).__name__
            if kind not in _SUPPORTED_SPECS:
                return f"KV cache group {index} is a {kind}, which kvd does not support"
            per_state = getattr(spec, "tokens_per_state", 1)
            if per_state != 1 or getattr(spec, "compress_ratio", 1) != 1:
                return f"KV cache group {index} keeps more than one token in a state"
    sizes = {group.kv_cache_spec.block_size for group in groups}
    if len(sizes) > 1:
        return f"KV cache groups have different block sizes: {sorted(sizes)}"
    return ""


def layer_specs(spec: Any) -> list[Any]:
    """The specs inside a group's spec."""
    inner = getattr(spec, "kv_cache_specs", None)
    return list(inner.values()) if isinstance(inner, Mapping) else [spec]


def layer_groups(kv_cache_config: Any) -> dict[str, int]:
    """KV cache group of each layer name."""
    return {
        name: index
        for index, group in enumerate(kv_cache_config.kv_cache_groups)
        for name in group.layer_names
    }


def block_strides(kv_cache_config: Any) -> dict[str, int]:
    """Bytes between two blocks of each layer, where vLLM states it (0.29 and later)."""
    return {
        name: int(tensor.block_stride)
        for tensor in kv_cache_config.kv_cache_tensors
        if hasattr(tensor, "block_stride")
        for name in tensor.layers
    }


def block_axis(
    name: str,
    shape: Sequence[int],
    strides_bytes: Sequence[int],
    num_blocks: int,
    block_stride: int | None,
) -> int:
    """The axis that counts blocks. Raises ClientError BAD_MEMORY when there is not exactly one."""
    fits = [axis for axis, extent in enumerate(shape) if extent == num_blocks]
    if block_stride is not None and num_blocks > 1:
        fits = [axis for axis in fits if strides_bytes[axis] == block_stride]
    if len(fits) == 1:
        return fits[0]
    what = "no axis" if not fits else "more than one axis"
    stride = "" if block_stride is None else f" and stride {block_stride} bytes"
    raise ClientError(
        Code.BAD_MEMORY,
        f"layer {name}: {what} of shape {tuple(shape)}, strides {tuple(strides_bytes)} has "
        f"{num_blocks} blocks{stride}",
    )


def describe_kv_caches(
    kv_caches: Mapping[str, torch.Tensor],
    kv_cache_config: Any,
    share: Callable[[torch.UntypedStorage], int] = share_cpu_storage,
    exporter: DeviceExporter | None = None,
) -> EngineLayout:
    """Share the storages of these KV tensors and say where each layer's blocks lie.

    Layers keep the order of `kv_caches`; layers of one group that are the same memory (KV shared
    between layers) appear once. Raises ClientError, with the layer's name where one is at fault;
    then no descriptor stays open.
    """
    groups = layer_groups(kv_cache_config)
    strides = block_strides(kv_cache_config)
    storages: dict[int, int] = {}
    segments: list[Segment] = []
    kept: list[torch.UntypedStorage] = []
    layers: list[LayerLayout] = []
    seen: set[tuple[int, int, int]] = set()
    axes: dict[str, None] = {}
    dtypes: dict[str, None] = {}
    try:
        for name, tensor in kv_caches.items():
            if not isinstance(tensor, torch.Tensor):
                raise ClientError(
                    Code.UNSUPPORTED, f"layer {name} has several state tensors, not a KV cache"
                )
            if tensor.device.type not in ("cpu", "cuda"):
                raise ClientError(
                    Code.UNSUPPORTED,
                    f"layer {name} is on {tensor.device}: "
                    f"{tensor.device.type.upper()} memory is not supported by this version",
                )
            if name not in groups:
                raise ClientError(Code.BAD_MEMORY, f"layer {name} is in no KV cache group")
            storage = tensor.untyped_storage()
            segment = storages.get(storage.data_ptr())
            if segment is None:
                segment = len(segments)
                if tensor.device.type == "cuda":
                    exporter = exporter or DeviceExporter()
                    segments.append(exporter.export(segment, storage.data_ptr(), storage.nbytes()))
                else:
                    fd = share(storage)
                    segments.append(Segment(segment=segment, nbytes=storage.nbytes(), fd=fd))
                # Sharing moved the data: later tensors of this storage see the new address.
                storages[storage.data_ptr()] = segment
                kept.append(storage)
            size = tensor.element_size()
            offset = tensor.storage_offset() * size
            if (place := (groups[name], segment, offset)) in seen:
                continue
            seen.add(place)
            shape = tuple(tensor.shape)
            steps = tuple(stride * size for stride in tensor.stride())
            axis = block_axis(name, shape, steps, kv_cache_config.num_blocks, strides.get(name))
            layers.append(
                LayerLayout(
                    name=name,
                    group=groups[name],
                    regions=regions_of(shape, steps, size, axis, offset, segment),
                )
            )
            axes[_axes(shape, steps, axis)] = None
            dtypes[str(tensor.dtype).removeprefix("torch.")] = None
        if not layers:
            raise ClientError(Code.BAD_MEMORY, "vLLM registered no KV cache")
    except BaseException:
        for segment_info in segments:
            if segment_info.fd >= 0:
                os.close(segment_info.fd)
        raise
    return EngineLayout(
        tuple(segments), tuple(layers), tuple(kept), ";".join(axes), ",".join(dtypes)
    )


def _axes(shape: Sequence[int], strides_bytes: Sequence[int], axis: int) -> str:
    """Axes within a block, outermost first, each by its place in the tensor and its extent.

    The place tells NHD from HND also where both have the same extents; the number of axes tells
    the forms of different vLLM versions apart.
    """
    names = [f"{place}:{extent}" for place, extent in enumerate(shape)]
    inner = layout_string(names, shape, strides_bytes, axis)
    return f"{len(shape)}d[{inner}]"
