"""Copy plans against a plain, slow model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import MemoryRefused
from kvd.memory.plan import (
    addresses,
    calls,
    check_same_layers,
    id_runs,
    uniform_runs,
    unpack_ids,
)
from tests.contract.rig import STYLES, Rig, Shape, pack

SHAPE = Shape(((0, (64, 64)), (1, (32,)), (0, (64, 64)), (0, (64, 64)), (1, (32,)), (0, (128,))))


@pytest.fixture(params=STYLES)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig.make(SHAPE, (12, 9), (request.param, "layers"))
    yield made
    made.close()


def test_layers_in_separate_segments_are_one_run() -> None:
    shape = Shape(((0, (64,)),) * 5)
    for style in ("layers", "segments", "interleaved"):
        rig = Rig.make(shape, (12, 9), (style, style))
        src, dst = rig.src.open(writable=False), rig.dst.open(writable=True)
        runs = uniform_runs(src, dst, 0, 0, 5)
        assert [run.regions for run in runs] == [5], style
        rig.close()


@settings(max_examples=60)
@given(
    st.sampled_from(STYLES),
    st.lists(st.integers(0, 11), min_size=1, max_size=9, unique=True),
    st.integers(1, 700),
    st.booleans(),
)
def test_calls_copy_each_byte_once(style: str, ids: list[int], cap: int, ascending: bool) -> None:
    rig = Rig.make(SHAPE, (12, 9), (style, "layers"))
    src, dst = rig.src.open(writable=False), rig.dst.open(writable=True)
    ids = sorted(ids) if ascending else ids
    piece = rig.piece(0, ids, range(len(ids)), (0, 6))
    runs = uniform_runs(src, dst, 0, 0, 6)
    blocks = id_runs(unpack_ids(piece.src, 12, "s"), unpack_ids(piece.dst, 9, "d"))
    total = 0
    for call in calls(runs, blocks, cap):
        assert call.nbytes <= max(cap, runs[call.run].nbytes)
        a, b = runs[call.run].views(src, dst)
        b[call.regions, call.dst] = a[call.regions, call.src]
        total += call.nbytes
        del a, b
    assert total == rig.nbytes(piece)
    assert rig.wrong_blocks(piece) == []
    rig.close()


def test_addresses_follow_block_then_layer_then_region(rig: Rig) -> None:
    memory = rig.src.open(writable=True)
    ids = [7, 0, 1, 11]
    for group, first, num in ((0, 0, 6), (0, 2, 2), (1, 0, 6), (1, 1, 1)):
        expected = [
            rig.src.block(layer, region, block).tobytes()
            for block in ids
            for layer in range(first, first + num)
            for region in range(len(SHAPE.layers[layer][1]))
            if SHAPE.layers[layer][0] == group
        ]
        found = addresses(memory, group, first, num, np.array(ids, np.uint32))
        root = memory.view(0, (memory._root.size,), (1,))  # type: ignore[union-attr]
        data = b"".join(
            root[at - memory.address : at - memory.address + n].tobytes()
            for at, n in found.tolist()
        )
        del root
        assert data == b"".join(expected)
        ends = (found[:, 0] + found[:, 1])[:-1]
        assert not (ends == found[1:, 0]).any(), "neighbours were not merged"


def test_addresses_of_nothing_are_none(rig: Rig) -> None:
    memory = rig.src.open(writable=True)
    assert addresses(memory, 0, 1, 1, np.array([1], np.uint32)).shape == (0, 2)
    assert addresses(memory, 0, 0, 6, np.array([], np.uint32)).shape == (0, 2)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=30))
def test_id_runs_give_back_the_lists(pairs: list[tuple[int, int]]) -> None:
    src, dst = (np.array([p[i] for p in pairs], np.uint32) for i in (0, 1))
    runs = id_runs(src, dst)
    assert [(a + i, b + i) for a, b, n in runs for i in range(n)] == pairs
    for (a, b, n), (c, d, _) in itertools.pairwise(runs):
        assert (a + n, b + n) != (c, d)


def test_ids_are_checked_against_the_number_of_blocks() -> None:
    assert unpack_ids(pack([0, 7]), 8, "x").tolist() == [0, 7]
    assert unpack_ids(b"", 8, "x").size == 0
    with pytest.raises(MemoryRefused, match="x: block id 8, there are 8"):
        unpack_ids(pack([0, 8]), 8, "x")
    with pytest.raises(MemoryRefused, match="x: a null block"):
        unpack_ids(pack([0, 2**32 - 1]), 8, "x")
    with pytest.raises(MemoryRefused, match="x: 7 bytes"):
        unpack_ids(b"1234567", 8, "x")


@pytest.mark.parametrize(
    ("other", "match"),
    [
        (Shape(SHAPE.layers[:-1]), "6 layers against 5"),
        (Shape((*SHAPE.layers[:-1], (1, (128,)))), r"layer 5.*group 0.*group 1"),
        (Shape((*SHAPE.layers[:-1], (0, (64, 64)))), r"layer 5.*\[128\].*\[64, 64\]"),
    ],
)
def test_memories_that_differ_are_refused(other: Shape, match: str) -> None:
    one, two = Rig.make(SHAPE, (4, 4)), Rig.make(other, (4, 4))
    src, dst = one.src.open(writable=False), two.dst.open(writable=True)
    with pytest.raises(MemoryRefused, match=match):
        check_same_layers(src, dst)
    check_same_layers(src, src)
    one.close()
    two.close()
