"""Copy plans against loops that think about one byte at a time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvd.errors import MemoryRefused
from kvd.memory.cuda.driver import Copy2D
from kvd.memory.cuda.plan import (
    Copies,
    batches,
    between,
    collapse,
    cuts_for_runs,
    gather,
    layer_cuts,
    one_run,
    scatter,
)
from kvd.memory.plan import addresses
from kvd.protocol.codes import Code
from tests.contract.rig import STYLES, Rig, Shape
from tests.contract.test_bytes import shapes

UNHURRIED = settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def as_bytes(copies: Copies) -> NDArray[np.int64]:
    """(destination, source) of every byte, by destination; fails if one is written twice."""
    assert (copies.nbytes > 0).all()
    within = [np.arange(n) for n in copies.nbytes.tolist()]
    dst = np.concatenate([at + w for at, w in zip(copies.dst.tolist(), within, strict=True)])
    src = np.concatenate([at + w for at, w in zip(copies.src.tolist(), within, strict=True)])
    assert np.unique(dst).size == dst.size
    order = np.argsort(dst)
    return np.stack((dst[order], src[order]))


def rows(copy: Copy2D) -> Copies:
    r = np.arange(copy.height, dtype=np.int64)
    return Copies(
        copy.dst + r * copy.dst_pitch,
        copy.src + r * copy.src_pitch,
        np.full(copy.height, copy.width, np.int64),
    )


def joined(parts: list[Copies]) -> Copies:
    return Copies(
        np.concatenate([p.dst for p in parts]),
        np.concatenate([p.src for p in parts]),
        np.concatenate([p.nbytes for p in parts]),
    )


ids = st.lists(st.integers(0, 15), min_size=1, max_size=10, unique=True)


@UNHURRIED
@given(shapes(), st.sampled_from(STYLES), st.sampled_from(STYLES), st.data())
def test_from_block_to_block_as_a_loop_would(
    shape: Shape, one: str, two: str, data: st.DataObject
) -> None:
    rig = Rig.make(shape, (16, 16), (one, two))
    src, dst = rig.src.open(writable=True), rig.dst.open(writable=True)
    try:
        a = data.draw(ids)
        b = data.draw(st.permutations(range(16)))[: len(a)]
        first = data.draw(st.integers(0, len(shape.layers) - 1))
        count = data.draw(st.integers(1, len(shape.layers) - first))
        group = data.draw(st.integers(0, shape.num_groups - 1))
        packed = (np.array(a, np.uint32), np.array(b, np.uint32))
        plan = between(src, dst, group, (first, count), packed)
        loop = []
        for layer in range(first, first + count):
            if shape.layers[layer][0] != group:
                continue
            for region, n in enumerate(shape.layers[layer][1]):
                for x, y in zip(a, b, strict=True):
                    here = [
                        memory.address + _placed(memory, layer, region) + block * where.stride
                        for memory, where, block in (
                            (src, rig.src.layers[layer].regions[region], x),
                            (dst, rig.dst.layers[layer].regions[region], y),
                        )
                    ]
                    loop.extend([(here[1] + i, here[0] + i) for i in range(n)])
        if not loop:
            assert len(plan) == 0
            return
        naive = np.array(sorted(loop)).T
        assert np.array_equal(as_bytes(plan), naive)
        most = data.draw(st.integers(20, 600))
        cut = list(batches(plan, most, data.draw(st.integers(1, 9))))
        assert all(part.total <= most for part in cut)
        assert np.array_equal(as_bytes(joined(cut)), naive)
        assert np.array_equal(as_bytes(joined([rows(copy) for copy in collapse(plan)])), naive)
    finally:
        rig.close()


def _placed(memory: object, layer: int, region: int) -> int:
    """Offset of a region's block 0, found in the table row by row."""
    for table in memory.tables:  # type: ignore[attr-defined]
        rows_of_layer = [i for i, one in enumerate(table.layer) if one == layer]
        if rows_of_layer:
            return int(table.offset[rows_of_layer[region]])
    raise AssertionError(layer)


@UNHURRIED
@given(shapes(), st.sampled_from(STYLES), st.sampled_from(STYLES), st.data())
def test_staging_chunks_as_a_loop_would(
    shape: Shape, one: str, two: str, data: st.DataObject
) -> None:
    """Gathered by one side and scattered by the other, whatever their layouts and cuts are."""
    rig = Rig.make(shape, (16, 16), (one, two))
    src, dst = rig.src.open(writable=True), rig.dst.open(writable=True)
    try:
        a = data.draw(ids)
        b = data.draw(st.permutations(range(16)))[: len(a)]
        group = data.draw(st.integers(0, shape.num_groups - 1))
        most = data.draw(st.integers(400, 2000))
        staging = np.zeros(most, np.uint8)
        at = staging.ctypes.data
        layers = (0, len(shape.layers))
        for first, count, at_once in layer_cuts(dst, group, layers, most):
            for i in range(0, len(a), at_once):
                x, y = (np.array(some[i : i + at_once], np.uint32) for some in (a, b))
                out = gather(addresses(src, group, first, count, x), at)
                back = scatter(addresses(dst, group, first, count, y), at)
                assert out.total == back.total <= most
                for copies in (out, back):
                    _run(copies)
        piece = rig.piece(group, a, b)
        assert rig.wrong_blocks(piece) == []
    finally:
        rig.close()


