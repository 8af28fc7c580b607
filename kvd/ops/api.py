"""Asks daemons over HTTP: through their Unix sockets, or at their metrics addresses."""

from __future__ import annotations

import http.client
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvd.addresses import CONTROL_HEADER, CONTROL_SUFFIX, parse_host_port
from kvd.config import load
from kvd.errors import ConfigError, KvdError
from kvd.local.seqpacket import short_address
from kvd.protocol.codes import Code

TIMEOUT_S = 5.0
MAX_ANSWER = 16 * 2**20
MAX_DAEMONS = 256


class Unanswered(KvdError):
    """A daemon that is not there, or does not answer as one."""

    code = Code.PEER_UNREACHABLE


@dataclass(frozen=True, slots=True)
class Target:
    """One daemon's HTTP: a Unix socket's path, or host and port."""

    path: str = ""
    host: str = ""
    port: int = 0
    token: str = ""

    def __str__(self) -> str:
        return self.path.removesuffix(CONTROL_SUFFIX) or f"{self.host}:{self.port}"

    def get(self, path: str, timeout_s: float = TIMEOUT_S) -> tuple[int, dict[str, Any]]:
        """(HTTP status, JSON). Raises Unanswered."""
        return self.ask("GET", path, timeout_s)

    def post(self, path: str, timeout_s: float = TIMEOUT_S) -> tuple[int, dict[str, Any]]:
        """(HTTP status, JSON). Raises Unanswered."""
        return self.ask("POST", path, timeout_s)

    def ask(self, method: str, path: str, timeout_s: float) -> tuple[int, dict[str, Any]]:
        """One request with a deadline over all of it. Raises Unanswered."""
        headers = {"Connection": "close", "Content-Length": "0"}
        if method == "POST":
            headers[CONTROL_HEADER] = "1"
            if self.token:
                headers["Authorization"] = f"Bearer {self.token}"
        connection = _Connection(self, timeout_s)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            body = _read(answer, time.monotonic() + timeout_s)
            found = json.loads(body)
        except (OSError, http.client.HTTPException) as e:
            raise Unanswered(f"{self}: {_reason(e, self)}") from None
        except ValueError:
            raise Unanswered(f"{self} answers, but not as kvd does") from None
        finally:
            connection.close()
        if not isinstance(found, dict):
            raise Unanswered(f"{self} answers, but not as kvd does")
        return answer.status, found


def _read(answer: http.client.HTTPResponse, deadline: float) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := answer.read1(2**16):
        parts.append(part)
        size += len(part)
        if size > MAX_ANSWER or time.monotonic() > deadline:
            raise http.client.HTTPException("too long an answer")
    return b"".join(parts)


def _reason(error: Exception, target: Target) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such socket; no daemon serves there"
    if isinstance(error, PermissionError):
        return f"may not be opened by uid {os.geteuid()}; run this as the daemon's user"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__


class _Connection(http.client.HTTPConnection):
    def __init__(self, target: Target, timeout_s: float) -> None:
        super().__init__(target.host or "localhost", target.port or 80, timeout=timeout_s)
        self._path = target.path

    def connect(self) -> None:
        if not self._path:
            super().connect()
            return
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self.sock.settimeout(self.timeout)
        with short_address(self._path) as address:
            self.sock.connect(address)


# --- which daemons --------------------------------------------------------------------------


def targets(
    *,
    sockets: Sequence[str] = (),
    at: Sequence[str] = (),
    discovery: Sequence[str] = (),
    every: bool = False,
    token_file: str = "",
) -> list[Target]:
    """The daemons that are meant; the one of our own settings where none is named.

    Raises ConfigError for an address or a file that cannot be read.
    """
    token = ""
    if token_file:
        try:
            token = Path(token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"--token-file: cannot read {token_file}: {e}") from None
    found = [Target(path=socket_path(path) + CONTROL_SUFFIX) for path in sockets]
    for text in at:
        try:
            host, port = parse_host_port(text.removeprefix("http://").rstrip("/"))
        except ValueError as e:
            raise ConfigError(f"--at: {text!r} {e}") from None
        found.append(Target(host=host, port=port, token=token))
    found += [_discovered(path, token) for path in discovery]
    if found and not every:
        return found
    own = Path(load().socket + CONTROL_SUFFIX)
    others = sorted(str(p) for p in own.parent.glob(f"*{CONTROL_SUFFIX}"))
    if every or (not own.exists() and others):
        known = {t.path for t in found}
        found += [Target(path=path) for path in others if path not in known]
    return found[:MAX_DAEMONS] or [Target(path=str(own))]


def socket_path(text: str) -> str:
    return os.path.abspath(os.path.expanduser(text.removesuffix(CONTROL_SUFFIX)))


def _discovered(path: str, token: str) -> Target:
    try:
        found = json.loads(Path(path).read_text())
        if found.get("socket"):
            control = Path(str(found["socket"]) + CONTROL_SUFFIX)
            if os.access(control, os.W_OK):
                return Target(path=str(control))
        host, port = parse_host_port(str(found["metrics"]))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as e:
        raise ConfigError(f"--discovery: {path} does not say where a daemon is: {e}") from None
    return Target(host=host, port=port, token=token)


def quoted(text: str) -> str:
    """A transfer's id as one part of a path."""
    return quote(text, safe="")
