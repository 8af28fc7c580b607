"""Tracked tasks: none is lost to the garbage collector, and no exception goes unseen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

log = structlog.get_logger("kvd.tasks")


class TaskSet:
    """Tasks of one owner. A task that raises is logged, counted, and told to its `on_error`."""

    def __init__(self, on_bug: Callable[[str, BaseException], None] | None = None) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_bug = on_bug

    def start(
        self,
        coroutine: Coroutine[Any, Any, None],
        name: str,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> asyncio.Task[None]:
        """Runs `coroutine` to its end; `on_error` gets an exception that it did not handle."""
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)

        def done(ended: asyncio.Task[None]) -> None:
            self._tasks.discard(ended)
            if ended.cancelled():
                return
            error = ended.exception()
            if error is None:
                return
            log.error("task_failed", task=name, exc_info=error)
            if self._on_bug is not None:
                self._on_bug(name, error)
            if on_error is not None:
                on_error(error)

        task.add_done_callback(done)
        return task

    def __len__(self) -> int:
        return len(self._tasks)

    async def wait(self, timeout_s: float) -> bool:
        """Waits until all have ended; False when some have not within `timeout_s`."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        return not self._tasks

    async def cancel(self, timeout_s: float = 5.0) -> None:
        """Cancels all, and waits for their end no longer than `timeout_s`."""
        for task in set(self._tasks):
            task.cancel()
        await self.wait(timeout_s)
