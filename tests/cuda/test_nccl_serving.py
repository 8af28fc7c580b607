"""The producer's end of a communicator, over one that only says what is asked of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.protocol import peer as wire
from kvd.protocol.codes import Code
from kvd.transport.base import TransportError
from kvd.transport.nccl_serving import Serving
from kvd.transport.options import TransportOptions

RING = 3


class Comm:
    slots = tuple(range(RING))

    def __init__(self) -> None:
        self.sending: list[asyncio.Future[None]] = []

    async def start(self, *_: object) -> None:
        pass

    async def end(self) -> None:
        pass

    def send(self, slot: int, nbytes: int) -> asyncio.Future[None]:
        self.sending.append(asyncio.get_running_loop().create_future())
        return self.sending[-1]


class Producer:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def gathered(*_: object) -> None:
            pass

        monkeypatch.setattr(Serving, "_gather", gathered)
        self.comm = Comm()
        self.said: list[Any] = []
        self.read: list[bytes] = []
        self.serving = Serving(
            wire.NcclOpen("comm", bytes(128), 1024, RING),
            self.comm,  # type: ignore[arg-type]
            TransportOptions(nccl_ring=RING, nccl_chunk_bytes=1024),
            ticket=lambda _: SimpleNamespace(),  # type: ignore[arg-type,return-value]
            send=self.said.append,
            on_read=self.read.append,
        )

    async def want(self, *seqs: int) -> list[int]:
        """Asks for these; the chunks that are ready by now."""
        for seq in seqs:
            self.serving.hear(wire.NcclWant("comm", seq, bytes(16), 0, 0, 1, b"\0\0\0\0", 64))
        await self.settled()
        return [one.seq for one in self.said if isinstance(one, wire.NcclReady)]

    async def go(self, *seqs: int) -> None:
        for seq in seqs:
            self.serving.hear(wire.NcclGo("comm", seq, True))
        await self.settled()

    async def close(self) -> None:
        """What is under way ends when the communicator does."""
        closing = asyncio.ensure_future(self.serving.close())
        await self.settled()
        for one in self.comm.sending:
            if not one.done():
                one.set_result(None)
        await closing

    async def settled(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


@pytest.fixture
async def producer(monkeypatch: pytest.MonkeyPatch) -> Producer:
    made = Producer(monkeypatch)
    await made.serving.join()
    return made


async def test_a_consumer_may_ask_before_its_last_chunks_are_seen_to_have_gone(
    producer: Producer,
) -> None:
    """It has received them and used its buffers again; our own sends end when we look."""
    assert await producer.want(1, 2, 3) == [1, 2, 3]
    await producer.go(1, 2, 3)
    assert await producer.want(4, 5, 6) == [1, 2, 3], "there is no buffer for these yet"
    assert producer.serving.failure is None
    producer.comm.sending[0].set_result(None)
    await producer.settled()
    assert await producer.want() == [1, 2, 3, 4]
    for one in producer.comm.sending[1:]:
        one.set_result(None)
    await producer.settled()
    assert await producer.want() == [1, 2, 3, 4, 5, 6]
    await producer.close()


async def test_a_chunk_counts_as_read_when_its_send_has_ended_well(producer: Producer) -> None:
    await producer.want(1, 2)
    await producer.go(1, 2)
    assert producer.read == []
    producer.comm.sending[0].set_result(None)
    await producer.settled()
    assert producer.read == [bytes(16)]
    producer.comm.sending[1].set_exception(TransportError(Code.PEER_LOST, "gone"))
    await producer.settled()
    assert producer.read == [bytes(16)]
    await producer.close()


@pytest.mark.parametrize("seqs", [(1, 2, 3, 4), (1, 1)], ids=["too many", "the same twice"])
async def test_more_than_it_has_buffers_ends_it(producer: Producer, seqs: tuple[int, ...]) -> None:
    await producer.want(*seqs)
    assert producer.serving.failure is not None
    assert producer.serving.failure.code == Code.BAD_MESSAGE
    await producer.close()


async def test_a_chunk_that_is_still_going_is_not_asked_for_again(producer: Producer) -> None:
    await producer.want(1)
    await producer.go(1)
    await producer.want(1)
    assert producer.serving.failure is not None
    assert producer.serving.failure.code == Code.BAD_MESSAGE
    await producer.close()


async def test_what_waits_for_a_buffer_ends_with_the_communicator(producer: Producer) -> None:
    await producer.want(1, 2, 3)
    await producer.go(1, 2, 3)
    await producer.want(4)
    await producer.close()
    await producer.settled()
    assert producer.serving._tasks == set()
