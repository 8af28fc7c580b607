from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from connector_shim.client import Client
from tests.unit.client.fake import FakeClock, FakeDaemon, describe


@pytest.fixture
def path(tmp_run_dir: Path) -> Path:
    return tmp_run_dir / "kvd.sock"


@pytest.fixture
def daemon(path: Path) -> Iterator[FakeDaemon]:
    found = FakeDaemon(path)
    yield found
    found.die()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def make_client(path: Path, clock: FakeClock) -> Iterator[Callable[..., Client]]:
    """Clients with memory, on the fake clock unless `clock` says otherwise."""
    made: list[Client] = []

    def make(**settings: Any) -> Client:
        settings.setdefault("clock", clock)
        client = Client(str(path), engine_id="engine", **settings)
        made.append(client)
        describe(client)
        return client

    yield make
    for client in made:
        client.close(0.0)


@pytest.fixture
def client(make_client: Callable[..., Client]) -> Client:
    return make_client()


@pytest.fixture
def up(client: Client, daemon: FakeDaemon) -> Client:
    """A registered client; `daemon` is who it is registered with."""
    daemon.take_in(client)
    return client
