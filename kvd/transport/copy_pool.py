"""The daemon's copy threads: a fixed number, shared fairly between pullers."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvd.transport.pulse import Pulse

Batch = Callable[[], None]


class Work(Protocol):
    """Something that is done in batches by several threads at once."""

    owner: int
    """Owners take turns, and so do the works of one owner."""

    def next_batch(self) -> Batch | None:
        """The next part, or None when no more is to be done. Called under the pool's lock, and
        neither it nor a batch may raise."""
        ...

    def finish(self) -> None:
        """Called once, without the lock, when no batch runs and none will."""
        ...


class CopyPool:
    """`threads` daemon threads, made once, that live until `close`."""

    def __init__(self, threads: int, pulse: Pulse | None = None) -> None:
        self._pulse = pulse or Pulse()
        if threads < 1:
            raise ValueError(f"{threads} copy threads")
        self.num_threads = threads
        self._cond = threading.Condition()
        self._queues: dict[int, deque[Work]] = {}
        self._turns: deque[int] = deque()
        self._active: dict[Work, int] = {}
        self._spent: set[Work] = set()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvd-copy-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Work) -> None:
        """Queues work; raises RuntimeError once the pool is closed."""
        with self._cond:
            if self._closed:
                raise RuntimeError("the copy pool is closed")
            queue = self._queues.get(work.owner)
            if queue is None:
                queue = self._queues[work.owner] = deque()
                self._turns.append(work.owner)
            queue.append(work)
            self._active[work] = 0
            self._cond.notify_all()

    def drop(self, work: Work) -> None:
        """No further batch of `work` is begun; it finishes as soon as its running ones end."""
        with self._cond:
            if work not in self._active or work in self._spent:
                return
            self._spend(work)
            finished = self._finished(work)
        if finished:
            work.finish()

    def close(self, timeout_s: float) -> bool:
        """Drops what is queued and ends the threads; False if one still runs after `timeout_s`."""
        with self._cond:
            self._closed = True
            works = [work for queue in self._queues.values() for work in queue]
            self._cond.notify_all()
        for work in works:
            self.drop(work)
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def dead(self) -> list[str]:
        """Names of threads that ended although the pool is open; there should be none, ever."""
        return [] if self._closed else [t.name for t in self._threads if not t.is_alive()]

    def _run(self) -> None:
        # One turn of the lock for each batch: what Python does between two copies runs with cold
        # caches, and adds up.
        work: Work | None = None
        while True:
            batch: Batch | None = None  # what it holds must be gone before the work finishes
            finished = False
            with self._cond:
                if work is not None:
                    self._active[work] -= 1
                    finished = self._finished(work)
                if not finished:
                    work = None
                    if not self._wait():
                        return
                    work, batch = self._take()
                    finished = batch is None and self._finished(work)
            if batch is not None:
                batch()
                continue
            if finished and work is not None:
                work.finish()
            work = None

    def _wait(self) -> bool:
        """Waits for work; False once the pool is closed."""
        while not self._turns and not self._closed:
            self._pulse.idle()
            self._cond.wait()
        if self._closed:
            self._pulse.idle()
        else:
            self._pulse.busy()
        return not self._closed

    def _take(self) -> tuple[Work, Batch | None]:
        owner = self._turns[0]
        self._turns.rotate(-1)
        queue = self._queues[owner]
        work = queue[0]
        queue.rotate(-1)
        batch = work.next_batch()
        if batch is None:
            self._spend(work)
        else:
            self._active[work] += 1
        return work, batch

    def _spend(self, work: Work) -> None:
        self._spent.add(work)
        queue = self._queues[work.owner]
        queue.remove(work)
        if not queue:
            del self._queues[work.owner]
            self._turns.remove(work.owner)

    def _finished(self, work: Work) -> bool:
        if work not in self._spent or self._active[work] > 0:
            return False
        self._spent.remove(work)
        del self._active[work]
        return True
