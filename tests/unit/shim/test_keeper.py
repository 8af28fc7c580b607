"""A daemon of our own: started, started again with growing pauses, ended."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from connector_shim.errors import ClientError
from connector_shim.keeper import LAST_RETRY_S, STEADY_S, DaemonKeeper
from kvd.protocol.codes import Code
from tests.unit.shim.fakes import Clock


class FakeChild:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        self.stopped: list[tuple[float, float]] = []

    def exit_code(self) -> int | None:
        return self.code

    def stop(self, grace_s: float = 5.0, kill_wait_s: float = 5.0) -> int | None:
        self.stopped.append((grace_s, kill_wait_s))
        return 0


class Starts:
    def __init__(self) -> None:
        self.children: list[FakeChild] = []
        self.asked: list[tuple[str, Any]] = []
        self.fail = False

    def __call__(self, path: str, *, settings: Any) -> FakeChild:
        self.asked.append((path, settings))
        if self.fail:
            raise ClientError(Code.NO_SPACE, "no process")
        self.children.append(FakeChild(100 + len(self.children)))
        return self.children[-1]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def starts() -> Starts:
    return Starts()


@pytest.fixture
def keeper(clock: Clock, starts: Starts) -> DaemonKeeper:
    return DaemonKeeper("/x.sock", {"transport": "tcp"}, spawn=starts, clock=clock)


def test_started_once_and_stopped_once(keeper: DaemonKeeper, starts: Starts) -> None:
    assert not keeper.running
    for _ in range(3):
        keeper.keep()
    assert keeper.running
    assert starts.asked == [("/x.sock", {"transport": "tcp"})]
    keeper.stop()
    keeper.stop()
    assert len(starts.children[0].stopped) == 1
    keeper.keep()
    assert len(starts.asked) == 1, "not after the end"


def test_a_dead_daemon_is_started_again_less_and_less_often(
    keeper: DaemonKeeper, starts: Starts, clock: Clock
) -> None:
    keeper.keep()
    begun = clock.now
    times = []
    while clock.now < begun + 300:
        starts.children[-1].code = -9
        before = len(starts.children)
        keeper.keep()
        if len(starts.children) > before:
            times.append(clock.now - begun)
        clock.now += 0.5
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert gaps[0] <= 3
    assert gaps[-1] <= LAST_RETRY_S + 1
    assert len(times) < 12


def test_a_daemon_that_ran_long_is_started_again_soon(
    keeper: DaemonKeeper, starts: Starts, clock: Clock
) -> None:
    keeper.keep()
    for _ in range(4):
        clock.now += STEADY_S + 1
        starts.children[-1].code = 1
        keeper.keep()
        clock.now += 1.1
        keeper.keep()
    assert len(starts.children) == 5


def test_what_cannot_be_started_is_tried_again(
    keeper: DaemonKeeper, starts: Starts, clock: Clock
) -> None:
    starts.fail = True
    keeper.keep()
    keeper.keep()
    assert len(starts.asked) == 1
    starts.fail = False
    clock.now += 1.1
    keeper.keep()
    assert keeper.running
