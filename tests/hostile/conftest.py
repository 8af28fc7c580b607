"""One target for each module's tests; each test looks whether it was harmed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.conftest import RUN_ROOT
from tests.hostile.doors import DataDoor, HttpDoor, UnixDoor, ZmqDoor
from tests.hostile.target import Target
from tests.integration.daemon.conftest import Site, site

__all__ = ["site"]


@pytest.fixture(scope="module")
def attacked(request: pytest.FixtureRequest) -> Iterator[Target]:
    folder = Path(tempfile.mkdtemp(dir=request.config.stash[RUN_ROOT]))
    made = Site(folder)
    try:
        yield Target(made, folder)
    finally:
        print(made.logs())
        made.close()
        shutil.rmtree(folder)


@pytest.fixture
def target(attacked: Target) -> Iterator[Target]:
    """Unharmed, and serving its good peer before, during and after the test."""
    with attacked.unharmed(), attacked.served_meanwhile():
        yield attacked


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    made.set(zmq.MAX_SOCKETS, 4096)
    yield made
    made.destroy(0)


@pytest.fixture
def zmq_door(target: Target, context: zmq.Context[Any]) -> ZmqDoor:
    return ZmqDoor(context, str(target.at))


@pytest.fixture
def data_door(target: Target) -> DataDoor:
    return DataDoor(target.data_port)


@pytest.fixture
def unix_door(target: Target) -> UnixDoor:
    return UnixDoor(target.p.socket)


@pytest.fixture
def http_door(target: Target) -> HttpDoor:
    return HttpDoor(target.http)
