"""What no transport may do: accept a stale copy, write after it said that it ended, or hang."""

from __future__ import annotations

import asyncio

import pytest

from kvd.protocol.codes import Code
from kvd.protocol.types import NULL_BLOCK
from kvd.transport.base import TransportError
from tests.contract.conftest import Connect
from tests.contract.harness import Harness
from tests.contract.rig import SLOT, SLOTS, UNTOUCHED, WORD, Rig, Shape
from tests.plugins.waiting import wait_for_async

SHAPE = Shape(tuple((0, (512,)) for _ in range(4)))
BLOCK = 4 * 512


def all_blocks(harness: Harness, rig: Rig) -> None:
    harness.admit([range(rig.src.num_blocks)])


async def refused(code: Code, harness: Harness, rig: Rig, **job: int) -> TransportError:
    piece = rig.piece(0, range(8), range(8))
    with pytest.raises(TransportError) as caught:
        await harness.puller().pull(rig.job(piece, **job))  # type: ignore[arg-type]
    assert caught.value.code == code, caught.value
    return caught.value


async def test_fence_wrong_before_the_copy_moves_nothing(connect: Connect) -> None:
    async with connect(SHAPE) as (rig, harness):
        all_blocks(harness, rig)
        rig.src.fence[SLOT] = WORD + 1
        await refused(Code.FENCED, harness, rig)
        assert rig.dst.untouched()


