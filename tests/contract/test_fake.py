"""The scripted faults that other parts' tests rely on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from kvd.protocol.codes import Code
from kvd.transport.base import TransportError
from kvd.transport.fake import Fail, FakePuller, Flip, Hang, Slow
from tests.contract.rig import SLOT, WORD, Rig, Shape

SHAPE = Shape(((0, (64,)), (0, (64,))))
BLOCK = 128


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig.make(SHAPE, (8, 8))
    yield made
    made.close()


def puller(rig: Rig) -> FakePuller:
    return FakePuller(rig.dst.open(writable=True), rig.src.open(writable=False))


def landed(rig: Rig) -> int:
    """Destination blocks that hold something."""
    return sum(bool((rig.dst.block(0, 0, b) != 0xEE).any()) for b in range(8))


async def test_faults_meet_jobs_in_order(rig: Rig) -> None:
    fake = puller(rig)
    fake.script(Fail(Code.PEER_LOST, after=2), None, Slow(3))
    piece = rig.piece(0, range(5), range(5))
    with pytest.raises(TransportError) as caught:
        await fake.pull(rig.job(piece))
    assert caught.value.code == Code.PEER_LOST
    assert landed(rig) == 2
    assert await fake.pull(rig.job(piece)) == 5 * BLOCK
    assert await fake.pull(rig.job(piece)) == 5 * BLOCK
    assert rig.wrong_blocks(piece) == []


@pytest.mark.parametrize("after", [0, 3, 5])
async def test_a_hang_ends_by_release_or_by_stop(rig: Rig, after: int) -> None:
    fake = puller(rig)
    fake.script(Hang(after), Hang(after))
    piece = rig.piece(0, range(5), range(5))
    pull = asyncio.ensure_future(fake.pull(rig.job(piece)))
    await fake.hanging.wait()
    assert landed(rig) == after
    fake.stop("fetch")
    with pytest.raises(TransportError) as caught:
        await pull
    assert caught.value.code == Code.CANCELLED
    assert landed(rig) == after
    pull = asyncio.ensure_future(fake.pull(rig.job(piece)))
    await fake.hanging.wait()
    fake.release()
    assert await pull == 5 * BLOCK


@pytest.mark.parametrize("after", [0, 2, 5])
async def test_a_flip_is_seen_after_the_copy(rig: Rig, after: int) -> None:
    def flip() -> None:
        rig.src.fence[SLOT] = WORD + 1

    fake = puller(rig)
    fake.script(Flip(flip, after))
    with pytest.raises(TransportError) as caught:
        await fake.pull(rig.job(rig.piece(0, range(5), range(5))))
    assert caught.value.code == Code.FENCED
    assert landed(rig) == 5


async def test_closing_ends_what_hangs(rig: Rig) -> None:
    fake = puller(rig)
    fake.script(Hang(1))
    pull = asyncio.ensure_future(fake.pull(rig.job(rig.piece(0, range(5), range(5)))))
    await fake.hanging.wait()
    await fake.aclose()
    with pytest.raises(TransportError) as caught:
        await pull
    assert caught.value.code == Code.CANCELLED


async def test_a_job_that_runs_is_not_started_twice(rig: Rig) -> None:
    fake = puller(rig)
    fake.script(Hang())
    job = rig.job(rig.piece(0, [1], [1]))
    pull = asyncio.ensure_future(fake.pull(job))
    await fake.hanging.wait()
    with pytest.raises(TransportError) as caught:
        await fake.pull(job)
    assert caught.value.code == Code.DUPLICATE
    fake.release()
    assert await pull == BLOCK
