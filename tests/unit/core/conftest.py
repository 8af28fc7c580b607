"""One producer and one consumer, each behind a daemon of its own."""

from __future__ import annotations

import pytest

from tests.unit.core.consumer_daemon import Daemon
from tests.unit.core.engine import Engine
from tests.unit.core.world import World


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def producer(world: World) -> Engine:
    return world.node("p").engine("P")


@pytest.fixture
def consumer(world: World) -> Engine:
    return world.node("d").engine("D")


@pytest.fixture
def daemon(producer: Engine) -> Daemon:
    return Daemon(producer)
