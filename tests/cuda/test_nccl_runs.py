"""Chunks that lie in one piece are sent from the engine's blocks, and judged once they are gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from kvd.core import events
from kvd.protocol import peer as wire
from kvd.protocol.codes import Code
from kvd.transport.base import TransportError
from kvd.transport.nccl_link import Link
from tests.contract.rig import SLOT, TICKET, UNTOUCHED, WORD, Rig, Shape
from tests.cuda.harness import ADDR, NcclHarness, NcclRunsHarness
from tests.cuda.script import Fail, Hang
from tests.cuda.sides import CudaSide
from tests.plugins.waiting import wait_for_async

LAYER = 512
SHAPE = Shape(tuple((0, (LAYER,)) for _ in range(4)))
BLOCK = 4 * LAYER
RUN = 4
"""Blocks of a layer that are worth to be sent from where they lie."""
WITHIN_S = 10.0


class Bench(NcclRunsHarness):
    options = replace(
        NcclHarness.options,
        nccl_chunk_bytes=2 * BLOCK,
        nccl_direct_bytes=RUN * LAYER,
        gpu_hang_s=1.0,
    )
    hangs: list[Hang]

    def set_options(self, **changed: Any) -> None:
        """For communicators that are made later."""
        for one in (self.daemons.consumer, self.daemons.producer):
            one._options = replace(one._options, **changed)

    def gathered(self) -> int:
        """Copies that the producer has made."""
        return self.daemons.producer_driver.script.counts["cuMemcpyBatchAsync"]

    def late(self) -> int:
        """Chunks that were said to be judged when they are gone."""
        return sum(isinstance(one, wire.NcclReady) and one.late for one in self.daemons.said)

    async def link(self) -> Link:
        return await self.daemons.consumer.link(ADDR)


@pytest.fixture(params=["layers"])
async def bench(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Rig, Bench]]:
    rig = Rig.make(SHAPE, (40, 48), (request.param, request.param), CudaSide)
    harness = Bench(rig, monkeypatch)
    harness.admit([range(40)])
    harness.hangs = []
    yield rig, harness
    for hang in harness.hangs:
        hang.release()
    daemons = harness.daemons
    daemons.producer_nccl.gate = None
    for script in (daemons.producer_nccl.script, daemons.producer_driver.script):
        script.clear()
    for puller in harness._pullers:
        await puller.aclose()
    await daemons.aclose()
    await wait_for_async(lambda: daemons.nothing_left() == {}, what="all is given back")
    rig.close()


async def fails(pull: asyncio.Future[int]) -> TransportError:
    with pytest.raises(TransportError) as caught:
        await asyncio.wait_for(pull, WITHIN_S)
    return caught.value


def start(rig: Rig, harness: Bench, layers: int = 4, **job: Any) -> asyncio.Future[int]:
    """A pull of eight blocks, which are a chunk for each layer."""
    piece = rig.piece(0, range(8), range(8), (0, layers))
    return asyncio.ensure_future(harness.puller().pull(rig.job(piece, **job)))


# --- which way ------------------------------------------------------------------------------


@pytest.mark.parametrize("bench", ["layers", "segments", "interleaved"], indirect=True)
async def test_a_run_is_sent_without_a_copy(bench: tuple[Rig, Bench]) -> None:
    """Layer by layer, or all layers of a block at once where they lie together."""
    rig, harness = bench
    piece = rig.piece(0, range(4, 28), [*range(30, 48), *range(6)], indices=range(4, 28))
    assert await harness.puller().pull(rig.job(piece)) == 24 * BLOCK
    assert rig.wrong_blocks(piece) == []
    assert harness.gathered() == 0
    assert harness.late() == 12


@pytest.mark.parametrize("bench", ["gaps", "interleaved"], indirect=True)
async def test_what_lies_apart_is_gathered(bench: tuple[Rig, Bench]) -> None:
    rig, harness = bench
    src = range(27, 3, -1)
    piece = rig.piece(0, src, range(24), indices=src)
    await harness.puller().pull(rig.job(piece))
    assert rig.wrong_blocks(piece) == []
    assert harness.gathered() == 12
    assert harness.late() == 0


async def test_both_ways_in_one_transfer(bench: tuple[Rig, Bench]) -> None:
    """Runs, runs that are too short, scattered blocks; in one job, and in several at once."""
    rig, harness = bench
    src = [range(9), [20, 22, 21], range(30, 30 + RUN), range(12, 11 + RUN), [39]]
    dst = iter(range(48))
    place = iter(range(40))
    pieces = [
        rig.piece(0, ids, [next(dst) for _ in ids], indices=[next(place) for _ in ids])
        for ids in src
    ]
    harness.admit([[block for ids in src for block in ids]])
    puller = harness.puller()
    await asyncio.gather(
        puller.pull(rig.job(*pieces[:3], fetch_id="a")),
        puller.pull(rig.job(pieces[3], fetch_id="b")),
        puller.pull(rig.job(pieces[4], fetch_id="c")),
    )
    assert rig.wrong_blocks(*pieces) == []
    # Nine blocks are a chunk of eight and one that is too short, for each layer.
    assert harness.late() == 4 + 4
    assert harness.gathered() == 4 + 2 + 2 + 1
    assert harness.daemons.count(wire.NcclGo) == harness.late() + harness.gathered()


@pytest.mark.parametrize("side", ["consumer", "producer"])
async def test_either_side_can_do_without(bench: tuple[Rig, Bench], side: str) -> None:
    """As a consumer of an older version does, which knows no second verdict."""
    rig, harness = bench
    one = getattr(harness.daemons, side)
    one._options = replace(one._options, nccl_direct_bytes=0)
    piece = rig.piece(0, range(16), range(16))
    await harness.puller().pull(rig.job(piece))
    assert rig.wrong_blocks(piece) == []
    assert harness.late() == 0
    assert harness.gathered() > 0


# --- the verdict ----------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [1, 4])
async def test_blocks_reused_in_mid_send_touch_nothing(
    bench: tuple[Rig, Bench], layers: int
) -> None:
    """The fence flips and the blocks are written over while half of a run has gone."""
    rig, harness = bench
    gate = harness.gate(0)
    pull = start(rig, harness, layers=layers)
    await gate.reached()
    rig.src.fence[SLOT] = WORD + 1
    before = rig.src.snapshot()
    rig.src.rewrite([UNTOUCHED + 1] * len(before))
    gate.release()
    error = await fails(pull)
    assert error.code == Code.FENCED
    assert rig.dst.untouched()
    rig.src.rewrite(before)
    rig.src.fence[SLOT] = WORD
    await works(rig, harness)
    assert harness.daemons.count(wire.NcclOpen) == 1, "the communicator goes on"


async def test_nothing_lands_before_the_verdict(bench: tuple[Rig, Bench]) -> None:
    """The bytes are all there, and right; but nobody has said so."""
    rig, harness = bench
    held = hold_verdicts(harness)
    pull = start(rig, harness)
    await wait_for_async(lambda: len(held) == harness.options.nccl_ring, what="verdicts")
    await received(harness, len(held))
    assert rig.dst.untouched()
    release_verdicts(harness, held)
    assert await asyncio.wait_for(pull, WITHIN_S) == 8 * BLOCK
    assert rig.wrong_blocks(rig.piece(0, range(8), range(8))) == []


async def test_a_verdict_that_never_comes_is_a_failure(bench: tuple[Rig, Bench]) -> None:
    rig, harness = bench
    harness.set_options(data_timeout_s=0.3)
    held = hold_verdicts(harness)
    error = await fails(start(rig, harness, layers=2))
    assert error.code == Code.DEADLINE
    assert "verdict" in error.detail
    assert held
    assert rig.dst.untouched()
    release_verdicts(harness, held)
    assert rig.dst.untouched()
    await works(rig, harness)


async def test_stopped_before_the_verdict(bench: tuple[Rig, Bench]) -> None:
    """The buffers are free again, and verdicts that nobody waits for any more do no harm."""
    rig, harness = bench
    held = hold_verdicts(harness)
    puller = harness.puller()
    piece = rig.piece(0, range(8), range(8))
    pull = asyncio.ensure_future(puller.pull(rig.job(piece)))
    await wait_for_async(lambda: len(held) == harness.options.nccl_ring, what="verdicts")
    await received(harness, len(held))
    puller.stop("fetch")
    assert (await fails(pull)).code == Code.CANCELLED
    link = await harness.link()
    assert link.slots.qsize() == harness.options.nccl_ring
    assert link._verdicts == {}
    release_verdicts(harness, held)
    assert rig.dst.untouched()
    await works(rig, harness)
    assert harness.daemons.count(wire.NcclOpen) == 1


async def test_taken_back_before_the_send_is_asked_for(bench: tuple[Rig, Bench]) -> None:
    """Bytes go all the same, since they are waited for, but not those of the blocks."""
    rig, harness = bench
    hang = Hang()
    harness.hangs.append(hang)
    harness.daemons.consumer_nccl.script.add("recv", hang)
    pull = start(rig, harness, layers=2)
    assert await asyncio.to_thread(hang.reached.wait, WITHIN_S)
    harness.daemons.producer.close_ticket(TICKET)
    posted: list[int] = []
    serving = next(iter(harness.daemons.producer._serving.values()))
    send, slots = serving.comm.send, tuple(serving.comm.slots)

    def noted(address: int, nbytes: int) -> asyncio.Future[None]:
        posted.append(address)
        return send(address, nbytes)

    serving.comm.send = noted  # type: ignore[method-assign]
    hang.release()
    assert (await fails(pull)).code == Code.RELEASED
    assert posted
    assert set(posted) <= set(slots)
    assert rig.dst.untouched()
    harness.admit([range(40)])
    await works(rig, harness)


# --- the engine's memory --------------------------------------------------------------------


async def test_memory_stays_mapped_while_a_send_reads_it(bench: tuple[Rig, Bench]) -> None:
    """A peer that does not go on cannot hold it for long: the communicator is ended first."""
    rig, harness = bench
    unmapped_under = watch_unmapping(harness)
    gate = harness.gate(0)
    pull = start(rig, harness)
    await gate.reached()
    assert harness.owner._pins > 0
    harness.owner.close_when_unpinned()
    assert not harness.owner.closed
    error = await fails(pull)
    assert error.code == Code.ENGINE_GONE
    assert await harness.owner.wait_closed(WITHIN_S)
    assert unmapped_under == [0], "unmapped while a send was on its stream"
    assert rig.dst.untouched()


async def test_memory_is_given_back_when_the_send_was(bench: tuple[Rig, Bench]) -> None:
    rig, harness = bench
    gate = harness.gate(0)
    pull = start(rig, harness)
    await gate.reached()
    harness.owner.close_when_unpinned()
    gate.release()
    assert (await fails(pull)).code == Code.ENGINE_GONE
    assert await harness.owner.wait_closed(WITHIN_S)
    assert rig.dst.untouched()
    assert (await harness.link()).failure is None


async def test_a_consumer_that_never_goes_on_holds_no_memory(bench: tuple[Rig, Bench]) -> None:
    """Chunks that are ready are not pinned before they go."""
    rig, harness = bench
    hang = Hang()
    harness.hangs.append(hang)
    harness.daemons.consumer_nccl.script.add("recv", hang)
    pull = start(rig, harness)
    assert await asyncio.to_thread(hang.reached.wait, WITHIN_S)
    await wait_for_async(lambda: harness.late() == harness.options.nccl_ring, what="all ready")
    harness.owner.close_when_unpinned()
    assert await harness.owner.wait_closed(WITHIN_S)
    hang.release()
    assert (await fails(pull)).code == Code.ENGINE_GONE


async def test_a_send_that_nothing_ends_keeps_its_memory(bench: tuple[Rig, Bench]) -> None:
    """NCCL's call hangs on after the communicator was aborted: nobody knows whether it still
    reads, so that the daemon must go before the memory does."""
    rig, harness = bench
    harness.set_options(data_timeout_s=0.3, nccl_abort_timeout_s=0.3)
    hang = Hang()
    harness.hangs.append(hang)
    harness.daemons.producer_nccl.script.add("send", hang)
    assert (await fails(start(rig, harness))).code == Code.DEADLINE
    harness.owner.close_when_unpinned()
    gpu = harness.daemons.producer_gpu
    await wait_for_async(lambda: gpu.waiting.longest() > 0, what="the GPU is said to hang")
    assert harness.daemons.producer_nccl.script.counts["comm_abort"] == 1
    assert not harness.owner.closed
    hang.release()
    assert await harness.owner.wait_closed(WITHIN_S)
    await wait_for_async(lambda: gpu.waiting.longest() == 0, what="nothing hangs")


async def test_an_error_of_a_send_gives_the_memory_back(bench: tuple[Rig, Bench]) -> None:
    rig, harness = bench
    harness.daemons.producer_nccl.script.add("send", Fail("InternalError"))
    error = await fails(start(rig, harness))
    assert error.code == Code.TRANSPORT_ERROR
    assert rig.dst.untouched()
    await works(rig, harness)
    await wait_for_async(lambda: harness.owner._pins == 0, what="nothing is pinned")


# --- helpers --------------------------------------------------------------------------------


async def works(rig: Rig, harness: Bench) -> None:
    """A later transfer arrives whole, from where it lies."""
    before = harness.late()
    rig.dst.wipe()
    deadline = asyncio.get_running_loop().time() + WITHIN_S
    while True:
        try:
            await start(rig, harness, fetch_id="later")
            break
        except TransportError:
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.02)  # the other side may still be ending what has failed
    assert rig.wrong_blocks(rig.piece(0, range(8), range(8))) == []
    assert harness.late() > before


async def received(harness: Bench, count: int) -> None:
    """Until the consumer's GPU has so many chunks in its staging buffers."""
    got = harness.daemons.consumer_nccl.transferred
    await wait_for_async(lambda: len(got) >= count, what="the bytes")