async def test_fence_flipped_during_the_copy_is_seen(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(SHAPE) as (rig, harness):
        all_blocks(harness, rig)
        memory = harness.fence_memory
        read = memory.fence_word
        reads = 0

        def flipping(slot: int) -> int:
            nonlocal reads
            word = read(slot)
            reads += 1
            rig.src.fence[SLOT] = WORD + 1  # the owner takes it back right after the first check
            return word

        monkeypatch.setattr(memory, "fence_word", flipping)
        await refused(Code.FENCED, harness, rig)
        assert reads >= 2


async def test_blocks_reused_in_mid_copy_are_not_accepted(connect: Connect) -> None:
    """The owner takes its blocks back and writes over them while a reader is half done."""
    async with connect(SHAPE) as (rig, harness):
        all_blocks(harness, rig)
        harness.small_calls(BLOCK)
        puller = harness.puller()
        gate = harness.gate(4)
        piece = rig.piece(0, range(12), range(12))
        pull = asyncio.ensure_future(puller.pull(rig.job(piece)))
        await gate.reached()
        rig.src.fence[SLOT] = 0
        before = rig.src.snapshot()
        rig.src.rewrite([UNTOUCHED] * len(before))
        gate.release()
        (ended,) = await asyncio.gather(pull, return_exceptions=True)
        rig.src.rewrite(before)
        if not isinstance(ended, BaseException):
            raise AssertionError(f"accepted, with {len(rig.wrong_blocks(piece))} wrong blocks")
        assert isinstance(ended, TransportError)
        assert ended.code == Code.FENCED


async def test_after_stop_no_byte_lands_once_the_pull_returned(connect: Connect) -> None:
    async with connect(SHAPE) as (rig, harness):
        all_blocks(harness, rig)
        harness.small_calls(BLOCK)
        puller = harness.puller()
        gate = harness.gate(5)
        piece = rig.piece(0, range(30), range(30))
        pull = asyncio.ensure_future(puller.pull(rig.job(piece)))
        await gate.reached()
        await wait_for_async(lambda: not rig.dst.untouched(), what="the first bytes")
        queued = asyncio.ensure_future(puller.pull(rig.job(rig.piece(0, [31], [31]))))
        other = asyncio.ensure_future(
            puller.pull(rig.job(rig.piece(0, [32], [32], indices=[32]), fetch_id="other"))
        )
        await asyncio.sleep(0)
        puller.stop("fetch")
        if harness.name in ("shm", "fake", "cuda_ipc"):
            # These can only end once the running call does.
            for _ in range(10):
                await asyncio.sleep(0)
            assert not pull.done() or harness.name == "fake"
            gate.release()
        with pytest.raises(TransportError) as caught:
            await pull
        assert caught.value.code == Code.CANCELLED
        # A second job of the fetch may have been quicker than the stop.
        (ended,) = await asyncio.gather(queued, return_exceptions=True)
        assert ended == BLOCK or getattr(ended, "code", None) == Code.CANCELLED
        landed = rig.dst.snapshot()
        gate.release()
        # Another fetch on the same attachment goes on, and shows that what was late has passed.
        assert await other == BLOCK
        for layer in range(4):
            assert (rig.dst.block(layer, 0, 32) == rig.src.block(layer, 0, 32)).all()
            rig.dst.block(layer, 0, 32)[:] = rig.dst.block(layer, 0, 33)
        for snap in landed:
            view = snap.reshape(4, 48, 512)
            view[:, 32] = view[:, 33]
        assert rig.dst.same_as(landed)
        assert len(rig.wrong_blocks(piece)) > 0  # it really was stopped in the middle


async def test_stop_of_an_unknown_fetch_does_nothing(connect: Connect) -> None:
    async with connect(SHAPE) as (rig, harness):
        all_blocks(harness, rig)
        puller = harness.puller()
        puller.stop("nobody")
        piece = rig.piece(0, [1], [1])
        assert await puller.pull(rig.job(piece)) == BLOCK
        puller.stop("fetch")
        assert await puller.pull(rig.job(piece)) == BLOCK


async def test_close_ends_running_pulls_and_unmaps(connect: Connect) -> None:
    async with connect(SHAPE) as (rig, harness):
        all_blocks(harness, rig)
        harness.small_calls(BLOCK)
        puller = harness.puller()
        gate = harness.gate(3)
        pull = asyncio.ensure_future(puller.pull(rig.job(rig.piece(0, range(20), range(20)))))
        await gate.reached()
        closing = asyncio.ensure_future(puller.aclose())
        await asyncio.sleep(0)
        gate.release()
        await closing
        assert pull.done()
        landed = rig.dst.snapshot()
        with pytest.raises(TransportError) as caught:
            await pull
        assert caught.value.code == Code.CANCELLED
        with pytest.raises(TransportError) as caught:
            await puller.pull(rig.job(rig.piece(0, [1], [1])))
        assert caught.value.code == Code.CANCELLED
        assert rig.dst.same_as(landed)
    # Leaving the rig shows that nothing is mapped any more.


async def test_the_engines_death_ends_a_pull(connect: Connect) -> None:
    async with connect(SHAPE) as (rig, harness):
        all_blocks(harness, rig)
        harness.small_calls(BLOCK)
        puller = harness.puller()
        if harness.name == "fake":
            pytest.skip("the fake is told to stop")
        gate = harness.gate(3)
        pull = asyncio.ensure_future(puller.pull(rig.job(rig.piece(0, range(20), range(20)))))
        await gate.reached()
        memory = puller.local  # type: ignore[attr-defined]
        memory.close_when_unpinned()
        assert not memory.closed
        gate.release()
        with pytest.raises(TransportError) as caught:
            await pull
        assert caught.value.code == Code.ENGINE_GONE
        assert await memory.wait_closed(5.0)


async def test_the_producers_death_ends_a_pull(connect: Connect) -> None:
    async with connect(SHAPE) as (rig, harness):
        all_blocks(harness, rig)
        harness.small_calls(BLOCK)
        puller = harness.puller()
        if harness.name == "fake":
            pytest.skip("the fake is told to stop")
        gate = harness.gate(3)
        pull = asyncio.ensure_future(puller.pull(rig.job(rig.piece(0, range(20), range(20)))))
        await gate.reached()
        harness.fence_memory.close_when_unpinned()
        gate.release()
        with pytest.raises(TransportError) as caught:
            await pull
        assert caught.value.code in (Code.PEER_LOST, Code.ENGINE_GONE)
        assert await harness.fence_memory.wait_closed(5.0)


async def test_a_cancelled_pull_is_still_over_before_it_returns(connect: Connect) -> None:
    async with connect(SHAPE) as (rig, harness):
        if harness.name == "fake":
            pytest.skip("the fake copies on the loop")
        all_blocks(harness, rig)
        harness.small_calls(BLOCK)
        puller = harness.puller()
        gate = harness.gate(3)
        pull = asyncio.ensure_future(puller.pull(rig.job(rig.piece(0, range(20), range(20)))))
        await gate.reached()
        pull.cancel()
        await asyncio.sleep(0)
        assert not pull.done()
        puller.stop("fetch")
        gate.release()
        with pytest.raises(asyncio.CancelledError):
            await pull
        landed = rig.dst.snapshot()
        await puller.aclose()
        assert rig.dst.same_as(landed)


@pytest.mark.parametrize("bad", [40, 10**6, NULL_BLOCK])
async def test_source_ids_that_the_peer_does_not_have_are_refused(
    connect: Connect, bad: int
) -> None:
    async with connect(SHAPE) as (rig, harness):
        harness.admit([[*range(7), bad]])
        piece = rig.piece(0, [*range(7), bad], range(8))
        with pytest.raises(TransportError) as caught:
            await harness.puller().pull(rig.job(piece))
        assert caught.value.code == Code.BAD_MESSAGE
        assert rig.dst.untouched()


async def test_destination_ids_outside_our_memory_are_refused(connect: Connect) -> None:
    async with connect(SHAPE) as (rig, harness):
        all_blocks(harness, rig)
        with pytest.raises(TransportError) as caught:
            await harness.puller().pull(rig.job(rig.piece(0, [1, 2], [5, 48])))
        assert caught.value.code == Code.BAD_MEMORY
        assert "48" in caught.value.detail
        assert rig.dst.untouched()


async def test_layers_and_groups_that_do_not_exist_are_refused(connect: Connect) -> None:
    async with connect(SHAPE) as (rig, harness):
        all_blocks(harness, rig)
        puller = harness.puller()
        for piece in (rig.piece(1, [1], [1]), rig.piece(0, [1], [1], (2, 3))):
            with pytest.raises(TransportError) as caught:
                await puller.pull(rig.job(piece))
            assert caught.value.code == Code.BAD_MEMORY
        assert rig.dst.untouched()


async def test_contradicting_lengths_are_refused(connect: Connect) -> None:
    async with connect(SHAPE) as (rig, harness):
        all_blocks(harness, rig)
        puller = harness.puller()
        short = rig.piece(0, [1, 2], [1])
        with pytest.raises(TransportError) as caught:
            await puller.pull(rig.job(short))
        assert caught.value.code == Code.INTERNAL
        job = rig.job(rig.piece(0, [1], [1]))
        lying = type(job)(**{**{f: getattr(job, f) for f in job.__slots__}, "nbytes": 7})
        with pytest.raises(TransportError) as caught:
            await puller.pull(lying)
        assert caught.value.code == Code.INTERNAL
        assert rig.dst.untouched()


async def test_a_fence_slot_outside_the_table_is_refused(connect: Connect) -> None:
    async with connect(SHAPE) as (rig, harness):
        if harness.name.startswith(("tcp", "nccl")):
            pytest.skip("the producer looks up its own slot")
        await refused(Code.BAD_MESSAGE, harness, rig, slot=SLOTS)
        assert rig.dst.untouched()


async def test_one_gated_attachment_does_not_hold_up_another(connect: Connect) -> None:
    async with connect(SHAPE) as (rig, harness):
        if harness.name == "nccl_runs":
            pytest.skip("what is sent over one communicator is one queue")
        all_blocks(harness, rig)
        harness.small_calls(BLOCK)
        slow, quick = harness.puller(), harness.puller()
        gate = harness.gate(2)
        pull = asyncio.ensure_future(slow.pull(rig.job(rig.piece(0, range(9), range(9)))))
        await gate.reached()
        for i in range(20, 26):
            piece = rig.piece(0, [i], [i], indices=[i])
            assert await quick.pull(rig.job(piece, fetch_id="quick")) == BLOCK
        assert not pull.done()
        gate.release()
        assert await pull == 9 * BLOCK
