"""Starts the demo's daemons with the shipped command, and reads their counters and log lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd.demo.client import Client, DemoError, Metrics, total, until
from kvd.demo.processes import Child, Children

START_S = 30.0
OWN_SETTINGS = ("socket", "listen", "metrics", "bootstrap", "discovery_file", "log_format")
"""What the demo sets itself."""

ANY = "127.0.0.1:0"
SERVE = ("kvd", "serve")
DAMAGE = ("kvd.demo.damage", "serve")


@dataclass(slots=True)
class Daemon:
    """One running daemon. `listen` and `metrics` are host:port as bound."""

    name: str
    child: Child
    socket: Path
    listen: str
    metrics: str
    bootstrap: str
    log: Path
    config: Mapping[str, str]
    life: int
    """How many daemons have been at these addresses, this one counted."""

    @property
    def restart_argv(self) -> list[str]:
        """What starts the same daemon again, at the same addresses, with the shipped command."""
        return _argv(SERVE, self.socket, self.listen, self.metrics, self.bootstrap, self.config)

    @property
    def metrics_url(self) -> str:
        return f"http://{self.metrics}/metrics"

    def records(self, event: str) -> list[dict[str, Any]]:
        """This daemon's log lines of one kind, oldest first."""
        found: list[dict[str, Any]] = []
        for line in self.log.read_text(encoding="utf-8", errors="replace").splitlines():
            if not line.startswith("{"):
                continue
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record.get("event") == event:
                found.append(record)
        return found


@dataclass(frozen=True, slots=True)
class DaemonCounts:
    """Bytes that a daemon counted as fetched into, and served out of, its engines."""

    fetched: int
    served: int
    fetches: int

    def __sub__(self, earlier: DaemonCounts) -> DaemonCounts:
        return DaemonCounts(
            self.fetched - earlier.fetched,
            self.served - earlier.served,
            self.fetches - earlier.fetches,
        )


async def start_daemon(
    children: Children,
    client: Client,
    name: str,
    *,
    folder: Path,
    config: Mapping[str, str],
    program: Sequence[str] = SERVE,
    like: Daemon | None = None,
) -> Daemon:
    """Start a daemon and wait until it is ready.

    `like`: one that has ended, whose addresses this one takes over. Raises DemoError with the end
    of its log when it refuses to start.
    """
    socket = folder / f"{name}.sock"
    discovery = socket.with_suffix(".json")
    listen, metrics, bootstrap = (
        (like.listen, like.metrics, like.bootstrap) if like else (ANY, ANY, ANY)
    )
    life = like.life + 1 if like else 1
    argv = _argv(program, socket, listen, metrics, bootstrap, config)
    log = folder / f"{name}-daemon-{life}.log"
    child = children.start(
        f"{name} daemon", argv, log=log, env={"KVD_DIE_WITH_PARENT": str(os.getpid())}, grace_s=10.0
    )

    async def ready() -> bool:
        if not child.alive():
            raise DemoError(
                f"the {name} daemon ended with exit code {child.exit_code()} instead of starting:\n"
                f"{child.tail()}\nIts log: {log}"
            )
        return _discovered(discovery, child.pid) is not None

    await until(ready, START_S, f"the {name} daemon is ready (its log: {log})", every=0.05)
    found = _discovered(discovery, child.pid)
    assert found is not None
    listen, metrics, bootstrap = (
        _address(found[key]) for key in ("listen", "metrics", "bootstrap")
    )
    daemon = Daemon(name, child, socket, listen, metrics, bootstrap, log, config, life)

    async def answers() -> bool:
        return await client.status(f"http://{daemon.metrics}/readyz") == 200

    await until(answers, START_S, f"the {name} daemon says that it is ready (its log: {log})")
    return daemon


async def daemon_counts(client: Client, daemon: Daemon) -> DaemonCounts:
    """Read the counters now. Raises DemoError."""
    metrics = await client.metrics(daemon.metrics_url)
    return DaemonCounts(
        round(total(metrics, "kvd_fetched_bytes_total")),
        round(total(metrics, "kvd_served_bytes_total")),
        round(total(metrics, "kvd_fetches_total")),
    )


def sessions(metrics: Metrics) -> float:
    """Engines that have described their memory to this daemon."""
    return total(metrics, "kvd_sessions")


def _argv(
    program: Sequence[str],
    socket: Path,
    listen: str,
    metrics: str,
    bootstrap: str,
    config: Mapping[str, str],
) -> list[str]:
    module, *command = program
    settings = {
        "socket": str(socket),
        "listen": listen,
        "metrics": metrics,
        "bootstrap": bootstrap,
        "discovery_file": str(socket.with_suffix(".json")),
        "log_format": "json",
        **config,
    }
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in settings.items()]
    return [sys.executable, "-m", module, *command, *flags]


def _discovered(path: Path, pid: int) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("pid") == pid else None


def _address(value: object) -> str:
    return str(value).removeprefix("tcp://").removeprefix("http://")
