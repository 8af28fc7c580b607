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
async def make_shell(
    tmp_run_dir: Path, executor: ThreadPoolExecutor
) -> AsyncIterator[Callable[..., Shell]]:
    """Makes LocalServers with a core that only writes down what it hears."""
    made: list[Shell] = []

    def make(path: Path | None = None, **limits: int) -> Shell:
        made.append(Shell(path or tmp_run_dir / f"kvd-{len(made)}.sock", executor, **limits))
        return made[-1]

    yield make
    for shell in made:
        await shell.close()


@pytest.fixture
async def shell(make_shell: Callable[..., Shell]) -> Shell:
    """One with the usual limits."""
    return make_shell()


@pytest.fixture
async def bench(tmp_run_dir: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_run_dir)
    yield made
    await made.close()
