"""The shell's parts run on the loop that the daemon runs on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import uvloop

from tests.unit.shell.ends import Bench
from tests.unit.shell.fakes import Shell


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
async def shell(tmp_run_dir: Path, executor: ThreadPoolExecutor) -> AsyncIterator[Shell]:
    """A LocalServer on a socket of its own, with a core that only writes down what it hears."""
    made = Shell(tmp_run_dir / "kvd.sock", executor)
    yield made
    await made.close()


@pytest.fixture
async def bench(tmp_run_dir: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_run_dir)
    yield made
    await made.close()
