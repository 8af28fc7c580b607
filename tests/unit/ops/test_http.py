"""The endpoints of a live server, and clients that mean no good."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import closing

import aiohttp
import pytest

from kvd.addresses import HostPort
from kvd.core.instructions import Record
from kvd.http import MAX_BODY, HttpServer
from kvd.local.listener import BindError
from kvd.metrics import Metrics
from kvd.peers.bootstrap import PATH
from tests.conftest import wait_for_async

LOOPBACK = HostPort("127.0.0.1", 0)


class Probe:
    """What the daemon would say."""

    def __init__(self) -> None:
        self.ready: dict[str, str] = {}
        self.healthy: dict[str, str] = {}


@pytest.fixture
def probe() -> Probe:
    return Probe()


@pytest.fixture
async def server(probe: Probe) -> AsyncIterator[HttpServer]:
    server = HttpServer(
        Metrics(),
        ready=lambda: probe.ready,
        healthy=lambda: probe.healthy,
        connection_s=0.5,
        max_connections=4,
    )
    await server.start(LOOPBACK)
    yield server
    await server.aclose()


async def get(server: HttpServer, path: str, **headers: str) -> tuple[int, str, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://{server.address}{path}", headers=headers) as answer,
    ):
        return answer.status, await answer.text(), answer.headers["Content-Type"]


async def test_metrics_are_served(server: HttpServer) -> None:
    server._metrics.record(Record("offer_ended", {"reason": "expired"}))
    status, body, kind = await get(server, "/metrics")
    assert status == 200
    assert kind.startswith("text/plain")
    assert 'kvd_offers_total{reason="expired"} 1.0' in body
    status, body, kind = await get(server, "/metrics", Accept="application/openmetrics-text")
    assert kind.startswith("application/openmetrics-text")
    assert body.endswith("# EOF\n")


async def test_health_and_readiness_say_why_not(server: HttpServer, probe: Probe) -> None:
    assert (await get(server, "/healthz"))[:2] == (200, '{"healthy": true, "reasons": {}}')
    assert (await get(server, "/readyz"))[:2] == (200, '{"ready": true, "reasons": {}}')
    probe.ready["draining"] = "nothing new is taken"
    status, body, _ = await get(server, "/readyz")
    assert (status, body) == (
        503,
        '{"ready": false, "reasons": {"draining": "nothing new is taken"}}',
    )
    assert (await get(server, "/healthz"))[0] == 200
    probe.healthy["loop"] = "late"
    assert (await get(server, "/healthz"))[0] == 503


async def test_a_probe_that_fails_is_not_ready() -> None:
    def broken() -> dict[str, str]:
        raise RuntimeError("no core yet")

    server = HttpServer(Metrics(), ready=broken)
    await server.start(LOOPBACK)
    status, body, _ = await get(server, "/readyz")
    await server.aclose()
    assert status == 503
    assert "no core yet" in body


async def test_other_paths_and_methods_are_refused(server: HttpServer) -> None:
    assert (await get(server, "/"))[0] == 404
    async with aiohttp.ClientSession() as session:
        async with session.post(f"http://{server.address}/metrics", data=b"x" * 10) as answer:
            assert answer.status == 405
        async with session.post(
            f"http://{server.address}/readyz", data=b"x" * (4 * MAX_BODY)
        ) as answer:
            assert answer.status in (405, 413)


async def test_one_request_a_connection(server: HttpServer) -> None:
    assert server.address is not None
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert answer.count(b"HTTP/1.1 200") == 1
    assert b"Connection: close" in answer


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"GET /metrics HTTP/1.1\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc",
    ],
)
async def test_a_client_that_does_not_finish_is_cut(server: HttpServer, head: bytes) -> None:
    assert server.address is not None
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(head)
    await asyncio.wait_for(reader.read(), 5)
    writer.close()
    await wait_for_async(lambda: server.connections == 0)


async def test_a_client_that_never_reads_is_cut(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server.address is not None
    # More than the kernel takes off our hands.
    body = b"#" * 2**25
    monkeypatch.setattr(server._metrics, "render", lambda _accept: (body, "text/plain"))
    with closing(socket.socket()) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, tuple(server.address))
        await loop.sock_sendall(client, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert await loop.sock_recv(client, 100)
        assert server.connections == 1
        await wait_for_async(lambda: server.connections == 0)
    assert server._metrics.value("kvd_dropped_total", where="http", reason="timeout") == 1


async def test_too_many_connections_are_refused_and_counted(server: HttpServer) -> None:
    assert server.address is not None
    idle = [await asyncio.open_connection(*server.address) for _ in range(4)]
    await wait_for_async(lambda: server.connections == 4)
    reader, writer = await asyncio.open_connection(*server.address)
    oldest, _ = idle[0]
    assert await asyncio.wait_for(oldest.read(), 5) == b""
    assert server._metrics.value("kvd_dropped_total", where="http", reason="max_connections") == 1
    for _, other in [*idle, (reader, writer)]:
        other.close()
    await wait_for_async(lambda: server.connections == 0)
    assert (await get(server, "/healthz"))[0] == 200


@pytest.mark.parametrize(
    "junk",
    [
        b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\r\n\r\n",
        b"GET /metrics HTTP/9.9\r\n\r\n",
        b"GET " + b"/" * 10_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 10_000 + b"\r\n\r\n",
    ],
)
async def test_junk_is_answered_with_an_error_or_not_at_all(
    server: HttpServer, junk: bytes
) -> None:
    assert server.address is not None
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(junk)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert b" 200 " not in answer.partition(b"\r\n")[0]
    assert (await get(server, "/healthz"))[0] == 200


async def test_a_bound_port_is_named(server: HttpServer) -> None:
    assert server.address is not None
    other = HttpServer(Metrics(), ready=dict)
    with pytest.raises(BindError) as e:
        await other.start(server.address)
    assert str(e.value).startswith(f"metrics: cannot listen on {server.address}: port")
    assert "in use" in str(e.value)
    await other.aclose()


async def test_a_foreign_address_is_named() -> None:
    with pytest.raises(BindError, match=r"192\.0\.2\.1 is not an address of this host"):
        await HttpServer(Metrics(), ready=dict).start(HostPort("192.0.2.1", 0))


async def test_it_serves_ipv6() -> None:
    server = HttpServer(Metrics(), ready=dict)
    try:
        await server.start(HostPort("::1", 0))
    except BindError:
        pytest.skip("no IPv6 on this host")
    assert (await get(server, "/readyz"))[0] == 200
    await server.aclose()


async def test_closing_ends_open_connections(probe: Probe) -> None:
    server = HttpServer(Metrics(), ready=dict)
    at = await server.start(LOOPBACK)
    reader, writer = await asyncio.open_connection(*at)
    writer.write(b"GET /met")
    await wait_for_async(lambda: server.connections == 1)
    await asyncio.wait_for(server.aclose(), 5)
    await asyncio.wait_for(_eof(reader), 5)
    writer.close()
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await asyncio.open_connection(*at)


async def _eof(reader: asyncio.StreamReader) -> None:
    try:
        assert await reader.read() == b""
    except ConnectionResetError:
        return


@pytest.mark.parametrize(
    "head",
    [
        b"no HTTP at all",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nExpect: \xff\xfe",
        b"GET /nothing HTTP/1.1\r\nHost: a\r\nExpect: \xff\xfe",
        b"GET /heal\xff HTTP/1.1\r\nHost: \xff",
    ],
)
async def test_strangers_are_counted_and_cannot_fill_the_log(
    server: HttpServer, caplog: pytest.LogCaptureFixture, head: bytes
) -> None:
    assert server.address is not None
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(head + b"\r\n\r\n")
    await reader.read()
    writer.close()
    await wait_for_async(lambda: not server.connections)
    dropped = [
        server._metrics.value("kvd_dropped_total", where="http", reason=reason) or 0.0
        for reason in ("refused", "bad_request")
    ]
    assert sum(dropped) == 1
    assert [record.message for record in caplog.records] == []


async def test_a_client_that_hangs_up_before_its_answer_is_not_logged(
    server: HttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    assert server.address is not None
    for _ in range(30):
        _, writer = await asyncio.open_connection(*server.address)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n\r\n")
        writer.transport.abort()
        await wait_for_async(lambda: not server.connections)
    assert [record.message for record in caplog.records] == []


async def test_our_own_faults_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(own: bool) -> dict[str, object]:
        raise KeyError("ours")

    server = HttpServer(Metrics(), ready=dict, bootstrap=broken)
    await server.start(LOOPBACK)
    assert (await get(server, PATH))[0] == 500
    await server.aclose()
    assert ["Error handling request" in record.message for record in caplog.records] == [True]
