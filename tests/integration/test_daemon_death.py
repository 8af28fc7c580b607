"""The demo on real engines, and what happens when either daemon dies, or stops, under them.

The stack is what `kvd demo --keep` leaves; daemons are started again with the line it printed.
"""

from __future__ import annotations

import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvd.demo.client import Client, until
from tests.conftest import RUN_ROOT, wait_for_async
from tests.integration.demo_stack import Kept, Name, Traffic, alone, ask, check_report, kept_demo

pytestmark = [pytest.mark.vllm, pytest.mark.engine, pytest.mark.timeout(1800)]

BUSY = 3
"""Answers that must have come through before a daemon is hit, so that the stack is warm."""


def root(config: pytest.Config) -> Path:
    return config.stash[RUN_ROOT]


@pytest.fixture(scope="module")
def failing(request: pytest.FixtureRequest) -> Iterator[Kept]:
    """A failed load fails its request. KV moves as it does by default on one host: shm."""
    with kept_demo(root(request.config)) as kept:
        yield kept


@pytest.fixture(scope="module")
def recomputing(request: pytest.FixtureRequest) -> Iterator[Kept]:
    """A failed load is computed again. KV moves by tcp."""
    with kept_demo(
        root(request.config), "--policy", "recompute", "--config", "transport=tcp"
    ) as kept:
        yield kept


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    found = Client()
    yield found
    await found.aclose()


async def moves_again(client: Client, kept: Kept, salt: str) -> None:
    """The next request goes through both daemons, and is answered as one engine alone would."""
    before = await kept.fetched_bytes(client), await kept.served_bytes(client)
    number = 1000
    answer = await ask(client, kept.url, number, salt)
    assert not answer.error
    assert answer.tokens == await alone(client, kept, number)
    assert await kept.fetched_bytes(client) > before[0], kept.logs()

    async def served() -> bool:
        return await kept.served_bytes(client) > before[1]

    await until(served, 10, "the producer's daemon counts what it served")


def test_demo_over_shm(failing: Kept) -> None:
    check_report(failing.report, "shm")


@pytest.mark.parametrize("name", ["prefill", "decode"])
async def test_only_requests_in_flight_fail(failing: Kept, client: Client, name: Name) -> None:
    kept = failing
    pids = kept.engine_pids()
    assert await kept.daemon_ready(client, name)

    traffic = Traffic(client, kept, f"fail-{name}")
    await wait_for_async(lambda: len(traffic.asked) >= BUSY, 120, what="requests are answered")
    kept.kill_daemon(name)
    killed = time.monotonic()
    hit = len(traffic.asked)
    await wait_for_async(
        lambda: len(traffic.asked) >= hit + 2 * BUSY, 240, what="requests are still answered"
    )
    asked = await traffic.stop()

    later = [(e.number, e.sent - killed, e.answer.error) for e in asked if e.sent > killed]
    assert [each for each in later if each[2]] == [], kept.logs()
    for each in asked:
        if not each.answer.error:
            assert each.answer.tokens == await alone(client, kept, each.number), each.number
    assert kept.engine_pids() == pids

    kept.restart_daemon(name)
    await until(lambda: kept.is_back(client, name), 60, "the daemon is back")
    await moves_again(client, kept, f"fail-{name}-again")
    assert kept.engine_pids() == pids


def test_demo_over_tcp(recomputing: Kept) -> None:
    check_report(recomputing.report, "tcp")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("name", ["prefill", "decode"])
async def test_answers_stay_right_without_a_daemon(
    recomputing: Kept, client: Client, name: Name, number: signal.Signals
) -> None:
    kept = recomputing
    salt = f"{name}-{number.name}"
    pids = kept.engine_pids()
    assert await kept.daemon_ready(client, name)

    traffic = Traffic(client, kept, salt)
    await wait_for_async(lambda: len(traffic.asked) >= BUSY, 120, what="requests are answered")
    kept.signal_daemon(name, number)
    hit = len(traffic.asked)
    await wait_for_async(
        lambda: len(traffic.asked) >= hit + 2 * BUSY, 240, what="requests are still answered"
    )
    asked = await traffic.stop()

    for each in asked:
        assert not each.answer.error, (each.number, each.answer.error)
        assert each.answer.tokens == await alone(client, kept, each.number), each.number
    assert kept.engine_pids() == pids

    kept.restart_daemon(name)
    await until(lambda: kept.is_back(client, name), 60, "the daemon is back")
    await moves_again(client, kept, f"{salt}-again")
    assert kept.engine_pids() == pids
