"""Copy plans against loops that think about one byte at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvd.errors import MemoryRefused
from kvd.memory.cuda.driver import Copy2D
from kvd.memory.cuda.plan import Copies, batches, between, collapse, gather, layer_cuts, scatter
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
