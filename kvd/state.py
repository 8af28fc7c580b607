"""One daemon's state as plain values: what `/v1/status` answers and `kvd status` shows."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvd import __version__
from kvd.protocol.version import PROTO_MAJOR, PROTO_MINOR

if TYPE_CHECKING:
    from kvd.core.machine import Core
    from kvd.history import History
    from kvd.peers.curve import Curve
    from kvd.peers.server import PeerServer
    from kvd.peers.table import PeerTable
    from kvd.settings import Settings

MAX_ROWS = 256
"""Of each list; `counts` say how many there really are."""


def collect(
    *,
    core: Core,
    peers: PeerTable,
    clients: PeerServer,
    history: History,
    settings: Settings,
    curve: Curve | None,
    daemon_id: str,
    addresses: Mapping[str, object],
    started: float,
    not_ready: Mapping[str, str],
    mapped_bytes: int,
) -> dict[str, object]:
    """All of it, with every list cut at MAX_ROWS. `started` is of time.monotonic()."""
    now = core.statistics()
    seen = core.snapshot()
    return {
        "daemon": {
            "daemon_id": daemon_id,
            "pid": os.getpid(),
            "uid": os.geteuid(),
            "version": __version__,
            "protocol": f"{PROTO_MAJOR}.{PROTO_MINOR}",
            "uptime_s": time.monotonic() - started,
            "ready": not not_ready,
            "reasons": dict(not_ready),
            "draining": now.draining,
            "transports": list(settings.transports),
            "keys": None if curve is None else len(curve.ring.peers),
            "allow_peers": list(settings.allow_peers),
            "time": time.time(),
            **addresses,
        },
        "counts": asdict(now),
        "mapped_bytes": mapped_bytes,
        "engines": [asdict(view) for view in seen.sessions[:MAX_ROWS]],
        "offers": [asdict(view) for view in seen.offers[:MAX_ROWS]],
        "fetches": [asdict(view) for view in seen.fetches[:MAX_ROWS]],
        "attachments": [asdict(view) for view in seen.attachments[:MAX_ROWS]],
        "peers": peers.views()[:MAX_ROWS],
        "clients": clients.clients()[:MAX_ROWS],
        "failures": history.failures(),
    }
