"""TLS on data connections: who gets in, what is seen on the wire, and how it ends otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import ConfigError
from kvd.protocol.codes import Code
from kvd.transport import channel
from kvd.transport.base import TransportError
from kvd.transport.channel import Tls, load_tls
from kvd.transport.tcp_puller import TcpPuller
from kvd.transport.tcp_wire import preamble
from tests.conftest import wait_for
from tests.contract.certificates import Certificate, authority, issue
from tests.contract.harness import TcpHarness
from tests.contract.rig import TICKET, Rig
from tests.contract.tcp_rig import BLOCK, OPTIONS, PATIENT, RawClient, served


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Certificate]:
    folder = tmp_path_factory.mktemp("tls")
    ours, others = authority(folder, "ours"), authority(folder, "others")
    return {
        "p": issue(folder, ours, "p"),
        "d": issue(folder, ours, "d"),
        "stranger": issue(folder, others, "stranger"),
    }


def tls(one: Certificate) -> Tls:
    return load_tls(one.cert, one.key, one.ca)


@pytest.fixture
async def secured(
    monkeypatch: pytest.MonkeyPatch, certificates: dict[str, Certificate]
) -> AsyncIterator[tuple[Rig, TcpHarness]]:
    """A server with TLS; the harness's own pullers have p's certificate too."""
    async with served(monkeypatch, replace(PATIENT, tls=tls(certificates["p"]))) as both:
        yield both


async def fetch_as(rig: Rig, harness: TcpHarness, how: Tls | None) -> int:
    puller = TcpPuller(
        harness._local, harness.host, harness.server.port, 40, replace(PATIENT, tls=how)
    )
    try:
        return await puller.pull(rig.job(rig.piece(0, range(10), range(10))))
    finally:
        await puller.aclose()


def dropped(harness: TcpHarness) -> dict[str, int]:
    found = harness.server.statistics()["dropped"]
    assert isinstance(found, dict)
    return {reason: count for reason, count in found.items() if count}


async def test_ends_of_one_authority_move_bytes(
    secured: tuple[Rig, TcpHarness], certificates: dict[str, Certificate]
) -> None:
    rig, harness = secured
    assert await fetch_as(rig, harness, tls(certificates["d"])) == 10 * BLOCK
    assert rig.wrong_blocks(rig.piece(0, range(10), range(10))) == []
    assert dropped(harness) == {}


async def test_a_connection_is_used_again_without_a_pause(
    secured: tuple[Rig, TcpHarness],
    certificates: dict[str, Certificate],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To see that it is still good costs no wait: here one would outlast the test."""
    monkeypatch.setattr(channel, "TICK_S", 600.0)
    rig, harness = secured
    options = replace(PATIENT, tls=tls(certificates["d"]))
    puller = TcpPuller(harness._local, harness.host, harness.server.port, 40, options)
    async with asyncio.timeout(60):
        for _ in range(2):
            await puller.pull(rig.job(rig.piece(0, range(10), range(10))))
        await puller.aclose()
    assert puller.statistics()["connects"] == 1


async def test_an_end_of_another_authority_is_refused_by_both_sides(
    secured: tuple[Rig, TcpHarness], certificates: dict[str, Certificate]
) -> None:
    rig, harness = secured
    ours, stranger = certificates["d"], certificates["stranger"]
    # It takes us for good, but is not of our authority: the server refuses.
    with pytest.raises(TransportError) as refused:
        await fetch_as(rig, harness, load_tls(stranger.cert, stranger.key, ours.ca))
    assert refused.value.code == Code.PEER_NOT_ALLOWED, refused.value.detail
    # It has a good certificate, but does not know our authority: the client refuses.
    with pytest.raises(TransportError, match="not accepted") as refused:
        await fetch_as(rig, harness, load_tls(ours.cert, ours.key, stranger.ca))
    assert refused.value.code == Code.PEER_NOT_ALLOWED
    await asyncio.to_thread(
        wait_for, lambda: dropped(harness).get("tls", 0) >= 2, what="both are counted"
    )
    assert rig.wrong_blocks(rig.piece(0, range(10), range(10))) != []


