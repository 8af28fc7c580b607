"""A small engine's memory, open."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvd.memory.engine import EngineMemory
from tests.unit.memory.parts import simple


@pytest.fixture
def memory() -> Iterator[EngineMemory]:
    opened = simple()
    yield opened
    opened.close_when_unpinned()
    assert opened.wait_closed_blocking(5.0)
