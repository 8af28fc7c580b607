"""/v1 of a live server: what it tells, and who may ask it to do something."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvd.addresses import CONTROL_HEADER, HostPort
from kvd.control import Busy, Control, read_token
from kvd.errors import ConfigError
from kvd.http import HttpServer
from kvd.local.listener import bind
from kvd.metrics import Metrics

LOOPBACK = HostPort("127.0.0.1", 0)
TOKEN = "a-token-of-enough-characters"


class Subject:
    """What the daemon would do."""

    def __init__(self) -> None:
        self.drains: list[bool] = []
        self.idle = False
        self.waited: list[float] = []
        self.released: list[tuple[str, str | None, bool]] = []
        self.busy = False

    def status(self) -> dict[str, object]:
        return {"daemon": {"pid": 1}}

    def transfers(self, count: int) -> list[dict[str, object]]:
        return [dict[str, object](n=n) for n in range(count)][:3]

    def in_flight(self) -> Mapping[str, int]:
        return {"fetches": 0 if self.idle else 2}

    def drain(self, *, stop: bool = True) -> None:
        self.drains.append(stop)

    async def wait_idle(self, timeout_s: float) -> bool:
        self.waited.append(timeout_s)
        return self.idle

    def release(self, transfer_id: str, engine_id: str | None, *, force: bool) -> list[str]:
        if self.busy and not force:
            raise Busy("1 fetch is open")
        self.released.append((transfer_id, engine_id, force))
        return ["engine"] if transfer_id != "unknown" else []


class Site:
    """A subject behind TCP and a Unix socket."""

    def __init__(self, path: Path, *, token: str = "", shown: HostPort | None = None) -> None:
        self.subject = Subject()
        self.shown = shown
        control = Control(self.subject, token=token, address=lambda: self.shown)
        self.server = HttpServer(Metrics(), ready=dict, routes=control.add_to)
        self.listener = bind(str(path), kind=socket.SOCK_STREAM)

    async def start(self) -> None:
        address = await self.server.start(LOOPBACK)
        self.shown = self.shown or address
        await self.server.start_unix(self.listener.sock)

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, unix: bool = False
    ) -> tuple[int, Any]:
        connector = aiohttp.UnixConnector(self.listener.path) if unix else None
        base = "http://localhost" if unix else f"http://{self.server.address}"
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.request(method, base + path, headers=headers) as answer,
        ):
            return answer.status, await answer.json()

    async def close(self) -> None:
        await self.server.aclose()
        self.listener.close()


@pytest.fixture
async def site(tmp_run_dir: Path) -> AsyncIterator[Site]:
    made = Site(tmp_run_dir / "ctl")
    await made.start()
    yield made
    await made.close()


FROM_HERE = {CONTROL_HEADER: "1"}


@pytest.mark.parametrize("unix", [True, False])
async def test_anybody_may_read(site: Site, unix: bool) -> None:
    assert await site.ask("GET", "/v1/status", unix=unix) == (200, {"daemon": {"pid": 1}})
    status, body = await site.ask("GET", "/v1/transfers?last=2", unix=unix)
    assert (status, body) == (200, {"transfers": [{"n": 0}, {"n": 1}]})


@pytest.mark.parametrize("last", ["-1", "x", "1e3", "999999999999", "%D9%A3"])
async def test_a_bad_count_is_refused(site: Site, last: str) -> None:
    assert (await site.ask("GET", f"/v1/transfers?last={last}"))[0] == 400


async def test_drain_answers_with_what_is_left(site: Site) -> None:
    status, body = await site.ask("POST", "/v1/drain?wait_s=3", FROM_HERE)
    assert (status, body) == (202, {"drained": False, "in_flight": {"fetches": 2}})
    site.subject.idle = True
    status, body = await site.ask("POST", "/v1/drain?wait_s=9999", FROM_HERE)
    assert (status, body) == (200, {"drained": True, "in_flight": {"fetches": 0}})
    # It stays up, and a request never waits for long.
    assert site.subject.drains == [False, False]
    assert site.subject.waited == [3.0, 10.0]
    for bad in ("x", "-1", "nan", "inf"):
        assert (await site.ask("POST", f"/v1/drain?wait_s={bad}", FROM_HERE))[0] == 400


async def test_release_names_the_transfer(site: Site) -> None:
    path = "/v1/transfers/a%2Fb/release?engine_id=e"
    assert await site.ask("POST", path, FROM_HERE) == (200, {"released": ["engine"]})
    assert site.subject.released == [("a/b", "e", False)]
    site.subject.busy = True
    assert (await site.ask("POST", path, FROM_HERE))[0] == 409
    assert (await site.ask("POST", path + "&force=true", FROM_HERE))[0] == 200
    unknown = "/v1/transfers/unknown/release?force=true"
    assert (await site.ask("POST", unknown, FROM_HERE))[0] == 404


CHANGES = ["/v1/drain", "/v1/transfers/t/release"]


@pytest.mark.parametrize("path", CHANGES)
async def test_a_page_in_a_browser_may_not(site: Site, path: str) -> None:
    assert (await site.ask("POST", path))[0] == 403
    assert (await site.ask("POST", path, {"Host": "evil.example", **FROM_HERE}))[0] == 403
    assert site.subject.drains == []
    assert site.subject.released == []
    assert (await site.ask("POST", path, unix=True))[0] in (200, 202)


@pytest.mark.parametrize("path", CHANGES)
async def test_where_others_reach_the_port_only_the_socket_may(
    tmp_run_dir: Path, path: str
) -> None:
    site = Site(tmp_run_dir / "ctl", shown=HostPort("10.0.0.1", 9))
    await site.start()
    try:
        assert (await site.ask("POST", path, FROM_HERE))[0] == 403
        assert site.subject.drains == []
        assert site.subject.released == []
        assert (await site.ask("POST", path, unix=True))[0] in (200, 202)
    finally:
        await site.close()


@pytest.mark.parametrize("path", CHANGES)
@pytest.mark.parametrize("shown", [HostPort("10.0.0.1", 9), None])
async def test_with_a_token_only_the_token_may(
    tmp_run_dir: Path, path: str, shown: HostPort | None
) -> None:
    site = Site(tmp_run_dir / "ctl", token=TOKEN, shown=shown)
    await site.start()
    try:
        for given in ({}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": "Bearer "}):
            assert (await site.ask("POST", path, {**FROM_HERE, **given}))[0] == 401
        assert site.subject.drains == []
        assert site.subject.released == []
        right = {"Authorization": f"Bearer {TOKEN}"}
        assert (await site.ask("POST", path, right))[0] in (200, 202)
    finally:
        await site.close()


def test_the_token_is_private_and_long_enough(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    assert read_token(str(file)) == TOKEN
    assert read_token("") == ""
    file.chmod(0o640)
    with pytest.raises(ConfigError, match=r"control_token_file: .*chmod 600"):
        read_token(str(file))
    file.chmod(0o600)
    file.write_text("short")
    with pytest.raises(ConfigError, match="16 to 1024 characters"):
        read_token(str(file))
    with pytest.raises(ConfigError, match="there is no"):
        read_token(str(tmp_path / "none"))
