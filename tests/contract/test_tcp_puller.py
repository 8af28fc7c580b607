"""Data connections: what a consumer survives."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from kvd.protocol.codes import Code
from kvd.transport.base import TransportError
from kvd.transport.options import TransportOptions
from kvd.transport.tcp_puller import TcpPuller
from kvd.transport.tcp_server import TcpServer
from kvd.transport.tcp_wire import (
    LENGTH_BYTES,
    PREAMBLE_BYTES,
    Head,
    Kind,
    Request,
    pack_head,
    preamble,
    request_length,
    unpack_request,
)
from tests.contract.rig import Rig
from tests.contract.tcp_rig import BLOCK, OPTIONS, SHAPE, RawClient

# --- producers that misbehave ---------------------------------------------------------------


class BadProducer:
    """Accepts, and answers each request as a test says; one thread, ended by `close`."""

    def __init__(self, answer: Callable[[socket.socket, Request], bool]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.accepted = 0
        self._done = threading.Event()
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            self._open.append(sock)
            with contextlib.suppress(OSError, EOFError):
                if self._serve(sock):
                    continue  # keep it open, and silent
            sock.close()

    def _serve(self, sock: socket.socket) -> bool:
        client = RawClient.__new__(RawClient)
        client.sock = sock
        sock.settimeout(10)
        client.read(PREAMBLE_BYTES)
        sock.sendall(preamble())
        while True:
            asked = unpack_request(client.read(request_length(client.read(LENGTH_BYTES))))
            if not self._answer(sock, asked):
                return True

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        for sock in self._open:
            sock.close()
        assert not self._thread.is_alive()


@contextlib.asynccontextmanager
async def against(
    answer: Callable[[socket.socket, Request], bool], options: TransportOptions = OPTIONS
) -> AsyncIterator[tuple[Rig, TcpPuller, BadProducer]]:
    rig = Rig.make(SHAPE, (40, 48))
    producer = BadProducer(answer)
    try:
        puller = TcpPuller(rig.dst.open(writable=True), "127.0.0.1", producer.port, 40, options)
        try:
            yield rig, puller, producer
        finally:
            await puller.aclose()
    finally:
        producer.close()
        rig.close()


def half(sock: socket.socket, asked: Request) -> None:
    sock.sendall(pack_head(Head(Kind.DATA, asked.request, asked.nbytes)))
    sock.sendall(b"\x11" * (asked.nbytes // 2))


def stall(sock: socket.socket, asked: Request) -> bool:
    half(sock, asked)
    return False


def say_nothing(sock: socket.socket, asked: Request) -> bool:
    return False


def no_commit(sock: socket.socket, asked: Request) -> bool:
    half(sock, asked)
    sock.sendall(b"\x11" * (asked.nbytes - asked.nbytes // 2))
    return False


def die(sock: socket.socket, asked: Request) -> bool:
    half(sock, asked)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    raise EOFError


def end(sock: socket.socket, asked: Request) -> bool:
    half(sock, asked)
    raise EOFError


def too_much(sock: socket.socket, asked: Request) -> bool:
    sock.sendall(pack_head(Head(Kind.DATA, asked.request, asked.nbytes + 8)))
    sock.sendall(b"\x11" * (asked.nbytes + 8))
    return True


def another_answer(sock: socket.socket, asked: Request) -> bool:
    sock.sendall(pack_head(Head(Kind.DATA, asked.request + 1, asked.nbytes)))
    return True


def garbage(sock: socket.socket, asked: Request) -> bool:
    sock.sendall(os.urandom(4096))
    return True


def data_instead_of_commit(sock: socket.socket, asked: Request) -> bool:
    sock.sendall(pack_head(Head(Kind.DATA, asked.request, asked.nbytes)))
    sock.sendall(b"\x11" * asked.nbytes)
    sock.sendall(pack_head(Head(Kind.DATA, asked.request, asked.nbytes)))
    return True


def unknown_code(sock: socket.socket, asked: Request) -> bool:
    sock.sendall(pack_head(Head(Kind.REFUSED, asked.request, 0, "of_tomorrow", "so it goes")))
    return True


BAD = (
    stall,
    say_nothing,
    no_commit,
    die,
    end,
    too_much,
    another_answer,
    garbage,
    data_instead_of_commit,
    unknown_code,
)


@pytest.mark.parametrize("answer", BAD, ids=lambda f: f.__name__)
async def test_a_producer_that_misbehaves_fails_the_job_in_bounded_time(
    answer: Callable[[socket.socket, Request], bool],
) -> None:
    async with against(answer) as (rig, puller, _), asyncio.timeout(60):
        jobs = [rig.job(rig.piece(0, [i], [i], indices=[i])) for i in range(4)]
        results = await asyncio.gather(*map(puller.pull, jobs), return_exceptions=True)
        landed = rig.dst.snapshot()
        for result in results:
            assert isinstance(result, TransportError)
            assert result.code in (Code.TRANSPORT_ERROR, Code.PEER_UNREACHABLE), result
        await puller.aclose()
        assert rig.dst.same_as(landed)


async def test_a_listener_that_never_accepts_fails_the_job_in_bounded_time() -> None:
    rig = Rig.make(SHAPE, (4, 4))
    try:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            puller = TcpPuller(rig.dst.open(writable=True), "127.0.0.1", port, 4, OPTIONS)
            async with asyncio.timeout(60):
                with pytest.raises(TransportError) as caught:
                    await puller.pull(rig.job(rig.piece(0, [1], [1])))
            await puller.aclose()
        assert caught.value.code == Code.PEER_UNREACHABLE
        assert str(port) in caught.value.detail
    finally:
        rig.close()


async def test_a_closed_port_fails_the_job_and_names_it() -> None:
    rig = Rig.make(SHAPE, (4, 4))
    try:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            port = gone.getsockname()[1]
        puller = TcpPuller(rig.dst.open(writable=True), "127.0.0.1", port, 4, OPTIONS)
        with pytest.raises(TransportError) as caught:
            await puller.pull(rig.job(rig.piece(0, [1], [1])))
        await puller.aclose()
        assert caught.value.code == Code.PEER_UNREACHABLE
        assert str(port) in caught.value.detail
    finally:
        rig.close()


async def test_a_connection_that_dies_does_not_end_the_attachment() -> None:
    calls = 0

    def answer(sock: socket.socket, asked: Request) -> bool:
        nonlocal calls
        calls += 1
        if calls == 1:
            return die(sock, asked)
        sock.sendall(pack_head(Head(Kind.DATA, asked.request, asked.nbytes)))
        sock.sendall(b"\x22" * asked.nbytes)
        sock.sendall(pack_head(Head(Kind.COMMIT, asked.request, asked.nbytes)))
        return True

    async with against(answer) as (rig, puller, producer):
        piece = rig.piece(0, [1], [1])
        with pytest.raises(TransportError):
            await puller.pull(rig.job(piece))
        assert await puller.pull(rig.job(piece)) == BLOCK
        assert (rig.dst.block(0, 0, 1) == 0x22).all()
        assert producer.accepted == 2


PRODUCER = """
import sys
from kvd.transport import tcp_serving
from tests.contract.harness import TcpHarness
from tests.contract.rig import Rig, Shape
from tests.contract.tcp_rig import SHAPE
import pytest
with pytest.MonkeyPatch.context() as patch:
    rig = Rig.make(SHAPE, (40, 48))
    harness = TcpHarness(rig, patch)
    harness.admit([range(40), []])
    harness.small_calls(2048)
    gate = harness.gate(4)
    print(harness.server.port, flush=True)
    gate._reached.wait()
    print("reached", flush=True)
    sys.stdin.read()
