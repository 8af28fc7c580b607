"""Layouts from strides, plain shared blocks, and moving a storage into shared memory."""

from __future__ import annotations

import glob
import mmap
import os
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from connector_shim import memory
from connector_shim.errors import ClientError
from connector_shim.memory import (
    layout_string,
    regions_of,
    share_cpu_storage,
    shared_blocks,
)
from kvd.protocol.codes import Code
from kvd.protocol.types import Region


def test_k_and_v_apart_are_two_regions_and_a_leading_block_axis_is_one() -> None:
    blocks, heads, tokens, dim = 10, 2, 16, 8
    block = heads * tokens * dim * 2
    apart = torch.empty(2, blocks, heads, tokens, dim, dtype=torch.float16)
    assert regions_of(apart.shape, [s * 2 for s in apart.stride()], 2, 1, 100, 3) == [
        Region(3, 100, block, block),
        Region(3, 100 + blocks * block, block, block),
    ]
    together = torch.empty(blocks, 2, heads, tokens, dim, dtype=torch.float16)
    assert regions_of(together.shape, [s * 2 for s in together.stride()], 2, 0, 0, 0) == [
        Region(0, 0, 2 * block, 2 * block)
    ]


def test_axes_are_merged_by_stride_and_not_by_position() -> None:
    # HND in memory, seen as NHD: one region all the same.
    seen = torch.empty(10, 2, 16, 8).permute(0, 2, 1, 3)
    strides = [s * 4 for s in seen.stride()]
    assert regions_of(seen.shape, strides, 4, 0, 0, 0) == [Region(0, 0, 1024, 1024)]
    names = ("block", "token", "head", "dim")
    assert layout_string(names, seen.shape, strides, 0) == "head,token,dim"


def test_layers_side_by_side_in_each_block_keep_the_stride_of_the_block() -> None:
    # [block, layer, 2, token, dim]: one layer of it.
    whole = torch.empty(6, 3, 2, 16, 8, dtype=torch.uint8)
    layer = whole[:, 1]
    assert regions_of(layer.shape, layer.stride(), 1, 0, layer.storage_offset(), 0) == [
        Region(0, 256, 768, 256)
    ]


def test_axes_of_extent_one_change_neither_regions_nor_layout() -> None:
    names = ("kv", "block", "head", "token", "dim")
    assert layout_string(names, (1, 8, 1, 16, 4), (7, 64, 3, 4, 1), 1) == "token,dim"
    assert regions_of((1, 8, 1, 16, 4), (7, 64, 3, 4, 1), 1, 1, 0, 0) == [Region(0, 0, 64, 64)]


@pytest.mark.parametrize(
    ("shape", "strides", "itemsize", "block_axis", "code", "words"),
    [
        ((4, 8), (-8, 1), 1, 0, Code.BAD_MEMORY, "axis 0 has a negative stride"),
        ((4, 8), (8, 0), 1, 0, Code.BAD_MEMORY, "axis 1 has a zero stride"),
        ((4, 8), (0, 1), 1, 0, Code.BAD_MEMORY, "axis 0 has a zero stride"),
        ((4, 8), (4, 1), 1, 0, Code.BAD_MEMORY, "axis 0 has an overlapping stride"),
        ((4, 8), (16, 1), 2, 0, Code.BAD_MEMORY, "axis 1 has an overlapping stride"),
        ((4, 0), (8, 1), 1, 0, Code.BAD_MEMORY, "axis 1 is empty"),
        ((4, 8), (8,), 1, 0, Code.BAD_MEMORY, "do not belong together"),
        ((4, 8), (8, 1), 1, 2, Code.BAD_MEMORY, "do not belong together"),
        ((4, 65, 8), (65 * 16, 16, 1), 1, 0, Code.UNSUPPORTED, "65 pieces of 8 bytes"),
    ],
)
def test_layouts_that_cannot_be_moved_are_refused_by_name(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    block_axis: int,
    code: Code,
    words: str,
) -> None:
    with pytest.raises(ClientError, match=words) as caught:
        regions_of(shape, strides, itemsize, block_axis, 0, 0)
    assert caught.value.code is code


@settings(max_examples=100, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
    itemsize=st.sampled_from([1, 2, 4]),
    pad=st.integers(0, 2),
    offset=st.integers(0, 3),
    data=st.data(),
)
def test_regions_cover_exactly_the_bytes_of_each_block(
    shape: list[int], order: Any, itemsize: int, pad: int, offset: int, data: st.DataObject
) -> None:
    axes = list(range(len(shape)))
    order.shuffle(axes)
    strides = [0] * len(shape)
    step = itemsize
    for axis in axes:
        strides[axis] = step
        step = step * shape[axis] + (pad * itemsize if data.draw(st.booleans()) else 0)
    block_axis = data.draw(st.integers(0, len(shape) - 1))
    base = offset * itemsize
    try:
        regions = regions_of(shape, strides, itemsize, block_axis, base, 0)
    except ClientError as error:
        pieces = int(np.prod([n for axis, n in enumerate(shape) if axis != block_axis]))
        if error.code is not Code.UNSUPPORTED or pieces <= memory.MAX_REGIONS:
            raise
        return
    first = np.array(list(np.ndindex(*shape))) @ np.array(strides) + base
    for block in range(shape[block_axis]):
        mine = np.array([index[block_axis] == block for index in np.ndindex(*shape)])
        expected = sorted(int(a) + i for a in first[mine] for i in range(itemsize))
        found = [r.offset + block * r.stride + i for r in regions for i in range(r.nbytes)]
        assert sorted(found) == expected


