"""How long a request waits for news of the daemons, and what it is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from connector_shim.daemons import DaemonStates
from connector_shim.jobs import RankState
from tests.unit.shim.fakes import DOWN, UP, Clock

PENDING = RankState("pending", detail="registering")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def daemons(clock: Clock) -> DaemonStates:
    return DaemonStates(1, recheck_s=0.5, wait_s=2.0, clock=clock)


def test_fresh_news_are_believed(daemons: DaemonStates, clock: Clock) -> None:
    daemons.update({(0, 0): UP})
    assert daemons.ask("r") == "up"
    daemons.update({(0, 0): DOWN})
    assert daemons.ask("r") == "down"
    assert daemons.problem() == "rank pp=0 tp=0: no daemon"
    assert daemons.waiting == 0


@pytest.mark.parametrize(("news", "answer"), [(UP, "up"), (DOWN, "down")])
def test_old_news_are_asked_for_again(
    daemons: DaemonStates, clock: Clock, news: RankState, answer: str
) -> None:
    daemons.update({(0, 0): UP})
    clock.now += 1
    assert daemons.ask("r") == "wait"
    daemons.update({(0, 0): news})
    assert daemons.ask("r") == answer


def test_one_wait_is_enough_where_steps_are_slow(daemons: DaemonStates, clock: Clock) -> None:
    """With asynchronous scheduling, news are always a step old when a request asks."""
    daemons.update({(0, 0): UP})
    clock.now += 1
    assert daemons.ask("r") == "wait"
    for _ in range(3):
        daemons.update({(0, 0): UP})
        clock.now += 1
        assert daemons.ask("r") == "up"


def test_no_news_in_spite_of_waiting(daemons: DaemonStates, clock: Clock) -> None:
    daemons.update({(0, 0): UP})
    clock.now += 1
    answers = []
    for _ in range(30):
        answers.append(daemons.ask("r"))
        clock.now += 0.1
    assert set(answers[:20]) == {"wait"}
    assert set(answers[22:]) == {"up"}, "decided on what is known"


def test_a_daemon_that_is_registering_is_waited_for_but_not_for_ever(
    daemons: DaemonStates, clock: Clock
) -> None:
    daemons.update({(0, 0): PENDING})
    assert daemons.ask("a") == "wait"
    clock.now += 1
    daemons.update({(0, 0): PENDING})
    assert daemons.ask("a") == "wait"
    daemons.update({(0, 0): UP})
    assert daemons.ask("a") == "up"
    daemons.update({(0, 0): PENDING})
    for _ in range(30):
        clock.now += 0.1
        daemons.update({(0, 0): PENDING})
    assert daemons.ask("b") == "down", "it has been on its way for too long"


def test_the_next_daemon_is_waited_for_although_the_last_one_was_in_vain(
    daemons: DaemonStates, clock: Clock
) -> None:
    """One that was stopped, say, and listened without ever answering."""
    hung, new = replace(PENDING, pid=7), replace(PENDING, pid=8)
    for _ in range(30):
        daemons.update({(0, 0): hung})
        clock.now += 0.1
    assert daemons.ask("before") == "down"
    daemons.forget("before")
    daemons.update({(0, 0): new})
    assert daemons.ask("after") == "wait"
    daemons.update({(0, 0): UP})
    assert daemons.ask("after") == "up"


def test_all_ranks_must_be_up(clock: Clock) -> None:
    daemons = DaemonStates(2, recheck_s=0.5, wait_s=2.0, clock=clock)
    daemons.update({(0, 0): UP})
    assert daemons.ask("r") == "down"
    assert "1 of 2 ranks" in str(daemons.problem())
    daemons.update({(0, 1): DOWN})
    assert daemons.problem() == "rank pp=0 tp=1: no daemon"
    daemons.update({(0, 1): UP})
    assert daemons.ask("r") == "up"
    assert daemons.addresses() == {(0, 0): ("10.0.0.1", 7000), (0, 1): ("10.0.0.1", 7000)}


def test_forgotten_requests_leave_nothing(daemons: DaemonStates, clock: Clock) -> None:
    assert daemons.ask("r") == "wait"
    assert daemons.waiting == 1
    daemons.forget("r")
    daemons.forget("r")
    assert daemons.waiting == 0