def hold_verdicts(harness: Bench) -> list[wire.NcclReady]:
    """Keeps back what is said of chunks after they were sent."""
    daemons, held, late = harness.daemons, [], set()
    hear = daemons.consumer.takes

    def takes(event: Any) -> bool:
        said = getattr(event, "message", None)
        if isinstance(said, wire.NcclReady):
            if said.seq in late:
                held.append(said)
                return True
            if said.late:
                late.add(said.seq)
        return hear(event)

    daemons.consumer.takes = takes  # type: ignore[method-assign]
    return held


def release_verdicts(harness: Bench, held: list[wire.NcclReady]) -> None:
    """Those that were kept back, and all others from now on, arrive."""
    del harness.daemons.consumer.takes  # the class's own is there again
    for said in held:
        harness.daemons.consumer.takes(events.PeerMessage(ADDR, said))
    held.clear()


def watch_unmapping(harness: Bench) -> list[int]:
    """How much was on the producer's streams at the moment when the engine's memory went."""
    found: list[int] = []
    driver, unmap = harness.daemons.producer_driver, harness.owner._unmap_segments

    def noted() -> None:
        with driver._lock:
            found.append(sum(len(stream.ops) for stream in driver._streams.values()))
        unmap()

    harness.owner._unmap_segments = noted  # type: ignore[method-assign]
    return found
