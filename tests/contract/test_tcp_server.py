"""Data connections: what a server refuses, drops and counts."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvd.protocol.codes import Code
from kvd.protocol.types import NULL_BLOCK, Watermark
from kvd.transport import tcp_jobs
from kvd.transport.base import TransportError
from kvd.transport.tcp_server import TcpServer
from kvd.transport.tcp_wire import (
    Kind,
    Request,
    pack_request,
    preamble,
)
from tests.contract.rig import TICKET
from tests.contract.tcp_rig import BLOCK, OPTIONS, PATIENT, RawClient, request, served
from tests.plugins.waiting import wait_for

REFUSED: dict[str, tuple[Request, Code]] = {
    "unknown ticket": (request([1], ticket=b"0" * 16), Code.UNKNOWN_TRANSFER),
    "index outside": (request([1, 40]), Code.RANGE_NOT_HELD),
    "highest index": (request([2**32 - 2]), Code.RANGE_NOT_HELD),
    "unknown group": (request([1], group=9), Code.BAD_MESSAGE),
    "layers outside": (request([1], first_layer=3, num_layers=3), Code.BAD_MESSAGE),
    "layers beyond all numbers": (
        request([1], first_layer=2**32 - 1, num_layers=2**32 - 1),
        Code.BAD_MESSAGE,
    ),
    "no layers": (request([1], num_layers=0, nbytes=0), Code.BAD_MESSAGE),
    "too few bytes": (request([1], nbytes=BLOCK - 1), Code.BAD_MESSAGE),
    "too many bytes": (request([1], nbytes=2**63), Code.BAD_MESSAGE),
}


@pytest.mark.parametrize("what", list(REFUSED))
async def test_requests_outside_the_ticket_are_refused(
    what: str, monkeypatch: pytest.MonkeyPatch, clients: Callable[..., RawClient]
) -> None:
    asked, code = REFUSED[what]
    async with served(monkeypatch) as (_, harness):
        client = clients(harness.server.port)
        head = await asyncio.to_thread(client.ask, asked)
        assert (head.kind, head.code) == (Kind.REFUSED, code), head
        # The connection is still good for what the ticket does admit to.
        head = await asyncio.to_thread(client.ask, request([3, 1, 39]))
        assert head.kind is Kind.COMMIT


async def test_each_request_that_was_served_is_told(
    monkeypatch: pytest.MonkeyPatch, clients: Callable[..., RawClient]
) -> None:
    heard: list[bytes] = []
    async with served(monkeypatch) as (_, harness):
        server = TcpServer("127.0.0.1", 0, OPTIONS, on_read=heard.append)
        try:
            server.open_ticket(TICKET, harness.view([range(40), range(40)]))
            client = clients(server.port)
            for asked, kind, count in (
                (request([1]), Kind.COMMIT, 1),
                (request([1, 40]), Kind.REFUSED, 1),
                (request([1], ticket=b"0" * 16), Kind.REFUSED, 1),
                (request([2, 3]), Kind.COMMIT, 2),
            ):
                head = await asyncio.to_thread(client.ask, asked)
                assert head.kind is kind
                # The peer knows by now, so this side has to.
                assert heard == [TICKET] * count
        finally:
            await server.aclose()


async def test_what_is_not_valid_yet_is_refused(
    monkeypatch: pytest.MonkeyPatch, clients: Callable[..., RawClient]
) -> None:
    async with served(monkeypatch) as (_, harness):
        view = harness.view([[5, NULL_BLOCK, 6, 7], range(4)])
        view.first_index = 2
        view.valid = (Watermark(0, 2, 64), Watermark(2, 2, 50))
        harness.server.open_ticket(TICKET, view)
        client = clients(harness.server.port)

        def ask(indices: list[int], first: int = 0, num: int = 4) -> str:
            nbytes = 512 * num * len(indices)
            asked = request(indices, first_layer=first, num_layers=num, nbytes=nbytes)
            head = client.ask(asked)
            return head.code or head.kind.name

        # Block index i is the table's block 2 + i, which begins at token 16 * (2 + i).
        assert await asyncio.to_thread(ask, [0]) == "COMMIT"
        assert await asyncio.to_thread(ask, [0, 1]) == Code.RANGE_NOT_HELD  # a null block
        assert await asyncio.to_thread(ask, [2]) == Code.RANGE_NOT_HELD
        assert await asyncio.to_thread(ask, [2], 0, 2) == Code.RANGE_NOT_HELD
        view.valid = (Watermark(0, 2, 65), Watermark(2, 2, 50))
        assert await asyncio.to_thread(ask, [2], 0, 2) == "COMMIT"
        assert await asyncio.to_thread(ask, [2], 0, 4) == Code.RANGE_NOT_HELD
        head = await asyncio.to_thread(
            client.ask, request([0], group=1, first_layer=4, num_layers=1, nbytes=128)
        )
        assert head.code == Code.RANGE_NOT_HELD  # no watermark for that layer at all


async def test_a_closed_ticket_is_refused_and_a_replaced_one_admits_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(monkeypatch) as (rig, harness):
        puller = harness.puller()
        piece = rig.piece(0, [20], [20], indices=[20])
        harness.admit([range(20), []])
        with pytest.raises(TransportError) as caught:
            await puller.pull(rig.job(piece))
        assert caught.value.code == Code.RANGE_NOT_HELD
        harness.admit([range(21), []])
        assert await puller.pull(rig.job(piece)) == BLOCK
        harness.server.close_ticket(TICKET)
        harness.server.close_ticket(TICKET)
        with pytest.raises(TransportError) as caught:
            await puller.pull(rig.job(piece))
        assert caught.value.code == Code.UNKNOWN_TRANSFER
        assert rig.wrong_blocks(piece) == []


async def test_a_ticket_closed_in_mid_copy_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch) as (rig, harness):
        harness.small_calls(BLOCK)
        puller = harness.puller()
        gate = harness.gate(4)
        piece = rig.piece(0, range(30), range(30))
        pull = asyncio.ensure_future(puller.pull(rig.job(piece)))
        await gate.reached()
        harness.server.close_ticket(TICKET)
        gate.release()
        with pytest.raises(TransportError) as caught:
            await pull
        assert caught.value.code == Code.RELEASED
        harness.admit([range(40), []])
        assert await puller.pull(rig.job(piece)) == 30 * BLOCK
        assert rig.wrong_blocks(piece) == []
        assert puller.statistics()["connects"] <= 2  # the connections were not lost over it


async def test_late_bytes_are_drained_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(monkeypatch, PATIENT) as (rig, harness):
        harness.small_calls(BLOCK)
        puller = harness.puller()
        gate = harness.gate(3)
        pull = asyncio.ensure_future(puller.pull(rig.job(rig.piece(0, range(30), range(30)))))
        await gate.reached()
        puller.stop("fetch")
        with pytest.raises(TransportError) as caught:
            await pull
        assert caught.value.code == Code.CANCELLED
        landed = rig.dst.snapshot()
        gate.release()
        await asyncio.to_thread(
            wait_for, lambda: puller.statistics()["late_bytes"] >= 26 * BLOCK, what="late bytes"
        )
        assert rig.dst.same_as(landed)
        piece = rig.piece(1, [3], [3])
        harness.admit([[], [3]])
        assert await puller.pull(rig.job(piece, fetch_id="next")) == 128
        assert puller.statistics()["connects"] == 1


HOSTILE = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "another version": b"KVDD" + struct.pack("<HH", 2, 0),
    "pickle": b"\x80\x04\x95\x0f\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix.",
}
HOSTILE_FRAMES = {
    "two GiB": struct.pack("<I", 2**31) + b"x" * 64,
    "empty": struct.pack("<I", 0),
    "another kind": struct.pack("<I", 48) + b"\x09" * 48,
    "count beyond its bytes": struct.pack("<I", 48)
    + struct.pack("<BBHI16sIIQII", 1, 1, 0, 1, TICKET, 0, 5, 2048, 0, 9),
    "no blocks": struct.pack("<I", 48)
    + struct.pack("<BBHI16sIIQII", 1, 0, 0, 1, TICKET, 0, 5, 0, 0, 0),
    "range beyond all ids": struct.pack("<I", 48)
    + struct.pack("<BBHI16sIIQII", 1, 0, 0, 1, TICKET, 0, 5, 2048, 2**32 - 1, 9),
}


@pytest.mark.parametrize("what", [*HOSTILE, *HOSTILE_FRAMES])
async def test_foreign_bytes_are_dropped_and_counted(
    what: str, monkeypatch: pytest.MonkeyPatch, clients: Callable[..., RawClient]
) -> None:
    async with served(monkeypatch) as (rig, harness):
        client = clients(harness.server.port, hello=what in HOSTILE_FRAMES)
        client.sock.sendall(HOSTILE.get(what) or HOSTILE_FRAMES[what])
        assert await asyncio.to_thread(client.ended)
        assert dropped(harness.server) == {"bad_frame": 1}
        piece = rig.piece(0, [1], [1])
        assert await harness.puller().pull(rig.job(piece)) == BLOCK


def dropped(server: TcpServer) -> dict[str, int]:
    counts = wait_for(lambda: any_dropped(server), what="a drop")
    return {reason: n for reason, n in counts.items() if n}


def any_dropped(server: TcpServer) -> dict[str, int] | None:
    counts = server.statistics()["dropped"]
    assert isinstance(counts, dict)
    return counts if any(counts.values()) else None


@pytest.mark.parametrize("sent", ["nothing", "half a preamble", "a preamble", "half a request"])
async def test_connections_that_show_no_ticket_in_time_are_dropped(
    sent: str, monkeypatch: pytest.MonkeyPatch, clients: Callable[..., RawClient]
) -> None:
    async with served(monkeypatch, OPTIONS) as (_, harness):
        client = clients(harness.server.port, hello=False)
        client.sock.sendall(
            {
                "nothing": b"",
                "half a preamble": preamble()[:4],
                "a preamble": preamble(),
                "half a request": preamble() + pack_request(request([1]))[:20],
            }[sent]
        )
        assert await asyncio.to_thread(client.ended)
        reason = "bad_frame" if sent == "half a request" else "first_frame"
        assert dropped(harness.server) == {reason: 1}


async def test_an_idle_connection_is_dropped_and_the_puller_connects_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(monkeypatch, replace(PATIENT, idle_s=0.1)) as (rig, harness):
        puller = harness.puller()
        for i in range(3):
            piece = rig.piece(0, [i], [i], indices=[i])
            assert await puller.pull(rig.job(piece)) == BLOCK
            await asyncio.to_thread(
                wait_for, lambda: harness.server.statistics()["connections"] == 0, what="idleness"
            )
        assert puller.statistics()["connects"] == 3


async def test_connections_above_the_limit_are_refused(
    monkeypatch: pytest.MonkeyPatch, clients: Callable[..., RawClient]
) -> None:
    options = replace(PATIENT, max_data_connections=1, tcp_streams=3)
    monkeypatch.setattr(tcp_jobs, "MIN_CHUNK_BYTES", BLOCK)
    monkeypatch.setattr(tcp_jobs, "MAX_CHUNK_BYTES", BLOCK)
    async with served(monkeypatch, options) as (rig, harness):
        # One connection is enough for the job, and the others' refusal does not fail it.
        piece = rig.piece(0, range(40), range(40))
        assert await harness.puller().pull(rig.job(piece)) == 40 * BLOCK
        assert rig.wrong_blocks(piece) == []
        client = clients(harness.server.port, hello=False)
        assert await asyncio.to_thread(client.ended)
        assert set(dropped(harness.server)) == {"too_many"}


async def test_connections_of_one_address_are_bounded_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch, clients: Callable[..., RawClient]
) -> None:
    options = replace(PATIENT, max_data_connections_per_peer=2)
    async with served(monkeypatch, options) as (_, harness):
        for _ in range(2):
            clients(harness.server.port)
        refused = clients(harness.server.port, hello=False)
        assert await asyncio.to_thread(refused.ended)
        assert dropped(harness.server) == {"too_many_of_peer": 1}
        port = harness.server.port
        with socket.create_connection(("127.0.0.1", port), 10, ("127.0.0.9", 0)) as other:
            other.sendall(preamble())
            assert await asyncio.to_thread(other.recv, 100) == preamble()


async def test_hosts_that_are_not_admitted_are_dropped(clients: Callable[..., RawClient]) -> None:
    asked: list[str] = []

    def nobody(host: str) -> bool:
        asked.append(host)
        return False

    server = TcpServer("127.0.0.1", 0, OPTIONS, nobody)
    try:
        client = clients(server.port, hello=False)
        assert await asyncio.to_thread(client.ended)
        assert asked == ["127.0.0.1"]
        assert dropped(server) == {"not_allowed": 1}
    finally:
        await server.aclose()


async def test_a_port_that_is_taken_is_named() -> None:
    server = TcpServer("127.0.0.1", 0, OPTIONS)
    try:
        with pytest.raises(TransportError, match=f"127.0.0.1 port {server.port}"):
            TcpServer("127.0.0.1", server.port, OPTIONS)
    finally:
        await server.aclose()


async def test_a_consumer_that_does_not_read_is_dropped(
    monkeypatch: pytest.MonkeyPatch, clients: Callable[..., RawClient]
) -> None:
    async with served(monkeypatch, replace(PATIENT, data_timeout_s=0.6)) as (rig, harness):
        client = clients(harness.server.port)
        client.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        many = request(list(range(40)) * 400, nbytes=16_000 * BLOCK)
        client.sock.sendall(pack_request(many))
        counts = await asyncio.to_thread(dropped, harness.server)
        assert counts == {"stalled": 1}
        piece = rig.piece(0, [1], [1])
        assert await harness.puller().pull(rig.job(piece)) == BLOCK
