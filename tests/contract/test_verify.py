"""`verify = crc`: bytes that are not their source's never count, whatever moved them."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace

import numpy as np
import pytest

from kvd.protocol.codes import Code
from kvd.transport import checksum
from kvd.transport.base import TransportError
from kvd.transport.tcp_puller import TcpPuller
from kvd.transport.tcp_wire import PREAMBLE_BYTES, BadFrame, check_preamble
from tests.contract.conftest import Connect
from tests.contract.harness import HARNESSES
from tests.contract.rig import SLOT, STYLES, Rig, Shape
from tests.contract.tcp_rig import OPTIONS

SHAPE = Shape((*((0, (512,)) for _ in range(4)), (1, (64, 96)), (0, (512,))))
FLAT = Shape(tuple((0, (512,)) for _ in range(4)))


@pytest.fixture(params=list(HARNESSES))
def transport(request: pytest.FixtureRequest) -> str:
    """Those of host memory: what is on a GPU has no checksums, and settings refuse them there."""
    name: str = request.param
    return name


DAMAGE = pytest.mark.parametrize("damage", ["flip", "swap"])


@pytest.mark.parametrize("style", STYLES)
async def test_bytes_that_arrived_whole_count(connect: Connect, style: str) -> None:
    async with connect(SHAPE, styles=(style, "layers")) as (rig, harness):
        harness.checked = True
        harness.admit([range(9), range(5)])
        pieces = [
            rig.piece(0, range(9), range(30, 39), (0, 5)),
            rig.piece(1, range(5), [7, 3, 9, 1, 0]),
        ]
        job = rig.job(*pieces)
        assert await harness.puller().pull(job) == job.nbytes
        assert rig.wrong_blocks(*pieces) == []


@DAMAGE
async def test_bytes_that_did_not_fail_the_job(connect: Connect, damage: str) -> None:
    async with connect(FLAT) as (rig, harness):
        harness.checked = True
        harness.admit([range(8)])
        getattr(harness, damage)()
        piece = rig.piece(0, range(8), range(20, 28))
        with pytest.raises(TransportError) as caught:
            await harness.puller().pull(rig.job(piece))
        assert caught.value.code == Code.INTEGRITY
        assert "checksum" in caught.value.detail
        assert rig.wrong_blocks(piece) != []


@DAMAGE
async def test_without_it_the_same_damage_goes_unseen(connect: Connect, damage: str) -> None:
    """Shows that the damage is done, and that nothing else would have found it."""
    async with connect(FLAT) as (rig, harness):
        harness.admit([range(8)])
        getattr(harness, damage)()
        piece = rig.piece(0, range(8), range(20, 28))
        assert await harness.puller().pull(rig.job(piece)) == rig.nbytes(piece)
        assert rig.wrong_blocks(piece) != []


async def test_a_source_that_was_taken_back_is_fenced_and_not_damaged(connect: Connect) -> None:
    async with connect(FLAT) as (rig, harness):
        harness.checked = True
        harness.admit([range(12)])
        harness.small_calls(512)
        puller = harness.puller()
        gate = harness.gate(6)
        pull = asyncio.ensure_future(puller.pull(rig.job(rig.piece(0, range(12), range(12)))))
        await gate.reached()
        rig.src.fence[SLOT] = 0
        for layer in range(4):
            rig.src.block(layer, 0, 0)[:] = 0xAB
        gate.release()
        with pytest.raises(TransportError) as caught:
            await pull
        assert caught.value.code == Code.FENCED


async def test_a_stop_ends_a_job_that_would_be_checked(connect: Connect) -> None:
    async with connect(FLAT) as (rig, harness):
        harness.checked = True
        harness.admit([range(30)])
        harness.small_calls(2048)
        puller = harness.puller()
        gate = harness.gate(5)
        pull = asyncio.ensure_future(puller.pull(rig.job(rig.piece(0, range(30), range(30)))))
        await gate.reached()
        puller.stop("fetch")
        gate.release()
        with pytest.raises(TransportError) as caught:
            await pull
        assert caught.value.code == Code.CANCELLED


@pytest.mark.parametrize("call_bytes", [1, 700, 2**20])
def test_checksums_do_not_depend_on_how_memory_is_cut(
    monkeypatch: pytest.MonkeyPatch, call_bytes: int
) -> None:
    monkeypatch.setattr(checksum, "CALL_BYTES", call_bytes)
    rig = Rig.make(SHAPE, (6, 6), ("interleaved", "segments"))
    try:
        src, dst = rig.src.open(writable=True), rig.dst.open(writable=True)
        for layer, (_, regions) in enumerate(SHAPE.layers):
            for region in range(len(regions)):
                rig.dst.block(layer, region, 4)[:] = rig.src.block(layer, region, 2)
        ids = np.array([2], np.uint32), np.array([4], np.uint32)
        with src.pinned(), dst.pinned():
            for group in (0, 1):
                a = checksum.blocks_crc(src, group, 0, 6, ids[0], lambda: True)
                assert a == checksum.blocks_crc(dst, group, 0, 6, ids[1], lambda: True)
                assert a not in (None, checksum.blocks_crc(src, group, 0, 6, ids[1], lambda: True))
    finally:
        rig.close()


async def test_a_producer_that_knows_no_checksums_is_named() -> None:
    rig = Rig.make(FLAT, (8, 8))
    listener = socket.create_server(("127.0.0.1", 0))
    options = replace(OPTIONS, data_timeout_s=2.0, connect_timeout_s=2.0, verify="crc")
    puller = TcpPuller(
        rig.dst.open(writable=True), "127.0.0.1", listener.getsockname()[1], 8, options
    )
    try:
        pull = asyncio.ensure_future(puller.pull(rig.job(rig.piece(0, [1], [2]))))
        sock, _ = await asyncio.to_thread(listener.accept)
        with sock:
            await asyncio.to_thread(sock.recv, PREAMBLE_BYTES)
            sock.sendall(b"KVDD\x01\x00\x00\x00")
            with pytest.raises(TransportError) as caught:
                await pull
        assert caught.value.code == Code.VERSION_MISMATCH
        assert "verify" in caught.value.detail
        assert rig.dst.untouched()
    finally:
        await puller.aclose()
        listener.close()
        rig.close()


def test_without_verify_an_older_producer_will_do() -> None:
    old = b"KVDD\x01\x00\x00\x00"
    check_preamble(old)
    with pytest.raises(BadFrame):
        check_preamble(old, checked=True)