async def test_plain_and_tls_do_not_talk_to_each_other(
    secured: tuple[Rig, TcpHarness],
    certificates: dict[str, Certificate],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no way back to plain bytes, in either direction."""
    rig, harness = secured
    with pytest.raises(TransportError, match="asks for TLS"):
        await fetch_as(rig, harness, None)
    async with served(monkeypatch, PATIENT) as (plain_rig, plain):
        with pytest.raises(TransportError, match="is tls_cert set there") as refused:
            await fetch_as(plain_rig, plain, tls(certificates["d"]))
        assert refused.value.code == Code.PEER_NOT_ALLOWED


async def test_neither_tickets_nor_kv_are_seen_on_the_wire(
    secured: tuple[Rig, TcpHarness], certificates: dict[str, Certificate]
) -> None:
    rig, harness = secured
    seen = bytearray()
    with _Tap(harness.server.port, seen) as port:
        puller = TcpPuller(
            harness._local, harness.host, port, 40, replace(PATIENT, tls=tls(certificates["d"]))
        )
        await puller.pull(rig.job(rig.piece(0, range(10), range(10))))
        await puller.aclose()
    assert len(seen) > 10 * BLOCK
    assert preamble() not in seen
    assert bytes(harness.view([range(40), range(40)]).blocks[0][:16]) not in seen
    assert TICKET not in seen


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", b"\0" * 4000, b"GET / HTTP/1.1\r\n\r\n"])
async def test_half_a_handshake_is_dropped_in_time(
    monkeypatch: pytest.MonkeyPatch, certificates: dict[str, Certificate], sent: bytes,
    clients: Callable[..., RawClient],
) -> None:  # fmt: skip
    options = replace(OPTIONS, tls=tls(certificates["p"]))
    async with served(monkeypatch, options) as (_, harness):
        client = clients(harness.server.port, hello=False)
        client.sock.sendall(sent)

        def closed() -> bool:
            client.sock.settimeout(10)
            try:
                while client.sock.recv(4096):
                    pass
            except ConnectionError:
                pass
            return True

        assert await asyncio.to_thread(closed)
        await asyncio.to_thread(wait_for, lambda: dropped(harness) == {"tls": 1}, what="counted")


async def test_a_server_that_closes_ends_handshakes_too(
    monkeypatch: pytest.MonkeyPatch, certificates: dict[str, Certificate],
    clients: Callable[..., RawClient],
) -> None:  # fmt: skip
    options = replace(PATIENT, tls=tls(certificates["p"]))
    async with served(monkeypatch, options) as (_, harness):
        clients(harness.server.port, hello=False)
        await asyncio.to_thread(
            wait_for, lambda: harness.server.statistics()["connections"] == 1, what="accepted"
        )
    # `served` closed the server: it did not wait for the handshake's deadline.


@pytest.mark.parametrize("broken", ["cert", "key", "ca"])
def test_files_that_cannot_be_used_are_named(
    certificates: dict[str, Certificate], tmp_path: Path, broken: str
) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("no PEM at all")
    files: dict[str, Any] = {**vars(certificates["p"]), broken: str(junk)}
    with pytest.raises(ConfigError) as refused:
        load_tls(files["cert"], files["key"], files["ca"])
    assert "tls_" in refused.value.detail
    assert str(junk) in refused.value.detail
    with pytest.raises(ConfigError, match="nowhere"):
        load_tls(**{**files, broken: "/nowhere/at/all"})


def test_a_key_that_is_not_the_certificates_is_said_to_be(
    certificates: dict[str, Certificate],
) -> None:
    p, d = certificates["p"], certificates["d"]
    with pytest.raises(ConfigError, match="the key is not the certificate's"):
        load_tls(p.cert, d.key, p.ca)


def test_a_certificate_that_others_would_refuse_is_known_at_the_start(
    certificates: dict[str, Certificate], tmp_path: Path
) -> None:
    p, stranger = certificates["p"], certificates["stranger"]
    assert tls(p).problem() == ""
    assert "issuer" in load_tls(stranger.cert, stranger.key, p.ca).problem()
    expired = issue(tmp_path, authority(tmp_path, "ours"), "expired", days=-1)
    assert "expired" in tls(expired).problem()


class _Tap:
    """Passes one connection after the other on to a port, and keeps what it sees."""

    def __init__(self, port: int, seen: bytearray) -> None:
        self._to = port
        self._seen = seen
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> int:
        self._start(self._accept)
        port: int = self._listener.getsockname()[1]
        return port

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=run, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._start(self._join, self._listener.accept()[0])

    def _join(self, one: socket.socket) -> None:
        with one, socket.create_connection(("127.0.0.1", self._to), 20) as other:
            open_ends = {one: other, other: one}
            while open_ends:
                for source in select.select(list(open_ends), [], [], 20)[0]:
                    with contextlib.suppress(OSError):
                        data = source.recv(2**16)
                        self._seen += data
                        if data:
                            open_ends[source].sendall(data)
                            continue
                        open_ends[source].shutdown(socket.SHUT_WR)
                    del open_ends[source]
