"""Fixtures that every part of the suite shares. The leak check is in `tests/plugins/leaks.py`."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from tests.plugins import leaks

pytest_plugins = ["tests.plugins.leaks"]

T = TypeVar("T")
RUN_ROOT = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    # pytest's own tmp_path is too long for a Unix socket, whose path ends at 107 bytes.
    root = Path(tempfile.mkdtemp(prefix="kvdt-", dir="/tmp"))
    config.stash[RUN_ROOT] = root
    leaks.start(config, root)
    # A user's own settings must not reach the daemons under test.
    for name in [n for n in os.environ if n.startswith("KVD_") and n != leaks.MARK_ENV]:
        del os.environ[name]


def pytest_unconfigure(config: pytest.Config) -> None:
    root = config.stash.get(RUN_ROOT, None)
    if root is not None:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def tmp_run_dir(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A private runtime folder (mode 0700) with a path short enough for sockets in it."""
    path = Path(tempfile.mkdtemp(prefix="", dir=request.config.stash[RUN_ROOT]))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def wait_for(
    condition: Callable[[], T | None], timeout: float = 10.0, *, what: str = "", every: float = 0.01
) -> T:
    """Polls until `condition()` is true and returns its value; fails the test after `timeout` s.

    `what` says in the failure what was waited for.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            name = what or getattr(condition, "__name__", repr(condition))
            pytest.fail(f"not within {timeout:g} s: {name} (last value {value!r})")
        time.sleep(every)


async def wait_for_async(
    condition: Callable[[], Awaitable[T | None] | T | None],
    timeout: float = 10.0,
    *,
    what: str = "",
    every: float = 0.01,
) -> T:
    """As `wait_for`, for a coroutine: the loop goes on running. `condition` may be async."""
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if isinstance(value, Awaitable):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            name = what or getattr(condition, "__name__", repr(condition))
            pytest.fail(f"not within {timeout:g} s: {name} (last value {value!r})")
        await asyncio.sleep(every)
