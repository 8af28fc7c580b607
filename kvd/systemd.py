"""Talking to a supervisor that speaks systemd's notify protocol; without one, nothing happens."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import structlog

log = structlog.get_logger("kvd.systemd")


class Notifier:
    """READY, STATUS, STOPPING and WATCHDOG messages to $NOTIFY_SOCKET. Never blocks or raises."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._address = env.get("NOTIFY_SOCKET", "")
        self._socket: socket.socket | None = None
        self.watchdog_s: float | None = _watchdog_s(env)
        if not self._address:
            return
        if self._address[0] not in "/@":
            log.warning("notify_socket_ignored", address=self._address)
            self._address = ""
            return
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}\nMAINPID={os.getpid()}")

    def status(self, status: str) -> None:
        self._send(f"STATUS={status}")

    def extend(self, seconds: float, status: str) -> None:
        """Asks for `seconds` more, from now, before the supervisor takes us for stuck."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}\nSTATUS={status}")

    def stopping(self, status: str) -> None:
        self._send(f"STOPPING=1\nSTATUS={status}")

    def watchdog(self) -> None:
        """Says that the event loop and the data threads get on."""
        self._send("WATCHDOG=1")

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, text: str) -> None:
        if self._socket is None:
            return
        address = "\0" + self._address[1:] if self._address[0] == "@" else self._address
        try:
            self._socket.sendto(text.encode(), address)
        except OSError as e:
            log.debug("notify_failed", error=str(e))


def _watchdog_s(env: Mapping[str, str]) -> float | None:
    """Seconds within which the supervisor wants to hear from us."""
    try:
        if int(env.get("WATCHDOG_PID", os.getpid())) != os.getpid():
            return None
        micros = int(env.get("WATCHDOG_USEC", "0"))
    except ValueError:
        return None
    return micros / 1e6 if micros > 0 else None
