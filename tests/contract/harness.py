"""Each transport behind the same handles: make both ends, admit a ticket, gate a running copy."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import itertools
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from kvd.memory.engine import EngineMemory
from kvd.memory.plan import addresses, id_runs
from kvd.protocol.types import Watermark
from kvd.transport import fake, iov, shm, tcp_serving, tcp_stream
from kvd.transport.base import Puller, TicketView
from kvd.transport.channel import Tls, load_tls
from kvd.transport.copy_pool import CopyPool
from kvd.transport.fake import FakePuller, Hang
from kvd.transport.jobs import CheckedPiece
from kvd.transport.options import TransportOptions
from kvd.transport.tcp_puller import TcpPuller
from kvd.transport.tcp_server import TcpServer
from tests.contract.certificates import authority, issue
from tests.contract.rig import SLOT, TICKET, WORD, Rig, pack, unpack

GATE_TIMEOUT_S = 20.0
TOKENS = 2**40


class Gate:
    """Holds a copy after some steps; `reached` once it stands there, until `release`."""

    def __init__(self, after: int) -> None:
        self._steps = itertools.count()
        self._after = after
        self._reached = threading.Event()
        self._go = threading.Event()

    def step(self) -> None:
        """Called by the copying thread before each step."""
        if next(self._steps) == self._after:
            self._reached.set()
            assert self._go.wait(GATE_TIMEOUT_S), "a gate was never released"

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._reached.wait, GATE_TIMEOUT_S), "no copy came here"

    def release(self) -> None:
        self._go.set()


class AnyGate(Protocol):
    """What a test sees of a gate."""

    async def reached(self) -> None: ...

    def release(self) -> None: ...


class Harness(Protocol):
    """One transport between the two sides of a rig."""

    name: str
    fence_memory: EngineMemory
    """The memory whose fence word decides."""
    checked: bool
    """Whether pullers made from here on compare checksums."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None: ...

    def puller(self) -> Puller:
        """A new consumer's end."""
        ...

    def admit(self, blocks: Sequence[Sequence[int]], word: int = WORD) -> None:
        """Lets TICKET read these source blocks, by group, in all layers, under that fence word.
        Where the consumer reads the fence itself there is nothing to be done."""
        ...

    def gate(self, after: int) -> AnyGate:
        """The next copy stands still after about `after` blocks of group 0."""
        ...

    def small_calls(self, nbytes: int) -> None:
        """Caps every call at `nbytes` bytes."""
        ...

    def flip(self) -> None:
        """From here on one bit of each copy is not what the source has."""
        ...

    def swap(self) -> None:
        """From here on each copy's blocks arrive in each other's places."""
        ...

    async def aclose(self) -> None: ...


class ShmHarness:
    name = "shm"
    checked = False

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._rig = rig
        self._local = rig.dst.open(writable=True)
        owner = rig.src.open(writable=True)
        self.fence_memory = rig.src.open_shared(owner)
        self._pool = CopyPool(2)
        self._pullers: list[Puller] = []

    def puller(self) -> Puller:
        puller = shm.ShmPuller(self._local, self.fence_memory, self._pool, checked=self.checked)
        self._pullers.append(puller)
        return puller

    def admit(self, blocks: Sequence[Sequence[int]], word: int = WORD) -> None:
        pass

    def small_calls(self, nbytes: int) -> None:
        self._patch.setattr(shm, "CALL_BYTES", nbytes)

    def gate(self, after: int) -> Gate:
        gate = Gate(after)
        copy = shm._Job._copy

        def gated(job: Any, batch: list[Any]) -> None:
            for call in batch:
                gate.step()
                copy(job, [call])

        self._patch.setattr(shm._Job, "_copy", gated)
        return gate

    def flip(self) -> None:
        copy = shm._Job._copy

        def flipping(job: Any, batch: list[Any]) -> None:
            copy(job, batch)
            self._rig.dst.block(0, 0, unpack(job.job.pieces[0].dst)[0])[-1] ^= 1

        self._patch.setattr(shm._Job, "_copy", flipping)

    def swap(self) -> None:
        self._patch.setattr(shm, "id_runs", lambda src, dst: id_runs(src[::-1], dst))

    async def aclose(self) -> None:
        for puller in self._pullers:
            await puller.aclose()
        assert await asyncio.to_thread(self._pool.close, 5.0)


class FlippedVector(iov.Vector):
    """One bit changes between the producer's memory and its socket; the memory stays as it is."""

    def __init__(self, stretches: iov.Stretches) -> None:
        if len(stretches) > 1:  # a head and payload
            address, nbytes = stretches[-1].tolist()
            self._sent = np.frombuffer(ctypes.string_at(address, nbytes), np.uint8).copy()
            self._sent[-1] ^= 1
            stretches = np.concatenate((stretches[:-1], iov.stretch(self._sent)))
        super().__init__(stretches)


