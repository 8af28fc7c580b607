"""The processes of one transport's site: four daemons, an engine at each, and a bad network.

`pk` and `dk` (a producer's daemon and a consumer's) are killed and restarted; `ps` and `ds` are
only stopped for a while, so that what they hold can be compared with what they held before.
What `ps` sends goes through a lossy proxy, or else everything goes through a cable between two
network namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kvd.demo.ports import Ports
from tests.chaos.namespaces import Cable
from tests.chaos.proxy import LossyProxy
from tests.integration.daemon.harness import Daemon, Process

LAYERS, BLOCKS, BLOCK_BYTES = 4, 400, 32 * 1024
HANG_S = 5.0
STEADY_HANG_S = 120.0
PROXY_HOST = "127.0.0.2"
SETTINGS: dict[str, Any] = {
    "log_level": "info",
    "heartbeat_s": 0.25,
    "peer_timeout_s": 2.0,
    "data_timeout_s": 2.0,
    "connect_timeout_s": 1.5,
    "attach_timeout_s": 3.0,
    "drain_timeout_s": 2.0,
    "release_linger_s": 0.01,
    "failure_cache_s": 0.1,
    "fence_grace_s": 0.5,
    "lease_max_s": 10.0,
    "fetch_max_s": 20.0,
    "tombstone_ttl_s": 5.0,
    "early_release_ttl_s": 5.0,
    "min_job_bytes": 256 * 1024,
    "max_job_bytes": 2 * 2**20,
}
DAEMONS = ("pk", "ps", "dk", "ds")
KILLABLE = ("pk", "dk")


class Keeper:
    """A daemon that is started again, where it was, whenever it has ended."""

    def __init__(
        self, name: str, folder: Path, transport: str, cable: Cable | None, ports: Ports
    ) -> None:
        self.name = name
        self.steady = name not in KILLABLE
        self.stopped = False
        self.asked = False
        """Asked by SIGTERM to end, which may come before it can take signals."""
        self.starts = 0
        self._folder = folder
        self._settings = {**SETTINGS, "transport": transport}
        if self.steady:
            # Elsewhere a fetch over shm is one job, as it is by default.
            self._settings["max_shm_job_bytes"] = SETTINGS["max_job_bytes"]
        self._cable = cable
        self._end = int(name.startswith("d"))
        if cable is not None:
            self._settings |= {
                "listen": f"{cable.hosts[self._end]}:0",
                "allow_peers": cable.network,
                "insecure": "true",
            }
        else:
            # While it is dead, the kernel could give a port of its own range to a connection.
            self._settings["listen"] = f"127.0.0.1:{ports.reserve()}"
            if transport == "tcp":
                self._settings["data_listen"] = f"127.0.0.1:{ports.reserve()}"
        self.daemon = self._start()

    def _start(self) -> Daemon:
        self.starts += 1
        self.asked = False
        where = contextlib.nullcontext() if self._cable is None else self._cable.inside(self._end)
        with where:
            return Daemon(self.name, self._folder, **self._settings)

    def keep_address(self) -> tuple[str, list[int]]:
        """Once it serves: its host, its control port and its data port if any: kept from now on."""
        found = self.daemon.found
        host, _, port = str(found["advertise"]).rpartition(":")
        self._settings["listen"] = f"{host}:{port}"
        if found["data_port"] is None:
            return host, [int(port)]
        self._settings["data_listen"] = f"{host}:{found['data_port']}"
        return host, [int(port), int(found["data_port"])]

    def signal(self, number: signal.Signals) -> None:
        if self.daemon.popen.poll() is None:
            self.asked |= number == signal.SIGTERM
            self.daemon.kill(number)

    def revive(self) -> int | None:
        """Its exit status if it had ended; it is started again then."""
        status = self.daemon.popen.poll()
        if status is None:
            return None
        self.stopped = False
        if self.asked and status == -signal.SIGTERM:
            status = 0
        self.daemon = self._start()
        return int(status)

    def holds(self) -> dict[str, int]:
        """Descriptors, threads and KiB of private memory."""
        status = dict(
            line.split(":", 1)
            for line in Path(f"/proc/{self.daemon.pid}/status").read_text().splitlines()
        )
        return {
            "fds": self.daemon.fds(),
            "threads": int(status["Threads"]),
            "anon_kib": int(status["RssAnon"].split()[0]),
        }


class EngineChild(Process):
    """`tests.chaos.engine`; what it says is read by the driver's selector."""

    def __init__(self, name: str, folder: Path, daemon: Keeper, number: int) -> None:
        setup = {
            "socket": daemon.daemon.socket,
            "engine_id": name,
            "number": number,
            "num_layers": LAYERS,
            "num_blocks": BLOCKS,
            "block_bytes": BLOCK_BYTES,
            "daemon_hang_s": STEADY_HANG_S if daemon.steady else HANG_S,
        }
        super().__init__(
            name,
            folder,
            [sys.executable, "-m", "tests.chaos.engine", json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self.name = name
        self.at = daemon
        self.up = False
        self.stopped = False
        self._rest = b""
        self._unsent = b""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        os.set_blocking(self.popen.stdin.fileno(), False)
        os.set_blocking(self.popen.stdout.fileno(), False)

    def tell(self, op: str, **what: Any) -> None:
        """Queues a command; a stopped engine reads it later."""
        self._unsent += json.dumps({"op": op, **what}).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._unsent:
                self._unsent = self._unsent[os.write(self.popen.stdin.fileno(), self._unsent) :]

    def hear(self) -> list[dict[str, Any]] | None:
        """What it said; None at its end."""
        assert self.popen.stdout is not None
        try:
            part = os.read(self.popen.stdout.fileno(), 2**18)
        except BlockingIOError:
            return []
        if not part:
            return None
        *lines, self._rest = (self._rest + part).split(b"\n")
        return [json.loads(line) for line in lines]


class Site:
    """Everything that runs for one transport; `close` ends all of it."""

    def __init__(
        self, folder: Path, transport: str, first_number: int, *, namespaces: bool = False
    ) -> None:
        """With `namespaces` producers and consumers are on two hosts, as it were; needs root."""
        self.folder = folder
        self.transport = transport
        self.daemons: dict[str, Keeper] = {}
        self.engines: dict[str, EngineChild] = {}
        self.network: LossyProxy | Cable | None = None
        """What `stall`s and `heal`s. A proxy carries only what goes to `ps`, a cable all."""
        self.selector = selectors.DefaultSelector()
        self._first_number = first_number
        self._ports = Ports()
        try:
            cable = Cable(first_number) if namespaces else None
            self.network = cable
            for name in DAEMONS:
                self.daemons[name] = Keeper(name, folder, transport, cable, self._ports)
            self.remotes: dict[str, tuple[str, int]] = {}
            for name, keeper in self.daemons.items():
                host, ports = keeper.keep_address()
                self.remotes[name] = host, ports[0]
                if name == "ps" and cable is None:
                    self.network = LossyProxy(PROXY_HOST, host, ports)
                    self.remotes[name] = PROXY_HOST, ports[0]
            for name in DAEMONS:
                self.start_engine(name)
        except BaseException:
            self.close()
            raise

    def number(self, name: str) -> int:
        """What the stamps call this daemon's engine."""
        return self._first_number + DAEMONS.index(name)

    def start_engine(self, name: str) -> None:
        engine = EngineChild(f"e{name}", self.folder, self.daemons[name], self.number(name))
        self.engines[name] = engine
        self.selector.register(engine.popen.stdout, selectors.EVENT_READ, name)  # type: ignore[arg-type]

    def drop_engine(self, name: str) -> None:
        engine = self.engines.pop(name)
        self.selector.unregister(engine.popen.stdout)  # type: ignore[arg-type]
        engine.stop()

    def wait(self, seconds: float) -> list[tuple[str, list[dict[str, Any]] | None]]:
        """What engines said, None at the end of one."""
        for engine in self.engines.values():
            engine.flush()
        ready = self.selector.select(seconds)
        return [(key.data, self.engines[key.data].hear()) for key, _ in ready]

    def close(self) -> None:
        for name in list(self.engines):
            self.drop_engine(name)
        for keeper in self.daemons.values():
            keeper.signal(signal.SIGTERM)
            keeper.signal(signal.SIGCONT)
        deadline = time.monotonic() + 15.0
        for keeper in self.daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                keeper.daemon.wait(max(0.1, deadline - time.monotonic()))
            keeper.daemon.stop()
        if self.network is not None:
            self.network.close()
        self._ports.close()
        self.selector.close()

    def logs(self) -> str:
        """The ends of all logs, for a failure's text."""
        processes = [*(keeper.daemon for keeper in self.daemons.values()), *self.engines.values()]
        return "\n".join(f"--- {process.name}\n{process.tail()}" for process in processes)
