"""/v1: what a daemon tells about itself as JSON, and the two things that it can be asked to do.

Reading is free to whoever reaches the port, as /metrics is. Asking for something is not: it needs
the daemon's own Unix socket (a file only its user can open), or the token, or, where no token is
set, an address that only this host can reach.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from aiohttp import web

from kvd.addresses import CONTROL_HEADER, HostPort, parse_host_port
from kvd.errors import ConfigError
from kvd.keys import KeysError, check_private

MAX_WAIT_S = 10.0
"""A request waits no longer; whoever wants to wait longer asks again."""
MAX_LISTED = 512
MIN_TOKEN = 16
MAX_TOKEN = 1024


class Subject(Protocol):
    """The daemon, as far as it can be asked from outside."""

    def status(self) -> dict[str, object]: ...

    def transfers(self, count: int) -> list[dict[str, object]]: ...

    def in_flight(self) -> Mapping[str, int]: ...

    def drain(self, *, stop: bool = True) -> None: ...

    async def wait_idle(self, timeout_s: float) -> bool: ...

    def release(self, transfer_id: str, engine_id: str | None, *, force: bool) -> list[str]: ...


class Busy(Exception):
    """A transfer that is being read, and may be released by force only."""


def read_token(path: str) -> str:
    """The token in a file that only we can read. Raises ConfigError."""
    if not path:
        return ""
    try:
        check_private(Path(path), is_folder=False)
        text = Path(path).read_bytes()[: MAX_TOKEN + 1].decode("ascii").strip()
    except KeysError as e:
        raise ConfigError(e.detail.replace("keys: ", "control_token_file: ", 1)) from None
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"control_token_file: cannot read {path}: {e}") from None
    if not MIN_TOKEN <= len(text) <= MAX_TOKEN:
        raise ConfigError(
            f"control_token_file: {path} must have {MIN_TOKEN} to {MAX_TOKEN} characters, "
            f"not {len(text)}"
        )
    return text


class Control:
    """The /v1 endpoints over one daemon."""

    def __init__(
        self, subject: Subject, *, token: str, address: Callable[[], HostPort | None]
    ) -> None:
        self._subject = subject
        self._token = token
        self._address = address

    def add_to(self, app: web.Application) -> None:
        """Adds the routes."""
        app.router.add_get("/v1/status", self._get_status)
        app.router.add_get("/v1/transfers", self._get_transfers)
        app.router.add_post("/v1/drain", self._post_drain)
        app.router.add_post("/v1/transfers/{id}/release", self._post_release)

    # --- reading ----------------------------------------------------------------------------

    async def _get_status(self, _request: web.Request) -> web.Response:
        return _json(self._subject.status())

    async def _get_transfers(self, request: web.Request) -> web.Response:
        text = request.query.get("last", "20")
        if not (text.isascii() and text.isdigit() and len(text) < 9):
            return _json({"error": "last must be a whole number"}, 400)
        count = min(int(text), MAX_LISTED)
        return _json({"transfers": self._subject.transfers(count)})

    # --- asking -----------------------------------------------------------------------------

    async def _post_drain(self, request: web.Request) -> web.Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        wait_s = _seconds(request.query.get("wait_s", "0"))
        if wait_s is None:
            return _json({"error": "wait_s must be a number of seconds"}, 400)
        self._subject.drain(stop=False)
        drained = await self._subject.wait_idle(min(wait_s, MAX_WAIT_S))
        body = {"drained": drained, "in_flight": dict(self._subject.in_flight())}
        return _json(body, 200 if drained else 202)

    async def _post_release(self, request: web.Request) -> web.Response:
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        transfer_id, force = request.match_info["id"], request.query.get("force") == "true"
        try:
            released = self._subject.release(
                transfer_id, request.query.get("engine_id"), force=force
            )
        except Busy as e:
            return _json({"error": str(e)}, 409)
        if not released:
            return _json({"error": f"no open offer of {transfer_id}"}, 404)
        return _json({"released": released})

    def _refusal(self, request: web.Request) -> web.Response | None:
        """Why this request may not change anything; None when it may."""
        if _is_unix(request):
            return None
        if self._token:
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            if hmac.compare_digest(given.encode(), self._token.encode()):
                return None
            return _json({"error": "Authorization: Bearer TOKEN is needed"}, 401)
        at = self._address()
        if at is None or not at.is_loopback:
            error = "needs the daemon's Unix socket, or control_token_file: others reach this port"
            return _json({"error": error}, 403)
        # A page in a browser on this host reaches loopback too, under any name it likes.
        if not _names_loopback(request.host) or CONTROL_HEADER not in request.headers:
            return _json({"error": f"the header {CONTROL_HEADER}: 1 is needed"}, 403)
        return None


def _names_loopback(host: str) -> bool:
    try:
        return parse_host_port(host, default_port=80).is_loopback
    except ValueError:
        return False


def _is_unix(request: web.Request) -> bool:
    sock = None if request.transport is None else request.transport.get_extra_info("socket")
    return sock is not None and sock.family == socket.AF_UNIX


def _seconds(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None


def _json(body: object, status: int = 200) -> web.Response:
    return web.json_response(
        body, status=status, dumps=lambda value: json.dumps(value, default=str)
    )


async def wait_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Whether it was set within `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return event.is_set()
    return True
