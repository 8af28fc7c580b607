"""A thread that talks to one GPU: it puts work on streams and watches events.

Nobody waits for the GPU but this thread, and it only polls. The event loop hears of ends through
futures; how long a call or a piece of work has been under way can be asked at any time, so that a
GPU that hangs is noticed from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kvd.errors import KvdError
from kvd.memory.cuda.device import Gpu
from kvd.memory.cuda.driver import CudaError
from kvd.protocol.codes import Code

T = TypeVar("T")

POLL_S = (50e-6, 1e-3)
"""Between two looks at unfinished events: shortest, and longest when nothing happens for long."""


@dataclass(slots=True)
class _Pending:
    event: Any
    since: float
    future: asyncio.Future[None]
    loop: asyncio.AbstractEventLoop
    failure: KvdError | None


class GpuThread:
    """`close` ends it; a thread that hangs in a call is left behind, and said so."""

    def __init__(self, gpu: Gpu, name: str, on_broken: Callable[[CudaError], None]) -> None:
        """`on_broken` is called, on this thread, once the GPU is lost to this process."""
        self.gpu = gpu
        self._on_broken = on_broken
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pending: list[_Pending] = []
        self._events: list[Any] = []
        self._call_since: float | None = None
        self._closed = False
        self.ticks = 0
        """Grows with each round; one that stands still is hung in a call or idle."""
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    # --- from the loop -------------------------------------------------------------------------

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """Runs it on the thread, after what was asked before."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = function()
            except Exception as exc:
                _settle(loop, future, None, _foreign(exc))
            else:
                _settle(loop, future, result, None)

        self._put(run, future)
        return future

    def launch(self, stream: Any, enqueue: Callable[[], None]) -> asyncio.Future[None]:
        """Puts work on a stream; the future is done when the stream has done it, and fails only
        when nothing of it runs any more. Raises nothing itself.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def run() -> None:
            self._start(stream, enqueue, loop, future)

        self._put(run, future)
        return future

    @property
    def call_for(self) -> float:
        """Seconds that the thread has been in one call; 0 between calls."""
        since = self._call_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def work_for(self) -> float:
        """Seconds that the oldest unfinished work has been on its stream; 0 without any."""
        pending = self._pending[:1]
        return time.monotonic() - pending[0].since if pending else 0.0

    @property
    def idle(self) -> bool:
        return not self._pending and self._call_since is None

    def close(self, timeout_s: float) -> bool:
        """Ends the thread once its work has ended; False if it has not within `timeout_s`."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        self.thread.join(timeout_s)
        return not self.thread.is_alive()

    def _put(self, run: Callable[[], None], future: asyncio.Future[Any]) -> None:
        if self._closed:
            future.set_exception(KvdError("the GPU's thread is closed", Code.CANCELLED))
            return
        self._queue.put(run)

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        closing = False
        pause = POLL_S[0]
        while not closing or self._pending:
            self.ticks += 1
            try:
                task = self._queue.get(timeout=pause) if self._pending else self._queue.get()
            except queue.Empty:
                pause = min(2 * pause, POLL_S[1])
            else:
                pause = POLL_S[0]
                if task is None:
                    closing = True
                else:
                    self._in_call(task)
            if self._poll():
                pause = POLL_S[0]
        for event in self._events:
            with contextlib.suppress(CudaError):
                self.gpu.driver.event_destroy(event)

    def _in_call(self, task: Callable[[], Any]) -> Any:
        self._call_since = time.monotonic()
        try:
            self.gpu.bind()
            return task()
        finally:
            self._call_since = None

    def _start(
        self,
        stream: Any,
        enqueue: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[None],
    ) -> None:
        driver = self.gpu.driver
        failure: KvdError | None = None
        try:
            event = self._events.pop() if self._events else driver.event_create()
        except CudaError as exc:
            _settle(loop, future, None, exc)
            return
        try:
            enqueue()
        except Exception as exc:
            # Part of it may be on the stream: told as failed only when that has ended.
            failure = _foreign(exc)
        try:
            driver.event_record(event, stream)
        except CudaError as exc:
            self._events.append(event)
            self._lost(exc)
            _settle(loop, future, None, exc)
            return
        self._pending.append(_Pending(event, time.monotonic(), future, loop, failure))

    def _poll(self) -> bool:
        """Whether some work was found to have ended."""
        ended = []
        for one in self._pending:
            try:
                if not self._in_call(partial(self.gpu.driver.event_done, one.event)):
                    continue
            except CudaError as exc:
                one.failure = exc
                self._lost(exc)
            ended.append(one)
        for one in ended:
            self._pending.remove(one)
            self._events.append(one.event)
            _settle(one.loop, one.future, None, one.failure)
        return bool(ended)

    def _lost(self, exc: CudaError) -> None:
        """A stream that fails has failed for good, and so has all else in this process."""
        self._on_broken(exc)


def _foreign(exc: Exception) -> KvdError:
    return exc if isinstance(exc, KvdError) else KvdError(f"{exc!r}", Code.INTERNAL)


def _settle(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future[T],
    result: T | None,
    failure: KvdError | None,
) -> None:
    def settle() -> None:
        if future.done():
            return
        if failure is not None:
            future.set_exception(failure)
            future.exception()  # nobody may be waiting any more
        else:
            future.set_result(result)  # type: ignore[arg-type]

    with contextlib.suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(settle)