"""


async def test_a_producer_that_is_stopped_does_not_hang_its_consumer() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", PRODUCER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    rig = Rig.make(SHAPE, (40, 48))
    try:
        assert child.stdout is not None
        port = int(await asyncio.to_thread(child.stdout.readline))
        puller = TcpPuller(rig.dst.open(writable=True), "127.0.0.1", port, 40, OPTIONS)
        pull = asyncio.ensure_future(puller.pull(rig.job(rig.piece(0, range(30), range(30)))))
        assert (await asyncio.to_thread(child.stdout.readline)).strip() == "reached"
        child.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(60):
            with pytest.raises(TransportError) as caught:
                await pull
        assert caught.value.code == Code.TRANSPORT_ERROR
        async with asyncio.timeout(60):
            await puller.aclose()
    finally:
        child.kill()
        child.wait(10)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
        rig.close()


async def test_a_congestion_control_that_is_not_allowed_is_refused_by_name() -> None:
    rig = Rig.make(SHAPE, (4, 4))
    try:
        options = replace(OPTIONS, tcp_congestion="no_such_control")
        with pytest.raises(TransportError, match="no_such_control"):
            TcpServer("127.0.0.1", 0, options)
        with pytest.raises(TransportError, match="no_such_control"):
            TcpPuller(rig.dst.open(writable=True), "127.0.0.1", 1, 4, options)
    finally:
        rig.close()
