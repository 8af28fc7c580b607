"""The pool's turns, and its end, with works that only count."""

from __future__ import annotations

import threading

import pytest

from kvd.transport.copy_pool import Batch, CopyPool

LONG = 20.0


class Counting:
    """A work of `batches` batches, each of which notes its name; the first may wait."""

    def __init__(
        self,
        owner: int,
        name: str,
        batches: int,
        log: list[str],
        gate: threading.Event | None = None,
    ) -> None:
        self.owner = owner
        self._name = name
        self._left = batches
        self._log = log
        self._gate = gate
        self.started = threading.Event()
        self.finished = threading.Event()
        self.finishes = 0

    def next_batch(self) -> Batch | None:
        if self._left == 0:
            return None
        self._left -= 1
        return self._run

    def _run(self) -> None:
        self.started.set()
        if self._gate is not None:
            assert self._gate.wait(LONG)
        self._log.append(self._name)

    def finish(self) -> None:
        self.finishes += 1
        self.finished.set()


def test_owners_take_turns_and_so_do_the_works_of_one_owner() -> None:
    log: list[str] = []
    gate = threading.Event()
    pool = CopyPool(1)
    first = Counting(0, "gate", 1, log, gate)
    pool.submit(first)
    assert first.started.wait(LONG)
    works = [
        Counting(1, "a1", 3, log),
        Counting(1, "a2", 2, log),
        Counting(2, "b1", 2, log),
        Counting(3, "c1", 1, log),
    ]
    for work in works:
        pool.submit(work)
    gate.set()
    for work in [first, *works]:
        assert work.finished.wait(LONG)
    assert pool.close(LONG)
    assert log[:4] == ["gate", "a1", "b1", "c1"]
    # A large work holds up no other: neither of another owner nor of its own.
    assert [name for name in log if name[0] == "a"] == ["a1", "a2", "a1", "a2", "a1"]
    assert log[4:6] == ["a2", "b1"]
    assert all(work.finishes == 1 for work in [first, *works])


def test_a_dropped_work_finishes_once_when_its_running_batch_ends() -> None:
    log: list[str] = []
    gate = threading.Event()
    pool = CopyPool(1)
    running, queued = Counting(1, "r", 5, log, gate), Counting(1, "q", 5, log)
    pool.submit(running)
    pool.submit(queued)
    assert running.started.wait(LONG)
    pool.drop(queued)
    assert queued.finished.is_set()
    pool.drop(running)
    pool.drop(running)
    assert not running.finished.is_set()
    gate.set()
    assert running.finished.wait(LONG)
    assert pool.close(LONG)
    assert log == ["r"]
    assert (running.finishes, queued.finishes) == (1, 1)


def test_closing_finishes_all_and_says_whether_a_thread_hangs() -> None:
    log: list[str] = []
    gate = threading.Event()
    pool = CopyPool(2)
    running, queued = Counting(1, "r", 9, log, gate), Counting(2, "q", 0, log)
    pool.submit(running)
    assert running.started.wait(LONG)
    assert not pool.close(0.01)
    pool.drop(queued)  # never submitted: nothing happens
    with pytest.raises(RuntimeError):
        pool.submit(queued)
    gate.set()
    assert pool.close(LONG)
    assert running.finishes == 1


def test_a_pool_needs_a_thread() -> None:
    with pytest.raises(ValueError, match="0 copy threads"):
        CopyPool(0)
