"""Faults of NCCL, one by one: a typed failure within its deadline, and later transfers work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvd.core import events
from kvd.protocol import peer as wire
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr
from kvd.transport.base import TransportError
from tests.contract.rig import Rig, Shape
from tests.cuda.fake_nccl import FakeNccl
from tests.cuda.harness import ADDR, NcclHarness
from tests.cuda.script import Fail, Hang, Late
from tests.cuda.sides import CudaSide
from tests.plugins.waiting import wait_for_async

SHAPE = Shape(tuple((0, (512,)) for _ in range(4)))
BLOCK = 4 * 512
OTHER = PeerAddr("127.0.0.2", 2)
LIMIT_S = 0.3
WITHIN_S = 10.0
"""For a failure that has a deadline of LIMIT_S or a few of them, on a machine that is busy."""


class Bench(NcclHarness):
    options = replace(
        NcclHarness.options,
        data_timeout_s=LIMIT_S,
        nccl_init_timeout_s=LIMIT_S,
        nccl_abort_timeout_s=LIMIT_S,
        gpu_hang_s=1.0,
        nccl_chunk_bytes=2 * BLOCK,
    )
    hangs: list[Hang]


@pytest.fixture
async def bench(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Rig, Bench]]:
    rig = Rig.make(SHAPE, (40, 48), side=CudaSide)
    harness = Bench(rig, monkeypatch)
    harness.admit([range(40)])
    harness.hangs = []
    yield rig, harness
    for hang in harness.hangs:
        hang.release()
    for nccl in (harness.daemons.consumer_nccl, harness.daemons.producer_nccl):
        nccl.script.clear()
    for driver in (harness.daemons.consumer_driver, harness.daemons.producer_driver):
        driver.script.clear()
        driver.gate = None
    for puller in harness._pullers:
        await puller.aclose()
    await harness.daemons.aclose()
    # What was left behind in a call gives its things back once the call returns.
    await wait_for_async(lambda: harness.daemons.nothing_left() == {}, what="all is given back")
    rig.close()


def who(harness: Bench, side: str) -> FakeNccl:
    daemons = harness.daemons
    return daemons.consumer_nccl if side == "consumer" else daemons.producer_nccl


async def fails(rig: Rig, harness: Bench) -> TransportError:
    """The pull of eight blocks fails in time, and nothing lands after it was told."""
    began = time.monotonic()
    with pytest.raises(TransportError) as caught:
        await harness.puller().pull(rig.job(rig.piece(0, range(8), range(8))))
    assert time.monotonic() - began < WITHIN_S
    return caught.value


async def works(rig: Rig, harness: Bench) -> None:
    """A later transfer arrives whole, and nothing else does."""
    piece = rig.piece(0, [20, 21, 22], [30, 31, 32], indices=[20, 21, 22])
    rig.dst.wipe()
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            await harness.puller().pull(rig.job(piece, fetch_id="later"))
            break
        except TransportError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.02)  # the other side may still be ending what has failed
    assert rig.wrong_blocks(piece) == []


SIDES = pytest.mark.parametrize("side", ["consumer", "producer"])


# --- making the communicator ----------------------------------------------------------------


@SIDES
async def test_hang_in_init(bench: tuple[Rig, Bench], side: str) -> None:
    """The call itself does not return."""
    rig, harness = bench
    hang = Hang()
    harness.hangs.append(hang)
    who(harness, side).script.add("comm_init_rank_scalable", hang)
    error = await fails(rig, harness)
    assert error.code == Code.DEADLINE
    assert rig.dst.untouched()
    transport = harness.daemons.consumer if side == "consumer" else harness.daemons.producer
    await wait_for_async(
        lambda: transport.statistics()["abandoned"] == 1, what="the thread is left behind"
    )
    await works(rig, harness)


@SIDES
async def test_init_that_never_becomes_ready(bench: tuple[Rig, Bench], side: str) -> None:
    rig, harness = bench
    who(harness, side).script.add("comm_get_async_error", Late(10**9))
    error = await fails(rig, harness)
    assert error.code == Code.DEADLINE
    assert rig.dst.untouched()
    await works(rig, harness)


@SIDES
@pytest.mark.parametrize("call", ["comm_init_rank_scalable", "comm_get_async_error"])
async def test_error_in_init(bench: tuple[Rig, Bench], side: str, call: str) -> None:
    rig, harness = bench
    who(harness, side).script.add(call, Fail("SystemError"))
    error = await fails(rig, harness)
    assert error.code == Code.TRANSPORT_ERROR
    assert "SystemError" in error.detail
    await works(rig, harness)


async def test_error_at_the_unique_id(bench: tuple[Rig, Bench]) -> None:
    rig, harness = bench
    who(harness, "consumer").script.add("get_unique_id", Fail("SystemError"))
    assert (await fails(rig, harness)).code == Code.TRANSPORT_ERROR
    await works(rig, harness)


@SIDES
@pytest.mark.parametrize("call", ["cuMemAlloc", "cuStreamCreate"])
async def test_no_room_for_staging(bench: tuple[Rig, Bench], side: str, call: str) -> None:
    rig, harness = bench
    daemons = harness.daemons
    driver = daemons.consumer_driver if side == "consumer" else daemons.producer_driver
    driver.script.add(call, Fail("CUDA_ERROR_OUT_OF_MEMORY"), after=1)
    assert (await fails(rig, harness)).code == Code.NO_SPACE
    await works(rig, harness)


# --- moving ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("side", "call"), [("consumer", "recv"), ("producer", "send")])
async def test_hang_in_send_and_receive(bench: tuple[Rig, Bench], side: str, call: str) -> None:
    rig, harness = bench
    hang = Hang()
    harness.hangs.append(hang)
    who(harness, side).script.add(call, hang)
    error = await fails(rig, harness)
    assert error.code == Code.DEADLINE
    landed = rig.dst.snapshot()
    await wait_for_async(
        lambda: who(harness, side).script.counts["comm_abort"] == 1, what="an abort"
    )
    hang.release()
    assert rig.dst.same_as(landed)
    await works(rig, harness)


@pytest.mark.parametrize(("side", "call"), [("consumer", "recv"), ("producer", "send")])
async def test_error_in_send_and_receive(bench: tuple[Rig, Bench], side: str, call: str) -> None:
    rig, harness = bench
    who(harness, side).script.add(call, Fail("InternalError"), after=1)
    error = await fails(rig, harness)
    assert error.code == Code.TRANSPORT_ERROR
    assert "InternalError" in error.detail
    await works(rig, harness)


@SIDES
async def test_error_that_nccl_tells_later(bench: tuple[Rig, Bench], side: str) -> None:
    """Of an operation that was taken, while it is waited for."""
    rig, harness = bench
    await harness.puller().pull(rig.job(rig.piece(0, [0], [0])))
    rig.dst.wipe()
    gate = harness.gate(0)
    pull = asyncio.ensure_future(harness.puller().pull(rig.job(rig.piece(0, range(4), range(4)))))
    await gate.reached()
    # So that there is something to wait for, on either side.
    who(harness, "producer").script.add("send", Late(10**9))
    who(harness, side).script.add("comm_get_async_error", Fail("RemoteError"))
    gate.release()
    with pytest.raises(TransportError, match=r"RemoteError|took more"):
        await pull
    await works(rig, harness)


async def test_late_completion_of_a_receive(bench: tuple[Rig, Bench]) -> None:
    """The bytes come after the deadline: into staging, never into blocks."""
    rig, harness = bench
    await harness.puller().pull(rig.job(rig.piece(0, [0], [0])))
    rig.dst.wipe()
    harness.daemons.consumer_driver.script.add("cuEventQuery", Late(10**9))
    with pytest.raises(TransportError) as caught:
        await harness.puller().pull(rig.job(rig.piece(0, [1, 2], [1, 2], indices=[1, 2])))
    assert caught.value.code == Code.DEADLINE
    assert rig.dst.untouched()
    event = next(one for one in harness.daemons.consumer_driver._events.values() if one.not_yet)
    event.not_yet = 0
    await works(rig, harness)


async def test_stopped_while_bytes_are_under_way(bench: tuple[Rig, Bench]) -> None:
    """They still come, into staging; no block is touched, and the communicator goes on."""
    rig, harness = bench
    for one in (harness.daemons.consumer, harness.daemons.producer):
        one._options = replace(one._options, data_timeout_s=WITHIN_S)
    puller = harness.puller()
    await puller.pull(rig.job(rig.piece(0, [0], [0])))
    rig.dst.wipe()
    hang = Hang()
    harness.hangs.append(hang)
    harness.daemons.producer_nccl.script.add("send", hang)
    pull = asyncio.ensure_future(puller.pull(rig.job(rig.piece(0, [1], [1], indices=[1]))))
    assert await asyncio.to_thread(hang.reached.wait, WITHIN_S)
    puller.stop("fetch")
    with pytest.raises(TransportError) as caught:
        await pull
    assert caught.value.code == Code.CANCELLED
    assert rig.dst.untouched()
    hang.release()
    link = await harness.daemons.consumer.link(ADDR)
    await wait_for_async(lambda: link.late_bytes == BLOCK, what="the late bytes")
    assert puller.statistics()["late_bytes"] == BLOCK
    assert rig.dst.untouched()
    await works(rig, harness)
    assert harness.daemons.count(wire.NcclOpen) == 1


async def test_late_gathering_is_a_failure(bench: tuple[Rig, Bench]) -> None:
    rig, harness = bench
    gate = harness.gate(0)
    error = await fails(rig, harness)
    assert error.code == Code.DEADLINE
    gate.release()
    await works(rig, harness)


@SIDES
async def test_error_of_a_local_copy(bench: tuple[Rig, Bench], side: str) -> None:
    rig, harness = bench
    daemons = harness.daemons
    driver = daemons.consumer_driver if side == "consumer" else daemons.producer_driver
    driver.script.add("cuMemcpyBatchAsync", Fail("CUDA_ERROR_UNKNOWN"))
    error = await fails(rig, harness)
    assert error.code == Code.TRANSPORT_ERROR
    await works(rig, harness)


async def test_sends_are_posted_only_after_the_receive(bench: tuple[Rig, Bench]) -> None:
    rig, harness = bench
    hang = Hang()
    harness.hangs.append(hang)
    harness.daemons.consumer_nccl.script.add("recv", hang)
    pull = asyncio.ensure_future(harness.puller().pull(rig.job(rig.piece(0, [1], [1]))))
    assert await asyncio.to_thread(hang.reached.wait, WITHIN_S)
    assert harness.daemons.count(wire.NcclReady) == 1
    assert harness.daemons.count(wire.NcclGo) == 0
    assert harness.daemons.producer_nccl.script.counts["send"] == 0
    hang.release()
    await asyncio.wait({pull}, timeout=WITHIN_S)
    assert pull.done()
    pull.exception()


# --- the peer goes --------------------------------------------------------------------------


async def test_peer_gone_in_mid_transfer(bench: tuple[Rig, Bench]) -> None:
    """Its daemon dies without a word; the link between the daemons breaks."""
    rig, harness = bench
    await harness.puller().pull(rig.job(rig.piece(0, [0], [0])))
    rig.dst.wipe()
    gate = harness.gate(0)
    pull = asyncio.ensure_future(harness.puller().pull(rig.job(rig.piece(0, range(8), range(8)))))
    await gate.reached()
    harness.daemons.cut = True
    harness.daemons.consumer.takes(events.PeerDown(ADDR, str(Code.PEER_LOST), "it died"))
    with pytest.raises(TransportError, match="it died") as caught:
        await pull
    assert caught.value.code == Code.PEER_LOST
    harness.daemons.producer.takes(events.ClientLeft(1, str(Code.PEER_LOST)))
    gate.release()
    harness.daemons.cut = False
    await works(rig, harness)


async def test_peer_gone_that_nobody_tells_of(bench: tuple[Rig, Bench]) -> None:
    rig, harness = bench
    await harness.puller().pull(rig.job(rig.piece(0, [0], [0])))
    rig.dst.wipe()
    harness.daemons.cut = True
    error = await fails(rig, harness)
    assert error.code == Code.DEADLINE
    assert rig.dst.untouched()
    harness.daemons.producer.takes(events.ClientLeft(1, str(Code.PEER_LOST)))
    harness.daemons.cut = False
    await works(rig, harness)


# --- ending the communicator ----------------------------------------------------------------


async def test_a_failed_one_is_revoked_and_destroyed(bench: tuple[Rig, Bench]) -> None:
    rig, harness = bench
    harness.daemons.consumer_nccl.script.add("recv", Fail("InternalError"))
    await fails(rig, harness)
    await works(rig, harness)
    for nccl in (harness.daemons.consumer_nccl, harness.daemons.producer_nccl):
        await wait_for_async(
            lambda script=nccl.script: script.counts["comm_destroy"] >= 1,  # type: ignore[misc]
            what="the end",
        )
        assert nccl.script.counts["comm_abort"] == 0


@SIDES
async def test_one_that_cannot_be_revoked_is_aborted(bench: tuple[Rig, Bench], side: str) -> None:
    rig, harness = bench
    nccl = who(harness, side)
    nccl.script.add("comm_revoke", Fail("InvalidUsage"))
    harness.daemons.consumer_nccl.script.add("recv", Fail("InternalError"))
    await fails(rig, harness)
    await wait_for_async(lambda: nccl.script.counts["comm_abort"] == 1, what="an abort")
    await works(rig, harness)


@SIDES
async def test_hang_in_revoke(bench: tuple[Rig, Bench], side: str) -> None:
    rig, harness = bench
    nccl, hang = who(harness, side), Hang()
    harness.hangs.append(hang)
    nccl.script.add("comm_revoke", hang)
    harness.daemons.consumer_nccl.script.add("recv", Fail("InternalError"))
    await fails(rig, harness)
    await wait_for_async(lambda: nccl.script.counts["comm_abort"] == 1, what="an abort")
    await works(rig, harness)


@SIDES
@pytest.mark.parametrize("behaviour", ["hang", "error"])
async def test_hang_in_abort(bench: tuple[Rig, Bench], side: str, behaviour: str) -> None:
    """Nothing in this process helps any more: the daemon exits, for its supervisor."""
    rig, harness = bench
    nccl = who(harness, side)
    nccl.script.add("comm_revoke", Fail("InvalidUsage"))
    if behaviour == "hang":
        hang = Hang()
        harness.hangs.append(hang)
        nccl.script.add("comm_abort", hang)
    else:
        nccl.script.add("comm_abort", Fail("InternalError"))
    harness.daemons.consumer_nccl.script.add("recv", Fail("InternalError"))
    await fails(rig, harness)
    transport = harness.daemons.consumer if side == "consumer" else harness.daemons.producer
    await wait_for_async(lambda: bool(transport.stuck()), what="the daemon knows that it is lost")
    assert "can neither be ended nor aborted" in transport.stuck()
    for hang in harness.hangs:
        hang.release()
    await harness.daemons.bury()


async def test_hang_in_destroy(bench: tuple[Rig, Bench]) -> None:
    """Two threads that free one communicator would be worse: the daemon exits here too."""
    rig, harness = bench
    nccl, hang = harness.daemons.consumer_nccl, Hang()
    harness.hangs.append(hang)
    nccl.script.add("comm_destroy", hang)
    nccl.script.add("recv", Fail("InternalError"))
    await fails(rig, harness)
    consumer = harness.daemons.consumer
    await wait_for_async(lambda: bool(consumer.stuck()), what="the daemon knows that it is lost")
    assert nccl.script.counts["comm_abort"] == 0
    hang.release()
    await wait_for_async(lambda: nccl.live["comm"] == 0, what="the call returns")
    await harness.daemons.bury()


async def test_threads_left_behind_are_counted_and_end_the_daemon(
    bench: tuple[Rig, Bench],
) -> None:
    rig, harness = bench
    for _ in range(4):
        hang = Hang()
        harness.hangs.append(hang)
        harness.daemons.consumer_nccl.script.add("comm_init_rank_scalable", hang)
        await fails(rig, harness)
    await wait_for_async(
        lambda: "4 threads hang" in harness.daemons.consumer.stuck(), what="it gives up"
    )


# --- how many -------------------------------------------------------------------------------


async def test_one_communicator_for_all_attachments_of_a_peer(bench: tuple[Rig, Bench]) -> None:
    rig, harness = bench
    pieces = [rig.piece(0, [i], [i], indices=[i]) for i in range(12)]
    pullers = [harness.puller(), harness.puller()]
    await asyncio.gather(*(pullers[i % 2].pull(rig.job(piece)) for i, piece in enumerate(pieces)))
    assert rig.wrong_blocks(*pieces) == []
    assert harness.daemons.count(wire.NcclOpen) == 1
    assert harness.daemons.consumer.statistics()["comms"] == 1


async def test_the_least_recently_used_one_goes(bench: tuple[Rig, Bench]) -> None:
    rig, harness = bench
    consumer = harness.daemons.consumer
    consumer._options = replace(consumer._options, nccl_max_comms=1)
    await harness.puller().pull(rig.job(rig.piece(0, [0], [0])))
    first = await consumer.link(ADDR)
    with pytest.raises(TransportError):  # nobody answers at that address
        await consumer.link(OTHER)
    assert first.failure is not None
    assert first.comm.ended
    await works(rig, harness)


async def test_none_goes_that_is_in_use(bench: tuple[Rig, Bench]) -> None:
    rig, harness = bench
    consumer = harness.daemons.consumer
    consumer._options = replace(consumer._options, nccl_max_comms=1)
    await harness.puller().pull(rig.job(rig.piece(0, [0], [0])))
    link = await consumer.link(ADDR)
    link.users += 1
    with pytest.raises(TransportError, match="1 communicators are in use"):
        await consumer.link(OTHER)
    link.users -= 1
    assert link.failure is None


async def test_a_consumer_that_asks_for_too_much_is_cut_off(bench: tuple[Rig, Bench]) -> None:
    rig, harness = bench
    await harness.puller().pull(rig.job(rig.piece(0, [0], [0])))
    link = await harness.daemons.consumer.link(ADDR)
    piece = rig.piece(0, [1], [1])
    gate = harness.gate(0)
    for _ in range(harness.options.nccl_ring + 1):
        link.want(b"ticket-of-tests!", piece, (0, 4), piece.indices, BLOCK)
    await wait_for_async(lambda: link.failure is not None, what="it is cut off")
    assert link.failure is not None
    assert link.failure.code == Code.BAD_MESSAGE
    gate.release()
    await works(rig, harness)