@st.composite
def counted(draw: st.DrawFn) -> list[int]:
    """Ids that count up, as runs need them, or nearly."""
    start = draw(st.integers(0, 15))
    ids = list(range(start, draw(st.integers(start, 15)) + 1))
    return draw(st.permutations(ids)) if draw(st.integers(0, 3)) == 0 else ids


@UNHURRIED
@given(shapes(), st.sampled_from(STYLES), st.sampled_from(STYLES), counted(), st.data())
def test_chunks_that_lie_in_one_piece_as_a_loop_would_find_them(
    shape: Shape, one: str, two: str, ids: list[int], data: st.DataObject
) -> None:
    """The consumer cuts by its own layout, the producer looks at its own; a byte at a time tells
    whether a chunk is one run, and that the chunks are all of the piece."""
    rig = Rig.make(shape, (16, 16), (one, two))
    src, dst = rig.src.open(writable=True), rig.dst.open(writable=True)
    try:
        group = data.draw(st.integers(0, shape.num_groups - 1))
        first = data.draw(st.integers(0, len(shape.layers) - 1))
        layers = (first, data.draw(st.integers(1, len(shape.layers) - first)))
        most = data.draw(st.integers(400, 2000))
        least = data.draw(st.sampled_from([0, 1, 64, 200, 1000]))
        packed = np.array(ids, np.uint32)
        met: list[tuple[int, int]] = []
        for start, count, at_once in cuts_for_runs(dst, group, layers, packed, most, least):
            wanted = [n for n in range(start, start + count) if shape.layers[n][0] == group]
            for i in range(0, len(ids), at_once):
                chunk = packed[i : i + at_once]
                loop: list[int] = []
                for block in chunk.tolist():
                    met.extend((layer, block) for layer in wanted)
                    for layer in wanted:
                        for region, n in enumerate(shape.layers[layer][1]):
                            where = rig.src.layers[layer].regions[region]
                            at = _placed(src, layer, region) + block * where.stride
                            loop.extend(src.address + at + k for k in range(n))
                assert len(loop) <= most
                whole = all(b == a + 1 for a, b in pairwise(loop))
                direct = least > 0 and len(loop) >= least and whole
                stretches = addresses(src, group, start, count, chunk)
                assert one_run(stretches, least) == (loop[0] if direct else None)
        every = range(layers[0], sum(layers))
        of_group = [n for n in every if shape.layers[n][0] == group]
        assert sorted(met) == sorted((n, block) for n in of_group for block in ids)
    finally:
        rig.close()


def test_layers_are_cut_apart_where_that_makes_runs_of_them() -> None:
    up, down = np.arange(2, 10, dtype=np.uint32), np.arange(9, 1, -1, dtype=np.uint32)
    two_layers = Shape(((0, (64,)), (0, (128,))))
    rig = Rig.make(two_layers, (16, 16))
    memory = rig.dst.open(writable=True)
    together = [(0, 2, 5)]
    try:
        assert cuts_for_runs(memory, 0, (0, 2), up, 1000, 512) == [(0, 1, 15), (1, 1, 7)]
        assert cuts_for_runs(memory, 0, (0, 2), up, 1000, 513) == together, "too short"
        assert cuts_for_runs(memory, 0, (0, 2), up, 1000, 0) == together, "not wanted"
        assert cuts_for_runs(memory, 0, (0, 2), down, 1000, 64) == together, "scattered"
    finally:
        rig.close()
    for style, shape in (
        ("interleaved", two_layers),  # all layers of a block are one piece already
        ("gaps", two_layers),
        ("layers", Shape(((0, (32, 32)), (0, (128,))))),  # keys lie apart from values
    ):
        rig = Rig.make(shape, (16, 16), (style, style))
        memory = rig.dst.open(writable=True)
        try:
            assert cuts_for_runs(memory, 0, (0, 2), up, 1000, 64) == together, style
        finally:
            rig.close()


def _run(copies: Copies) -> None:
    import ctypes

    for dst, src, n in zip(copies.dst, copies.src, copies.nbytes, strict=True):
        ctypes.memmove(int(dst), int(src), int(n))


def test_a_block_that_fits_into_no_buffer_is_refused() -> None:
    rig = Rig.make(Shape(((0, (64,)), (0, (640,)))), (4, 4))
    memory = rig.dst.open(writable=True)
    try:
        assert layer_cuts(memory, 0, (0, 2), 704) == [(0, 2, 1)]
        assert layer_cuts(memory, 0, (0, 2), 700) == [(0, 1, 1), (1, 1, 1)]
        with pytest.raises(MemoryRefused, match="1 has 640 bytes, a staging buffer 639") as caught:
            layer_cuts(memory, 0, (0, 2), 639)
        assert caught.value.code == Code.NO_SPACE
    finally:
        rig.close()


def test_rows_too_far_apart_are_not_one_strided_copy() -> None:
    far = np.array([0, 2**31], np.int64)
    near = np.array([0, 100], np.int64)
    n = np.array([10, 10], np.int64)
    assert len(collapse(Copies(far, near, n))) == 2
    assert len(collapse(Copies(near, far, n))) == 2
    assert len(collapse(Copies(near, near, n))) == 1
    assert len(collapse(Copies(near[::-1], near, n))) == 2  # a pitch cannot be negative
