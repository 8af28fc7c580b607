"""The contract suite's fixtures: one run of each test for every transport."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from tests.contract.harness import HARNESSES as HOST_HARNESSES
from tests.contract.harness import Harness
from tests.contract.rig import Rig, Shape, Side
from tests.contract.tcp_rig import RawClient
from tests.cuda.harness import (
    CudaIpcHarness,
    NcclHarness,
    NcclRunsHarness,
    TcpCudaHarness,
    TcpCudaTlsHarness,
    VmmHarness,
)

HARNESSES: dict[str, Callable[[Rig, pytest.MonkeyPatch], Harness]] = {
    **HOST_HARNESSES,
    "cuda_ipc": CudaIpcHarness,
    "vmm": VmmHarness,
    "nccl": NcclHarness,
    "nccl_runs": NcclRunsHarness,
    "tcp_cuda": TcpCudaHarness,
    "tcp_cuda+tls": TcpCudaTlsHarness,
}

Connect = Callable[..., AbstractAsyncContextManager[tuple[Rig, Harness]]]


@pytest.fixture(params=list(HARNESSES))
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def connect(transport: str, monkeypatch: pytest.MonkeyPatch) -> Connect:
    """`async with connect(shape, (src blocks, dst blocks), styles) as (rig, harness)`."""

    @asynccontextmanager
    async def connected(
        shape: Shape,
        num_blocks: tuple[int, int] = (40, 48),
        styles: tuple[str, str] = ("layers", "layers"),
    ) -> AsyncIterator[tuple[Rig, Harness]]:
        side = getattr(HARNESSES[transport], "side", Side)
        rig = Rig.make(shape, num_blocks, styles, side)
        try:
            harness = HARNESSES[transport](rig, monkeypatch)
            try:
                yield rig, harness
            finally:
                await harness.aclose()
        finally:
            rig.close()

    return connected


@pytest.fixture
def clients() -> Iterator[Callable[..., RawClient]]:
    opened: list[RawClient] = []

    def connect(port: int, *, hello: bool = True) -> RawClient:
        opened.append(RawClient(port, hello=hello))
        return opened[-1]

    yield connect
    for client in opened:
        client.sock.close()
