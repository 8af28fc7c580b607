"""Faults of the driver under `cuda_ipc`: a typed failure, told when no byte can land any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvd.protocol.codes import Code
from kvd.transport import cuda_ipc
from kvd.transport.base import TransportError
from kvd.transport.gpu import GpuLost, GpuTransports
from kvd.transport.options import TransportOptions
from tests.contract.rig import SLOT, Rig, Shape
from tests.cuda.harness import CudaIpcHarness, StreamGate
from tests.cuda.script import Fail, Hang, Late
from tests.cuda.sides import CudaSide
from tests.plugins.waiting import wait_for_async

SHAPE = Shape(tuple((0, (512,)) for _ in range(4)))
BLOCK = 4 * 512


class Bench(CudaIpcHarness):
    timeout_s = 0.3


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Rig, Bench]]:
    rig = Rig.make(SHAPE, (40, 48), side=CudaSide)
    harness = Bench(rig, monkeypatch)
    yield rig, harness
    harness.driver.script.clear()
    await harness.aclose()
    rig.close()
    assert harness.driver.live["import"] == 0


async def works(rig: Rig, harness: Bench, block: int) -> None:
    """A later transfer, on an attachment of its own."""
    piece = rig.piece(0, [block], [block])
    assert await harness.puller().pull(rig.job(piece, fetch_id="later")) == BLOCK


async def test_an_error_at_the_stream(bench: tuple[Rig, Bench]) -> None:
    rig, harness = bench
    harness.driver.script.add("cuStreamCreate", Fail("CUDA_ERROR_OUT_OF_MEMORY"))
    with pytest.raises(TransportError) as caught:
        await harness.puller().pull(rig.job(rig.piece(0, [1], [1])))
    assert caught.value.code == Code.NO_SPACE
    await works(rig, harness, 3)


@pytest.mark.parametrize("call", ["cuEventCreate", "cuMemcpyBatchAsync"])
async def test_an_error_at_each_call_before_the_copy(bench: tuple[Rig, Bench], call: str) -> None:
    rig, harness = bench
    harness.driver.script.add(call, Fail("CUDA_ERROR_UNKNOWN"))
    with pytest.raises(TransportError, match=call) as caught:
        await harness.puller().pull(rig.job(rig.piece(0, [1], [1])))
    assert caught.value.code == Code.TRANSPORT_ERROR
    assert rig.dst.untouched()
    assert harness.broken == []
    await works(rig, harness, 3)


async def test_an_error_of_one_batch_is_told_after_the_others_have_landed(
    bench: tuple[Rig, Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, harness = bench
    monkeypatch.setattr(cuda_ipc, "BATCH_BYTES", BLOCK)
    gate = harness.gate(0)  # the first batch stands still on the GPU
    harness.driver.script.add("cuMemcpyBatchAsync", Fail("CUDA_ERROR_UNKNOWN"), after=1)
    pull = asyncio.ensure_future(harness.puller().pull(rig.job(rig.piece(0, range(8), range(8)))))
    await gate.reached()
    await wait_for_async(
        lambda: harness.driver.script.counts["cuMemcpyBatchAsync"] == 2, what="the second batch"
    )
    assert not pull.done()
    gate.release()
    with pytest.raises(TransportError):
        await pull
    landed = rig.dst.snapshot()
    await works(rig, harness, 30)
    assert (rig.dst.segments[0][: 30 * 512] == landed[0][: 30 * 512]).all()


@pytest.mark.parametrize("call", ["cuEventRecord", "cuEventQuery"])
async def test_an_error_of_the_stream_itself_means_that_the_gpu_is_lost(
    bench: tuple[Rig, Bench], call: str
) -> None:
    rig, harness = bench
    harness.driver.script.add(call, Fail("CUDA_ERROR_ILLEGAL_ADDRESS"))
    with pytest.raises(TransportError, match=f"{call}: CUDA_ERROR_ILLEGAL_ADDRESS"):
        await harness.puller().pull(rig.job(rig.piece(0, [1], [1])))
    assert [error.call for error in harness.broken] == [call]


async def test_late_completion_is_a_failure_told_when_it_is_complete(
    bench: tuple[Rig, Bench],
) -> None:
    rig, harness = bench
    gate = harness.gate(0)
    puller = harness.puller()
    pull = asyncio.ensure_future(puller.pull(rig.job(rig.piece(0, range(4), range(4)))))
    await gate.reached()
    await asyncio.wait({pull}, timeout=3 * harness.timeout_s)
    assert not pull.done()  # its bytes may still land, so the blocks are still its
    assert rig.dst.untouched()
    gate.release()
    with pytest.raises(TransportError, match="a copy on the GPU took") as caught:
        await pull
    assert caught.value.code == Code.DEADLINE
    assert rig.wrong_blocks(rig.piece(0, range(4), range(4))) == []
    assert await puller.pull(rig.job(rig.piece(0, [9], [9]))) == BLOCK


async def test_completion_is_told_only_after_the_event(bench: tuple[Rig, Bench]) -> None:
    rig, harness = bench
    puller = harness.puller()
    await puller.pull(rig.job(rig.piece(0, [1], [1])))
    before = harness.driver.script.counts["cuEventQuery"]
    harness.driver.script.add("cuEventQuery", Late(5))
    assert await puller.pull(rig.job(rig.piece(0, [2], [2]))) == BLOCK
    assert harness.driver.script.counts["cuEventQuery"] - before > 5


async def test_the_fence_is_checked_after_the_event(bench: tuple[Rig, Bench]) -> None:
    rig, harness = bench
    gate = harness.gate(0)
    pull = asyncio.ensure_future(harness.puller().pull(rig.job(rig.piece(0, [1], [1]))))
    await gate.reached()
    rig.src.fence[SLOT] = 0  # the copy is on the GPU, and the owner takes its blocks back
    gate.release()
    with pytest.raises(TransportError) as caught:
        await pull
    assert caught.value.code == Code.FENCED


@pytest.mark.parametrize("call", ["cuMemcpyBatchAsync", "cuEventQuery", "cuStreamCreate"])
async def test_a_call_that_hangs_is_seen_from_outside_and_ends_the_daemon(call: str) -> None:
    from tests.cuda.fake_driver import FakeDriver
    from tests.cuda.sides import fake_gpu

    rig = Rig.make(SHAPE, (8, 8), side=CudaSide)
    assert isinstance(rig.src, CudaSide)
    assert isinstance(rig.dst, CudaSide)
    driver = FakeDriver()
    gpu = fake_gpu(driver)
    transports = GpuTransports(gpu, TransportOptions(gpu_hang_s=0.2, data_timeout_s=0.1))
    local, remote = rig.dst.open_on(gpu, writable=True), rig.src.open_on(gpu, writable=False)
    hang = Hang()
    driver.script.add(call, hang)

    async def move() -> int:
        puller = await transports.cuda_ipc(local, remote)
        moved = await puller.pull(rig.job(rig.piece(0, [1], [1])))
        await puller.aclose()
        return moved

    moving = asyncio.ensure_future(move())
    await wait_for_async(lambda: bool(transports.stuck()), what="the hang is noticed")
    with pytest.raises(GpuLost, match="has not ended for"):
        transports.check()
    assert not moving.done() or call == "cuStreamCreate"
    hang.release()
    await asyncio.wait({moving}, timeout=10)
    assert moving.done()
    assert transports.stuck() == ""
    await transports.aclose()
    rig.close()
    assert driver.live["context"] == 0
    moving.exception()


def test_gates_count_copies() -> None:
    gate = StreamGate(1)
    first, second, third = gate(), gate(), gate()
    assert (first(), second(), third()) == (True, False, True)
    gate.release()
    assert second()
