"""Every byte arrives where it belongs, and no other byte changes, whatever the layouts are."""

from __future__ import annotations

import asyncio

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.core.instructions import Piece
from tests.contract.conftest import Connect
from tests.contract.rig import STYLES, Rig, Shape

REGION_BYTES = st.integers(1, 24).map(lambda n: 8 * n)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    num_groups = draw(st.integers(1, 3))
    uniform = draw(st.one_of(st.none(), st.lists(REGION_BYTES, min_size=1, max_size=2)))
    layers = []
    for i in range(draw(st.integers(num_groups, 6))):
        group = i if i < num_groups else draw(st.integers(0, num_groups - 1))
        regions = uniform or draw(st.lists(REGION_BYTES, min_size=1, max_size=2))
        layers.append((group, tuple(regions)))
    return Shape(tuple(layers))


@st.composite
def block_ids(draw: st.DrawFn, num_blocks: int, count: int) -> list[int]:
    """Scattered ids, or stretches that count up."""
    if draw(st.booleans()):
        order: list[int] = draw(st.permutations(range(num_blocks)))
        return order[:count]
    start = draw(st.integers(0, num_blocks - count))
    cut = draw(st.integers(0, count))
    ids = list(range(start, start + count))
    return ids[cut:] + ids[:cut]


@st.composite
def transfers(
    draw: st.DrawFn,
) -> tuple[Shape, tuple[str, str], list[tuple[int, tuple[int, int], list[int], list[int]]]]:
    """A shape, two styles, and for some groups a layer range with source and destination ids."""
    shape = draw(shapes())
    styles = (draw(st.sampled_from(STYLES)), draw(st.sampled_from(STYLES)))
    pieces = []
    for group in range(shape.num_groups):
        count = draw(st.integers(1, 12))
        src, dst = draw(block_ids(16, count)), draw(block_ids(20, count))
        num = len(shape.layers)
        first = draw(st.integers(0, num - 1)) if draw(st.booleans()) else 0
        layers = (first, draw(st.integers(1, num - first)) if first else num)
        pieces.append((group, layers, src, dst))
    return shape, styles, pieces


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(transfers())
async def test_bytes_are_exact(
    connect: Connect,
    transfer: tuple[
        Shape, tuple[str, str], list[tuple[int, tuple[int, int], list[int], list[int]]]
    ],
) -> None:
    shape, styles, wanted = transfer
    async with connect(shape, (16, 20), styles) as (rig, harness):
        harness.admit([src for _, _, src, _ in wanted])
        pieces = [rig.piece(group, src, dst, layers) for group, layers, src, dst in wanted]
        job = rig.job(*pieces)
        assert await harness.puller().pull(job) == job.nbytes
        assert rig.wrong_blocks(*pieces) == []


SHAPE = Shape(tuple((0, (256,)) for _ in range(6)))


async def test_many_jobs_at_once_on_two_attachments(connect: Connect) -> None:
    async with connect(SHAPE) as (rig, harness):
        harness.admit([range(40)])
        pullers = [harness.puller(), harness.puller()]
        pieces = [
            rig.piece(0, [i], [47 - i], layers, indices=[i])
            for i in range(40)
            for layers in ((0, 2), (2, 4))
        ]
        moved = await asyncio.gather(
            *(
                pullers[n % 2].pull(rig.job(piece, fetch_id=f"f{n % 5}"))
                for n, piece in enumerate(pieces)
            )
        )
        assert sum(moved) == 40 * 6 * 256
        assert rig.wrong_blocks(*pieces) == []


async def test_capped_calls_move_the_same_bytes(connect: Connect) -> None:
    async with connect(SHAPE) as (rig, harness):
        harness.small_calls(100)  # less than one region
        harness.admit([range(40)])
        piece = rig.piece(0, range(40), range(3, 43))
        assert await harness.puller().pull(rig.job(piece)) == rig.nbytes(piece)
        assert rig.wrong_blocks(piece) == []


async def test_a_job_without_pieces_is_done(connect: Connect) -> None:
    async with connect(SHAPE) as (rig, harness):
        assert await harness.puller().pull(rig.job()) == 0
        assert rig.dst.untouched()


def test_the_oracle_sees_a_wrong_byte() -> None:
    rig = Rig.make(SHAPE, (4, 4))
    try:
        pieces: list[Piece] = [rig.piece(0, [1], [2])]
        assert rig.wrong_blocks(*pieces) == [(layer, 0, 2) for layer in range(6)]
        for layer in range(6):
            rig.dst.block(layer, 0, 2)[:] = rig.src.block(layer, 0, 1)
        assert rig.wrong_blocks(*pieces) == []
        rig.dst.block(5, 0, 2)[255] ^= 1
        rig.dst.block(0, 0, 3)[0] = 0
        assert rig.wrong_blocks(*pieces) == [(0, 0, 3), (5, 0, 2)]
    finally:
        rig.close()
