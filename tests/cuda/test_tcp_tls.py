"""tcp inside TLS where one engine's memory is on a GPU and the other's may not be, both ways."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvd.transport.base import TransportError
from kvd.transport.tcp_puller import TcpPuller
from tests.contract.rig import Rig, Shape, Side
from tests.cuda.harness import TcpCudaTlsHarness
from tests.cuda.sides import CudaSide, VmmSide

SHAPE = Shape((*((0, (4096, 4096)) for _ in range(4)), (1, (40_000,))))
BLOCKS = 24


@pytest.mark.parametrize("other", [CudaSide, VmmSide, Side], ids=["gpu", "vmm", "host"])
@pytest.mark.parametrize("style", ["layers", "interleaved"])
async def test_bytes_move_both_ways(
    other: type[Side], style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = CudaSide(SHAPE, BLOCKS, style), other(SHAPE, BLOCKS, style)
    try:
        for src, dst in (ends, ends[::-1]):
            src.fill()
            dst.wipe()
            await move(Rig(src, dst), monkeypatch)
    finally:
        for end in ends:
            end.close()


async def move(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some blocks of each group arrive, and nothing else changes."""
    harness = TcpCudaTlsHarness(rig, monkeypatch)
    try:
        harness.admit([range(BLOCKS), range(BLOCKS)])
        pieces = [
            rig.piece(0, range(3, 20), range(2, 19), indices=range(3, 20)),
            rig.piece(1, [9, 4, 23], [0, 20, 21], indices=[9, 4, 23]),
        ]
        job = rig.job(*pieces)
        await refuses_plain(harness)
        assert rig.dst.untouched()
        assert await harness.puller().pull(job) == job.nbytes
        assert rig.wrong_blocks(*pieces) == []
        assert harness.server.statistics()["served_bytes"] == job.nbytes
    finally:
        await harness.aclose()


async def refuses_plain(harness: TcpCudaTlsHarness) -> None:
    """The server is one with TLS: without, nobody gets a byte."""
    options = replace(harness.options, tls=None)
    plain = TcpPuller(harness._local, harness.host, harness.server.port, BLOCKS, options)
    try:
        with pytest.raises(TransportError, match="asks for TLS"):
            await plain.pull(harness._rig.job(harness._rig.piece(0, [1], [1])))
    finally:
        await plain.aclose()
