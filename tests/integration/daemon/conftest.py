"""Starts what a test wants, and ends it whatever happened."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvd.protocol import local
from kvd.protocol.types import PeerAddr
from tests.conftest import RUN_ROOT
from tests.integration.daemon.engine import Engine
from tests.integration.daemon.harness import Daemon, EngineProcess, Process

TRANSPORTS = ["shm", "tcp"]


class Site:
    """One test's daemons and engines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ends: list[Callable[[], None]] = []
        self._processes: list[Process] = []

    def daemon(self, name: str, **settings: Any) -> Daemon:
        made = Daemon(name, self.folder, **settings)
        self._ends.append(made.stop)
        self._processes.append(made)
        return made

    def engine(self, daemon: Daemon, engine_id: str, **setup: Any) -> Engine:
        """An engine in this process."""
        made = Engine(daemon.socket, engine_id, **setup)
        self._ends.append(made.close)
        return made

    def process(self, daemon: Daemon, engine_id: str, **setup: Any) -> EngineProcess:
        """An engine in a process of its own."""
        made = EngineProcess(engine_id, self.folder, daemon.socket, engine_id, **setup)
        self._ends.append(made.stop)
        self._processes.append(made)
        return made

    def close(self) -> None:
        """Ends everything, and fails the test if a daemon's loop was held up."""
        while self._ends:
            self._ends.pop()()
        daemons = {p.name: p for p in self._processes if isinstance(p, Daemon)}
        slow = [line for one in daemons.values() for line in one.slow_callbacks()]
        assert slow == [], "callbacks that held up a daemon's loop"

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.tail()}" for p in self._processes)


@pytest.fixture
def site(tmp_run_dir: Path) -> Iterator[Site]:
    made = Site(tmp_run_dir)
    yield made
    print(made.logs())  # shown when the test fails
    made.close()


class Pair:
    """A producer's and a consumer's daemon that several tests share; engines are each test's."""

    def __init__(self, p: Daemon, d: Daemon) -> None:
        self.p = p
        self.d = d
        self.remote: PeerAddr | None = None
        self.producer_id = ""
        self._numbers = itertools.count()
        self._engines: list[Engine] = []

    def engines(self, *, seed: int, **setup: Any) -> tuple[Engine, Engine]:
        """A producer and a consumer that are registered."""
        number = next(self._numbers)
        self.producer_id = f"producer-{number}"
        producer = Engine(self.p.socket, self.producer_id, seed=seed, **setup)
        consumer = Engine(self.d.socket, f"consumer-{number}", **setup)
        self._engines += [producer, consumer]
        self.remote = producer.up()
        consumer.up()
        return producer, consumer

    def start(self, consumer: Engine, transfer_id: str, blocks: list[int], **how: Any) -> str:
        assert self.remote is not None
        fetch_id = consumer.start_fetch(
            transfer_id, blocks, **{"remote": self.remote, "engine_id": self.producer_id, **how}
        )
        consumer.poll()
        return fetch_id

    def fetch(
        self, consumer: Engine, transfer_id: str, blocks: list[int], **how: Any
    ) -> local.FetchDone:
        return consumer.finish(self.start(consumer, transfer_id, blocks, **how))

    def close_engines(self) -> None:
        while self._engines:
            self._engines.pop().close()


@pytest.fixture(scope="module", params=TRANSPORTS)
def daemons(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two daemons for a whole module, over each transport."""
    folder = Path(tempfile.mkdtemp(dir=request.config.stash[RUN_ROOT]))
    made = Site(folder)
    p, d = (made.daemon(name, transport=request.param) for name in "pd")
    yield Pair(p.ready(), d.ready())
    print(made.logs())
    made.close()
    shutil.rmtree(folder)


@pytest.fixture
def pair(daemons: Pair) -> Iterator[Pair]:
    yield daemons
    daemons.close_engines()
