"""`send_type` "put": a prefill step waits until its part was read, and never for longer."""

from __future__ import annotations

import pytest

from connector_shim.events import Down
from connector_shim.jobs import (
    Drained,
    FinishJob,
    StepJobs,
    StreamOpen,
    StreamStep,
    pack_blocks,
    pack_u32,
)
from connector_shim.settings import ShimSettings
from connector_shim.worker import WorkerHalf
from kvd.protocol.codes import Code
from kvd.protocol.local import OfferRead
from kvd.protocol.types import Rank
from tests.unit.shim.fakes import Clock, FakeClient, memory_description

KEY = ("t", 5)
WAIT_S = 0.75


class Bench:
    def __init__(self, send_type: str = "put") -> None:
        self.clock = Clock()
        settings = ShimSettings(send_type=send_type, put_wait_s=WAIT_S)
        self.worker = WorkerHalf(Rank(), 1, settings, clock=self.clock)
        self.client = FakeClient(clock=self.clock)
        self.worker.start(self.client, memory_description(), None)
        self.client.waits.clear()
        self.seq = 0
        self.step(0, opens=True)

    def step(self, tokens: int, *, opens: bool = False, finish: bool = False) -> float:
        """One step that computes up to `tokens`; returns for how long it waited."""
        self.seq += 1
        opened = StreamOpen("r", KEY, pack_u32([16, 32, 48]), bytes(48))
        blocks = pack_blocks([self.seq])
        self.worker.step(
            StepJobs(
                seq=self.seq,
                opens=(opened,) if opens else (),
                steps=(StreamStep(KEY, ((0, self.seq - 1, blocks),), tokens),),
                finishes=(FinishJob("r", KEY, tokens),) if finish else (),
            )
        )
        began = self.clock.now
        self.worker.forward_done()
        return self.clock.now - began

    def says(self, readers: int, tokens: int) -> None:
        self.client.events.append(OfferRead(*KEY, readers, tokens))


def test_an_offer_is_watched_only_where_steps_wait() -> None:
    assert Bench("put").client.offered[KEY]["watched"] is True
    assert Bench("put_async").client.offered[KEY]["watched"] is False


@pytest.mark.parametrize("fetched", ["before the request ends", "with its last step", "after"])
def test_the_end_of_a_stream_is_counted_once_and_frees_its_blocks_once(fetched: str) -> None:
    bench = Bench("put_async")
    bench.step(48)
    if fetched == "before the request ends":
        bench.client.end_offer(*KEY)
        assert bench.worker.drain() == Drained(), "the request still has its blocks"
    elif fetched == "with its last step":
        bench.client.end_offer(*KEY)
    bench.step(48, finish=True)
    if fetched == "after":
        assert bench.worker.drain() == Drained()
        bench.client.end_offer(*KEY)
    bench.step(0)
    assert bench.worker.drain().sending == {"r"}
    bench.step(0)
    assert bench.worker.drain() == Drained()
    counted = bench.worker.stats.take()
    assert counted is not None
    assert counted["offers"] == {"released": 1}
    assert bench.worker.tally.counts == {}


def test_a_step_that_nobody_reads_does_not_wait() -> None:
    bench = Bench()
    assert bench.step(16) == 0
    assert bench.client.waits == []


def test_a_step_waits_until_its_part_was_read() -> None:
    bench = Bench()
    bench.says(1, 0)
    bench.client.later = [lambda: bench.says(1, 8), lambda: bench.says(1, 16)]
    assert bench.step(16) == 0, "it ended with the news, not with the time"
    assert len(bench.client.waits) == 2
    # The next step's part is a new one.
    bench.client.later = [lambda: bench.says(0, 0)]
    bench.step(32)
    assert len(bench.client.waits) == 3
    bench.step(48)
    assert len(bench.client.waits) == 3, "the reader has left"


def test_a_wait_is_bounded_and_not_repeated_for_a_slow_reader() -> None:
    bench = Bench()
    bench.says(1, 0)
    assert bench.step(16) == pytest.approx(WAIT_S)
    assert bench.worker.tally.counts == {"put_overdue": 1}
    assert bench.step(32) == 0
    bench.says(1, 16)
    assert bench.step(48) == 0
    assert [call for call in bench.client.names() if call == "extend"] == ["extend"] * 3


@pytest.mark.parametrize("end", ["the fetch ends", "the offer ends", "the daemon dies"])
def test_a_wait_ends_with_its_reason(end: str) -> None:
    bench = Bench()
    bench.says(1, 0)

    def happens() -> None:
        match end:
            case "the fetch ends":
                bench.says(0, 0)
            case "the offer ends":
                bench.client.end_offer(*KEY, Code.REVOKED)
            case _:
                bench.client.end_offer(*KEY, Code.DAEMON_GONE)
                bench.client.events.append(Down(Code.DAEMON_GONE, "killed"))
                bench.client.state = "down"

    bench.client.later = [happens]
    assert bench.step(16) == 0
    assert len(bench.client.waits) == 1
    assert bench.worker.tally.counts.get("put_overdue", 0) == 0


def test_what_was_read_before_the_step_is_not_waited_for() -> None:
    bench = Bench()
    bench.says(1, 0)
    bench.client.later = [lambda: bench.says(1, 16)]
    bench.step(16)
    # A step for other requests: this one adds nothing.
    bench.seq += 1
    bench.worker.step(StepJobs(seq=bench.seq))
    bench.worker.forward_done()
    assert len(bench.client.waits) == 1
    bench.seq += 1
    bench.worker.step(StepJobs(seq=bench.seq, finishes=(FinishJob("r", KEY, 16),)))
    bench.worker.forward_done()
    assert len(bench.client.waits) == 1, "the end of a request adds nothing either"


@pytest.mark.parametrize("value", [-1, 61, "1", True])
def test_the_bound_has_bounds(value: object) -> None:
    with pytest.raises(ValueError, match="put_wait_s"):
        ShimSettings.parse({"send_type": "put", "put_wait_s": value})
