"""Starts what a test wants, and ends it whatever happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.daemon.engine import Engine
from tests.integration.daemon.harness import Daemon, EngineProcess, Process


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
        while self._ends:
            self._ends.pop()()

    def logs(self) -> str:
        return "\n".join(f"--- {p.name}\n{p.tail()}" for p in self._processes)


@pytest.fixture
def site(tmp_run_dir: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    made = Site(tmp_run_dir)
    yield made
    print(made.logs())  # shown when the test fails
    made.close()
