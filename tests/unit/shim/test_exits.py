"""A daemon's exit counts at once, for a scheduler that sees its process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from connector_shim.daemons import DaemonStates
from connector_shim.exits import Exits, pid_space
from connector_shim.jobs import RankState
from tests.unit.shim.fakes import UP, Clock, Request, scheduler_half

RANK = (0, 0)


@pytest.fixture
def daemon() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs until it is killed."""
    line = [sys.executable, "-c", "input()"]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        yield process


@pytest.fixture
def exits() -> Iterator[Exits]:
    exits = Exits()
    yield exits
    exits.close()


def up(process: subprocess.Popen[bytes]) -> RankState:
    return replace(UP, pid=process.pid, pid_space=pid_space())


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_an_exit_is_seen_until_there_is_other_news(
    exits: Exits, daemon: subprocess.Popen[bytes]
) -> None:
    exits.follow({RANK: up(daemon)})
    exits.follow({RANK: up(daemon)})
    assert exits.seen() == []
    kill(daemon)
    assert exits.seen() == [RANK]
    exits.follow({RANK: RankState("down")})
    assert exits.seen() == []


def test_one_that_was_gone_already(exits: Exits, daemon: subprocess.Popen[bytes]) -> None:
    kill(daemon)
    exits.follow({RANK: up(daemon), (0, 1): UP})
    assert exits.seen() == [RANK]


@pytest.mark.parametrize(
    "state",
    [
        RankState("up", pid=0, pid_space=pid_space()),
        RankState("up", pid=2**22 + 1, pid_space="another host"),
        RankState("down", pid=2**22 + 1, pid_space=pid_space()),
    ],
)
def test_what_cannot_be_seen_never_counts(exits: Exits, state: RankState) -> None:
    exits.follow({RANK: state})
    assert exits.seen() == []


def test_descriptors_are_given_back(daemon: subprocess.Popen[bytes]) -> None:
    me = psutil.Process()
    before = me.num_fds()
    exits = Exits()
    for state in [up(daemon), RankState("down"), up(daemon), up(daemon)]:
        exits.follow({RANK: state})
    assert me.num_fds() == before + 1
    exits.close()
    assert me.num_fds() == before


def test_a_request_after_it_waits_for_news(daemon: subprocess.Popen[bytes]) -> None:
    states = DaemonStates(1, recheck_s=0.5, wait_s=2.0, clock=Clock())
    states.update({RANK: up(daemon)})
    assert states.ask("before") == "up"
    kill(daemon)
    assert states.problem() == "rank pp=0 tp=0: the daemon has exited"
    assert states.ask("after") == "wait"
    states.update({RANK: up(daemon)})
    assert states.ask("after") == "wait", "the worker has not noticed yet"
    states.update({RANK: RankState("down")})
    assert states.ask("after") == "down"


def test_one_that_the_workers_never_miss_is_not_waited_for_forever(
    daemon: subprocess.Popen[bytes],
) -> None:
    clock = Clock()
    states = DaemonStates(1, recheck_s=0.5, wait_s=2.0, clock=clock)
    kill(daemon)
    answers = []
    for _ in range(30):
        states.update({RANK: up(daemon)})
        answers.append(states.ask("r"))
        clock.now += 0.1
    assert answers[0] == "wait"
    assert answers[-1] == "down"


def test_nothing_is_offered_in_the_step_in_which_the_daemon_dies(
    daemon: subprocess.Popen[bytes],
) -> None:
    """vLLM tells a request's end before it passes that step's news on."""
    half = scheduler_half()
    half.update_daemons({RANK: up(daemon)})
    request = Request(request_id="p-1", params={"do_remote_decode": True})
    assert half.get_num_new_matched_tokens(request, 0) == (0, False)
    kill(daemon)
    request.finish()
    assert half.request_finished(request, ([5, 6, 7],)) == (False, None)
    assert half.tally.counts["daemon_down"] == 1
    half.shutdown()