class TcpHarness:
    name = "tcp"
    checked = False
    options = TransportOptions(data_timeout_s=5.0, connect_timeout_s=5.0, first_frame_s=5.0)
    host = "127.0.0.1"

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._rig = rig
        self._local, self.fence_memory = self.open_both(rig)
        self.server = TcpServer(self.host, 0, self.options)
        self._pullers: list[Puller] = []

    def open_both(self, rig: Rig) -> tuple[EngineMemory, EngineMemory]:
        """The consumer's and the producer's memory."""
        return rig.dst.open(writable=True), rig.src.open(writable=True)

    def puller(self) -> TcpPuller:
        options = replace(self.options, verify="crc" if self.checked else "off")
        puller = TcpPuller(
            self._local, self.host, self.server.port, self._rig.src.num_blocks, options
        )
        self._pullers.append(puller)
        return puller

    def admit(self, blocks: Sequence[Sequence[int]], word: int = WORD) -> None:
        self.server.open_ticket(TICKET, self.view(blocks, word))

    def view(self, blocks: Sequence[Sequence[int]], word: int = WORD) -> TicketView:
        return TicketView(
            memory=self.fence_memory,
            fence_slot=SLOT,
            fence_word=word,
            first_index=0,
            blocks=tuple(pack(group) for group in blocks),
            valid=(Watermark(0, self.fence_memory.num_layers, TOKENS),),
            block_size=16,
        )

    def small_calls(self, nbytes: int) -> None:
        self._patch.setattr(iov, "CALL_BYTES", nbytes)

    def gate(self, after: int) -> Gate:
        gate = Gate(after)
        push = tcp_serving.Connection._push

        def gated(connection: Any, vector: iov.Vector, flags: int) -> None:
            if flags:  # payload, not a trailer
                gate.step()
                flags = 0  # what was sent before the gate is to arrive
            push(connection, vector, flags)

        self._patch.setattr(tcp_serving.Connection, "_push", gated)
        return gate

    def flip(self) -> None:
        self._patch.setattr(tcp_serving, "Vector", FlippedVector)

    def swap(self) -> None:
        self._patch.setattr(tcp_stream, "addresses", lambda *asked: addresses(*asked)[::-1])

    async def aclose(self) -> None:
        for puller in self._pullers:
            await puller.aclose()
        await self.server.aclose()


class Tcp6Harness(TcpHarness):
    """IPv6, and one connection: what comes later on it shows that what was late has passed."""

    name = "tcp6"
    host = "::1"
    options = replace(TcpHarness.options, tcp_streams=1)


class TlsHarness(TcpHarness):
    """The same inside TLS."""

    name = "tcp+tls"

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.options = replace(TcpHarness.options, tls=_tls())
        super().__init__(rig, monkeypatch)


@functools.cache
def _tls() -> Tls:
    """Read once: the files are gone when it is made."""
    with tempfile.TemporaryDirectory(prefix="kvd-tls-") as folder:
        one = issue(Path(folder), authority(Path(folder), "ca"), "one")
        return load_tls(one.cert, one.key, one.ca)


class FakeGate:
    def __init__(self, pullers: Sequence[FakePuller]) -> None:
        self._pullers = pullers

    async def reached(self) -> None:
        async with asyncio.timeout(GATE_TIMEOUT_S):
            waits = [asyncio.ensure_future(p.hanging.wait()) for p in self._pullers]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    def release(self) -> None:
        for puller in self._pullers:
            puller.release()


class FakeHarness:
    name = "fake"
    checked = False

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._rig = rig
        self._local = rig.dst.open(writable=True)
        self.fence_memory = rig.src.open(writable=False)
        self._pullers: list[FakePuller] = []

    def puller(self) -> FakePuller:
        puller = FakePuller(self._local, self.fence_memory, checked=self.checked)
        self._pullers.append(puller)
        return puller

    def admit(self, blocks: Sequence[Sequence[int]], word: int = WORD) -> None:
        pass

    def small_calls(self, nbytes: int) -> None:
        pass

    def gate(self, after: int) -> FakeGate:
        self._pullers[0].script(Hang(after))
        return FakeGate(self._pullers)

    def flip(self) -> None:
        copy = FakePuller._copy_block

        def flipping(puller: FakePuller, piece: CheckedPiece, a: int, b: int) -> None:
            copy(puller, piece, a, b)
            self._rig.dst.block(0, 0, b)[-1] ^= 1

        self._patch.setattr(FakePuller, "_copy_block", flipping)

    def swap(self) -> None:
        self._patch.setattr(fake, "id_runs", lambda src, dst: id_runs(src[::-1], dst))

    async def aclose(self) -> None:
        for puller in self._pullers:
            await puller.aclose()


HARNESSES: dict[str, Callable[[Rig, pytest.MonkeyPatch], Harness]] = {
    "shm": ShmHarness,
    "tcp": TcpHarness,
    "tcp6": Tcp6Harness,
    "tcp+tls": TlsHarness,
    "fake": FakeHarness,
}
