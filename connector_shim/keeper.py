"""`"daemon": "spawn"`: one daemon as a child of this worker, started again when it dies."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from connector_shim.errors import ClientError
from connector_shim.spawn import spawn_daemon

log = logging.getLogger("vllm.kvd.spawn")

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 60.0
STEADY_S = 60.0
"""A daemon that ran so long starts the pauses between attempts anew."""


class Child(Protocol):
    """What is needed of `connector_shim.spawn.SpawnedDaemon`."""

    @property
    def pid(self) -> int: ...
    def exit_code(self) -> int | None: ...
    def stop(self, grace_s: float = ..., kill_wait_s: float = ...) -> int | None: ...


class DaemonKeeper:
    """`path`: the socket that the daemon is told to listen at; `settings`: its own, by name."""

    def __init__(
        self,
        path: str,
        settings: Mapping[str, Any],
        *,
        spawn: Callable[..., Child] = spawn_daemon,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self._settings = settings
        self._spawn = spawn
        self._clock = clock
        self._child: Child | None = None
        self._started = 0.0
        self._pause_s = FIRST_RETRY_S
        self._retry_at = float("-inf")
        self._stopped = False

    def keep(self) -> None:
        """Start the daemon if it does not run and an attempt is due; never waits for it."""
        now = self._clock()
        if self._child is not None:
            code = self._child.exit_code()
            if code is None:
                return
            log.error("kvd: the daemon (process %d) ended with %d", self._child.pid, code)
            self._child = None
            if now - self._started >= STEADY_S:
                self._pause_s = FIRST_RETRY_S
            self._retry_at = now + self._pause_s
            self._pause_s = min(self._pause_s * 2, LAST_RETRY_S)
        if self._stopped or now < self._retry_at:
            return
        try:
            self._child = self._spawn(self.path, settings=self._settings)
        except ClientError as error:
            log.error("kvd: the daemon cannot be started: %s", error.detail)
            self._retry_at = now + self._pause_s
            self._pause_s = min(self._pause_s * 2, LAST_RETRY_S)
            return
        self._started = now
        log.info("kvd: started a daemon at %s (process %d)", self.path, self._child.pid)

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.exit_code() is None

    def stop(self) -> None:
        """End the daemon: in order if it does so soon, and surely after a few seconds."""
        self._stopped = True
        child, self._child = self._child, None
        if child is not None:
            child.stop(grace_s=2.0, kill_wait_s=2.0)
