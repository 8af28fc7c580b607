"""`send_type` "put" with a real worker half, real clients and daemons: the step that waits."""

from __future__ import annotations

import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from connector_shim.jobs import StepJobs, StreamOpen, StreamStep, pack_blocks, pack_u32
from connector_shim.settings import ShimSettings
from connector_shim.worker import WorkerHalf
from kvd.protocol.codes import Code
from kvd.protocol.types import Rank
from tests.conftest import wait_for
from tests.integration.daemon.conftest import TRANSPORTS, Site
from tests.integration.daemon.engine import BLOCK_SIZE, Engine, digest
from tests.integration.daemon.harness import Daemon

KEY = ("t", 5)
LONG_S = 30.0
"""Far above what any of these waits takes: who sees it pass has not been woken."""


class Prefill:
    """A worker half over a real client, whose steps each compute one block of a prompt of four."""

    def __init__(self, producer: Engine, put_wait_s: float) -> None:
        settings = ShimSettings(send_type="put", put_wait_s=put_wait_s)
        self.engine = producer
        self.worker = WorkerHalf(Rank(), 1, settings)
        self.worker._client = producer.client
        self.worker._streaming._client = producer.client
        self.worker._num_tables = self.worker._streaming._num_tables = 1
        self.steps = 0

    def step(self) -> float:
        """Returns for how long its end was waited for."""
        self.steps += 1
        ends = [BLOCK_SIZE * (i + 1) for i in range(4)]
        opened = StreamOpen("r", KEY, pack_u32(ends), digest(KEY[0]) * 4)
        blocks = ((0, 0, pack_blocks([10, 11, 12, 13])),) if self.steps == 1 else ()
        self.worker.step(
            StepJobs(
                seq=self.steps,
                opens=(opened,) if self.steps == 1 else (),
                steps=(StreamStep(KEY, blocks, ends[self.steps - 1]),),
            )
        )
        began = time.monotonic()
        self.worker.forward_done()
        return time.monotonic() - began

    def overdue(self) -> int:
        return self.worker.tally.counts.get("put_overdue", 0)

    def read(self) -> bool:
        """Whether it knows of a fetch that reads its offer."""
        self.worker.drain()
        return KEY in self.worker._streaming._reading


def pair(
    site: Site, transport: str, put_wait_s: float = LONG_S
) -> tuple[Daemon, Daemon, Prefill, Engine]:
    settings = {"transport": transport, "peer_timeout_s": 60.0}
    p, d = site.daemon("p", **settings), site.daemon("d", **settings)
    producer, consumer = site.engine(p, "p", seed=4), site.engine(d, "d")
    producer.up()
    consumer.up()
    return p, d, Prefill(producer, put_wait_s), consumer


def start(consumer: Engine, prefill: Prefill) -> str:
    """A fetch of all four blocks that reads by now."""
    address = prefill.engine.up()
    fetch = consumer.start_fetch(
        KEY[0], [20, 21, 22, 23], remote=address, engine_id="p", park_s=20.0, deadline_s=60.0
    )
    wait_for(lambda: consumer.poll() or prefill.read(), what="the engine hears of its reader")
    return fetch


@contextmanager
def during(act: Callable[[], object]) -> Iterator[None]:
    """`act` in a thread of its own; it has ended when this does."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join(LONG_S)
    assert not thread.is_alive()
    assert failed == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_when_a_step_ends_its_part_has_arrived(site: Site, transport: str) -> None:
    _, _, prefill, consumer = pair(site, transport)
    assert prefill.step() < LONG_S, "nobody fetches: nothing to wait for"
    fetch = start(consumer, prefill)
    for blocks in range(2, 5):
        assert prefill.step() < LONG_S
        assert prefill.overdue() == 0
        # The client's memory, not its news: the bytes are there when the step ends.
        for i in range(blocks):
            assert (consumer.words[:, 20 + i] == prefill.engine.words[:, 10 + i]).all()
    assert consumer.finish(fetch).code == Code.OK
    assert consumer.wrong(4, {20: 10, 21: 11, 22: 12, 23: 13}) == 0


def test_a_reader_that_stands_still_costs_one_bounded_wait(site: Site) -> None:
    _, d, prefill, consumer = pair(site, "shm", put_wait_s=0.4)
    prefill.step()
    start(consumer, prefill)
    d.kill(signal.SIGSTOP)
    try:
        assert 0.4 <= prefill.step() < LONG_S
        assert prefill.overdue() == 1
        prefill.step()
        prefill.step()
        assert prefill.overdue() == 1, "later steps do not wait again"
    finally:
        d.kill(signal.SIGCONT)


@pytest.mark.parametrize("end", ["abort", "peer loss", "daemon death", "revoked"])
def test_a_wait_ends_at_once_with_its_reason(site: Site, end: str) -> None:
    p, d, prefill, consumer = pair(site, "tcp")
    prefill.step()
    fetch = start(consumer, prefill)
    # What is stopped cannot read, so that the step has something to wait for.
    d.kill(signal.SIGSTOP)
    waits = threading.Event()
    poll = prefill.worker._poll

    def polling(timeout: float = 0.0) -> None:
        if timeout:
            waits.set()
        poll(timeout)

    prefill.worker._poll = polling  # type: ignore[method-assign]

    def act() -> None:
        assert waits.wait(LONG_S)
        match end:
            case "abort":
                consumer.client.cancel(fetch)
                consumer.poll()
                d.kill(signal.SIGCONT)
            case "peer loss":
                d.kill(signal.SIGKILL)
            case "daemon death":
                p.kill(signal.SIGKILL)
            case _:
                release_by_force(p)

    with during(act):
        took = prefill.step()
    assert waits.is_set(), "it did wait"
    assert took < LONG_S
    assert prefill.overdue() == 0, "the wait was ended, it did not run out"
    if end != "peer loss":
        d.kill(signal.SIGCONT)


def release_by_force(p: Daemon) -> None:
    """An operator takes the offer back."""
    request = urllib.request.Request(
        f"http://{p.found['metrics']}/v1/transfers/{KEY[0]}/release?force=true",
        method="POST",
        headers={"X-Kvd-Control": "1"},
    )
    with urllib.request.urlopen(request, timeout=5) as answer:
        assert answer.status == 200
