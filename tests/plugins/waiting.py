"""Waiting for a condition with a deadline: what tests use where others would sleep."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

T = TypeVar("T")


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