def test_shared_blocks_lie_where_they_are_said_to() -> None:
    description, mapping = shared_blocks(3, 5, 32, groups=[0, 1, 0], block_size=4)
    try:
        for index, layer in enumerate(description.layers):
            (region,) = layer.regions
            start = region.offset + 2 * region.stride
            mapping[start : start + region.nbytes] = bytes([index + 1]) * 32
        (segment,) = description.segments
        with mmap.mmap(segment.fd, 0) as other:
            assert [other[(layer * 5 + 2) * 32] for layer in range(3)] == [1, 2, 3]
            assert sum(other[:]) == 32 * (1 + 2 + 3)
        assert [layer.group for layer in description.layers] == [0, 1, 0]
        assert description.num_groups == 2
        assert description.geometry.layers == [
            ("layer.0", 0, [32]),
            ("layer.1", 1, [32]),
            ("layer.2", 0, [32]),
        ]
        # A size that could change would be a SIGBUS in whoever maps it.
        for size in (1, 10**6):
            with pytest.raises(PermissionError):
                os.ftruncate(segment.fd, size)
    finally:
        description.close()
        mapping.close()


@pytest.mark.parametrize("shape", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, -1, 1)])
def test_no_blocks_at_all_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ClientError) as caught:
        shared_blocks(*shape)
    assert caught.value.code is Code.BAD_MEMORY


# --- torch storages -------------------------------------------------------------------------------


def test_a_storage_moves_in_place_and_its_views_follow() -> None:
    tensor = torch.arange(1024, dtype=torch.int32).reshape(4, 256)
    view = tensor[2]
    fd = share_cpu_storage(tensor.untyped_storage())
    again = share_cpu_storage(tensor.untyped_storage())
    try:
        assert torch.equal(view, torch.arange(512, 768, dtype=torch.int32))
        with mmap.mmap(fd, 0) as mapping:
            view[0] = 77
            seen = np.frombuffer(mapping, dtype=np.int32)
            assert seen[512] == 77
            assert seen[1023] == 1023
            del seen
        assert os.path.sameopenfile(fd, again)
        assert not os.get_inheritable(fd)
    finally:
        # The caller's own: closing it must not take torch's away.
        os.close(fd)
        os.close(again)
    os.close(share_cpu_storage(tensor.untyped_storage()))


def test_a_small_shm_is_found_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "f_bavail f_frsize")
    monkeypatch.setattr(os, "statvfs", lambda path: usage(5, 2**20))
    tensor = torch.zeros(8 * 2**20, dtype=torch.uint8)
    with pytest.raises(ClientError, match=r"needs 8 MiB .* 5 MiB free.*--shm-size.*emptyDir") as no:
        share_cpu_storage(tensor.untyped_storage())
    assert no.value.code is Code.NO_SPACE
    assert not tensor.untyped_storage().is_shared()


class FailingStorage:
    """Leaves a file and raises, as torch does when the space runs out half-way."""

    def __init__(self, left: str) -> None:
        self.left = left

    def nbytes(self) -> int:
        return 4096

    def is_shared(self) -> bool:
        return False

    def _share_fd_cpu_(self) -> tuple[int, int]:
        with open(self.left, "wb") as file:
            file.truncate(4096)
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")


def test_what_a_failed_attempt_left_is_removed_and_nothing_else() -> None:
    prefix = f"/dev/shm/torch_{os.getpid()}"
    older, other_size = Path(f"{prefix}_older"), Path(f"{prefix}_larger")
    foreign = Path(f"/dev/shm/torch_{os.getpid()}0_1")
    left = f"{prefix}_left"
    older.write_bytes(bytes(4096))
    try:
        storage: Any = FailingStorage(left)
        with pytest.raises(ClientError, match="No space left") as caught:
            share_cpu_storage(storage)
        assert caught.value.code is Code.NO_SPACE
        foreign.write_bytes(bytes(4096))
        other_size.write_bytes(bytes(8192))
        memory._remove_leftover({str(older)}, 4096)
        assert sorted(glob.glob(f"/dev/shm/torch_{os.getpid()}*")) == sorted(
            map(str, (older, other_size, foreign))
        )
    finally:
        for path in (older, other_size, foreign, Path(left)):
            path.unlink(missing_ok=True)
