"""What the consumer's end of a communicator takes for received."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvd.errors import KvdError
from kvd.protocol.codes import Code
from kvd.transport.base import TransportError
from kvd.transport.nccl_comm import Comm
from kvd.transport.nccl_link import Link
from kvd.transport.options import TransportOptions
from tests.contract.rig import Rig, Shape
from tests.cuda.harness import ADDR, NcclHarness
from tests.cuda.sides import CudaSide
from tests.plugins.waiting import wait_for_async

SHAPE = Shape(tuple((0, (512,)) for _ in range(4)))


class EndsMeanwhile:
    """A communicator that is ended while it is asked how it is: its operations end with it."""

    def __init__(self, work: asyncio.Future[None]) -> None:
        self.work = work
        self.link: Link | None = None

    async def healthy(self) -> TransportError | None:
        assert self.link is not None
        self.link.fail(TransportError(Code.PEER_LOST, "the other side closed it"))
        self.work.set_result(None)
        return None

    async def end(self) -> None:
        pass


async def test_what_ends_with_the_communicator_was_not_received() -> None:
    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    comm = EndsMeanwhile(work)
    link = Link("c", ADDR, comm, TransportOptions(), lambda message: None)  # type: ignore[arg-type]
    comm.link = link
    with pytest.raises(TransportError, match="the other side closed it"):
        await link.wait("receiving", work, asyncio.Event())


@pytest.fixture
async def harness(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NcclHarness]:
    rig = Rig.make(SHAPE, (40, 48), side=CudaSide)
    harness = NcclHarness(rig, monkeypatch)
    harness.admit([range(40)])
    await harness.puller().pull(rig.job(rig.piece(0, [0], [0])))
    yield harness
    await harness.aclose()
    rig.close()


async def test_a_receive_that_nccl_gave_up_is_no_receive(harness: NcclHarness) -> None:
    """NCCL ends what it gives up; the stream tells it from what was done in nothing."""
    (link,) = harness.daemons.consumer._links.values()
    comm: Comm = link.comm
    posted = asyncio.Event()
    received = comm.recv(comm.slots[0], 64, posted.set)
    await posted.wait()
    ended = harness.daemons.consumer_nccl.transferred
    before = len(ended)
    await comm.end()
    await wait_for_async(lambda: len(ended) == before + 1, what="the stream passes the receive")
    with pytest.raises(KvdError):
        await received
