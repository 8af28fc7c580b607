"""The worker half, with a scripted client: jobs to calls, events to reports, and no daemon."""

from __future__ import annotations

from typing import Any

import pytest

from connector_shim.errors import ClientError
from connector_shim.events import Down
from connector_shim.exits import pid_space
from connector_shim.jobs import (
    Drained,
    FetchJob,
    OfferJob,
    ReleaseJob,
    StepJobs,
    pack_blocks,
    pack_u32,
)
from connector_shim.settings import ShimSettings
from connector_shim.worker import WorkerHalf
from kvd.protocol.codes import Code
from kvd.protocol.local import NotifyDone, State
from kvd.protocol.types import PeerAddr, Rank
from tests.unit.shim.fakes import Clock, FakeClient, memory_description

RANKS = (((0, 0), ("10.0.0.2", 7001)), ((0, 1), ("10.0.0.3", 7002)))


class Bench:
    """A worker half with its client; `step` numbers the jobs."""

    def __init__(self, *, groups: int = 1, rank: Rank = Rank(), **settings: Any) -> None:  # noqa: B008
        self.clock = Clock()
        self.worker = WorkerHalf(rank, groups, ShimSettings(**settings), clock=self.clock)
        self.client = FakeClient()
        self.seq = 0

    def start(self) -> Bench:
        self.worker.start(self.client, memory_description(range(len(self.worker_groups()))), None)
        return self

    def worker_groups(self) -> range:
        return range(self.worker._num_tables)

    def step(self, **jobs: Any) -> Drained:
        self.seq += 1
        self.worker.step(StepJobs(seq=self.seq, **jobs))
        return self.worker.drain()


def fetch(req_id: str = "d-1", *, groups: int = 1, **changes: Any) -> FetchJob:
    values: dict[str, Any] = {
        "req_id": req_id,
        "fetch_id": f"f-{req_id}",
        "transfer_id": "t",
        "generation": 7,
        "engine_id": "e",
        "ranks": RANKS,
        "start": 16,
        "end": 40,
        "blocks": tuple(pack_blocks([10 + g, 20 + g]) for g in range(groups)),
        "digest": bytes(16),
        **changes,
    }
    return FetchJob(**values)


def offer(req_id: str = "p-1", generation: int = 5) -> OfferJob:
    return OfferJob(
        req_id=req_id,
        transfer_id=f"t-{req_id}",
        generation=generation,
        tokens=20,
        blocks=(pack_blocks([1, None]),),
        positions=pack_u32([16, 20]),
        digests=b"a" * 16 + b"b" * 16,
    )


# --- fetching -----------------------------------------------------------------------------------


def test_a_fetch_in_full() -> None:
    bench = Bench(rank=Rank(tp_rank=1, tp_size=2), fetch_deadline_s=9.0, park_s=3.0).start()
    assert bench.step(fetches=(fetch(traceparent="00-aa", sole=True),)) == Drained()
    (fetch_id,) = bench.client.fetched
    assert fetch_id == "f-d-1.0.1", "ranks that share a daemon must not share ids"
    assert bench.client.fetched[fetch_id] == {
        "transfer_id": "t",
        "remote": PeerAddr("10.0.0.3", 7002),
        "engine_id": "e",
        "start": 16,
        "end": 40,
        "blocks": [[10, 20]],
        "digest": bytes(16),
        "generation": 7,
        "deadline_s": 9.0,
        "park_s": 3.0,
        "fetch_id": fetch_id,
        "traceparent": "00-aa",
        "sole": True,
    }
    bench.clock.now += 0.25
    bench.client.end_fetch(fetch_id)
    assert bench.step() == Drained(recving={"d-1"})
    assert bench.step() == Drained()
    assert bench.worker.stats.take() == {
        "fetches": {"ok": 1},
        "offers": {},
        "nbytes": 4096,
        "tokens": 24,
        "seconds": [0.25],
    }


@pytest.mark.parametrize(
    ("groups", "bad", "expected"),
    [
        (1, [[1]], Drained(recving={"d-1"}, invalid_blocks={20})),
        (1, [[]], Drained(recving={"d-1"}, invalid_blocks={10, 20})),
        (2, [[], [0]], Drained(recving={"d-1"}, failed={"d-1"})),
    ],
)
def test_a_failed_fetch(groups: int, bad: list[list[int]], expected: Drained) -> None:
    bench = Bench(groups=groups).start()
    bench.step(fetches=(fetch(groups=groups),))
    bench.client.end_fetch("f-d-1.0.0", Code.FENCED, bad)
    assert bench.step() == expected
    assert bench.worker.tally.counts["fetch_fenced"] == 1


def test_an_end_in_the_step_of_the_start() -> None:
    bench = Bench().start()
    bench.worker.step(StepJobs(seq=1, fetches=(fetch(),)))
    bench.client.end_fetch("f-d-1.0.0")
    assert bench.worker.drain() == Drained(recving={"d-1"})


@pytest.mark.parametrize("state", ["down", "connecting", "registering", "draining"])
def test_no_daemon_fails_at_once(state: str) -> None:
    bench = Bench().start()
    bench.client.state = state
    assert bench.step(fetches=(fetch(),)) == Drained(recving={"d-1"}, invalid_blocks={10, 20})
    assert bench.client.names() == ["describe"]


@pytest.mark.parametrize("changes", [{"doomed": "why"}, {"ranks": ()}, {"ranks": RANKS[1:]}])
def test_what_cannot_be_asked_fails_at_once(changes: dict[str, Any]) -> None:
    bench = Bench().start()
    assert bench.step(fetches=(fetch(**changes),)).invalid_blocks == {10, 20}
    assert bench.client.names() == ["describe"]


def test_a_client_that_refuses_fails_at_once() -> None:
    bench = Bench().start()
    bench.client.raises["fetch"] = ClientError(Code.OVERLOADED, "queue full")
    drained = bench.step(fetches=(fetch(), fetch("d-2")))
    assert drained.recving == {"d-1", "d-2"}
    assert bench.worker.stats.take() is not None


def test_cancel_only_what_runs() -> None:
    bench = Bench().start()
    bench.step(fetches=(fetch(),), cancels=("d-1", "unknown"))
    assert bench.client.names() == ["describe", "fetch", "cancel"]
    assert bench.worker.reports.receiving == 1, "told only when no byte can land any more"
    bench.client.end_fetch("f-d-1.0.0", Code.CANCELLED)
    assert bench.step(cancels=("d-1",)).recving == {"d-1"}
    assert bench.client.names() == ["describe", "fetch", "cancel"]


def test_an_overdue_fetch_is_cancelled_once_and_stays_held() -> None:
    bench = Bench(fetch_deadline_s=2.0).start()
    bench.step(fetches=(fetch(),))
    for _ in range(5):
        bench.clock.now += 3
        assert bench.step() == Drained()
    assert bench.client.names().count("cancel") == 1
    bench.client.end_fetch("f-d-1.0.0", Code.DEADLINE)
    assert bench.step().recving == {"d-1"}


def test_a_fetch_that_is_told_twice_is_asked_once() -> None:
    bench = Bench().start()
    bench.step(fetches=(fetch(),))
    bench.step(fetches=(fetch(),))
    assert bench.client.names().count("fetch") == 1
    assert bench.worker.tally.counts["fetch_twice"] == 1


def test_case_6_late_ends_are_counted_and_told_to_nobody() -> None:
    bench = Bench().start()
    bench.step(fetches=(fetch(),), offers=(offer(),))
    bench.client.end_fetch("f-d-1.0.0")
    bench.client.end_fetch("f-d-1.0.0", Code.PEER_LOST)
    bench.client.end_offer("t-p-1", 5)
    drained = bench.step()
    assert drained == Drained(sending={"p-1"}, recving={"d-1"})
    bench.client.end_fetch("f-d-1.0.0")
    assert bench.step() == Drained()
    assert bench.worker.tally.counts["late_fetch_end"] == 2


# --- offering -----------------------------------------------------------------------------------


def test_an_offer_in_full() -> None:
    bench = Bench(lease_s=12.0).start()
    assert bench.step(offers=(offer(),)) == Drained()
    assert bench.client.offered == {
        ("t-p-1", 5): {
            "blocks": [[1, 2**32 - 1]],
            "digests": {16: b"a" * 16, 20: b"b" * 16},
            "tokens": 20,
            "lease_s": 12.0,
            "watched": False,
        }
    }
    bench.client.end_offer("t-p-1", 5, Code.EXPIRED)
    assert bench.step() == Drained(sending={"p-1"})


def test_an_offer_that_cannot_be_made_holds_nothing() -> None:
    bench = Bench().start()
    bench.client.state = "down"
    assert bench.step(offers=(offer(),)) == Drained(sending={"p-1"})
    bench.client.state = "up"
    bench.client.raises["offer"] = ClientError(Code.OVERLOADED, "no slot")
    assert bench.step(offers=(offer("p-2"),)) == Drained(sending={"p-2"})


def test_revoke_all_comes_after_the_offers_of_its_step() -> None:
    bench = Bench().start()
    bench.step(offers=(offer(),))
    bench.step(offers=(offer("p-2", 6),), revoke_all=True)
    assert bench.client.names() == ["describe", "offer", "offer", "revoke_all"]
    assert bench.worker.drain().sending | bench.step().sending <= {"p-1", "p-2"}
    assert bench.worker.reports.holding == 0


def test_a_new_generation_of_a_transfer_is_a_hold_of_its_own() -> None:
    bench = Bench().start()
    first = offer()
    second = OfferJob("p-2", first.transfer_id, 6, 20, first.blocks, first.positions, first.digests)
    bench.step(offers=(first, second))
    bench.client.end_offer("t-p-1", 5, Code.REVOKED)
    assert bench.step().sending == {"p-1"}
    bench.client.end_offer("t-p-1", 6)
    assert bench.step().sending == {"p-2"}


# --- releasing ----------------------------------------------------------------------------------


def test_releases_are_never_reported() -> None:
    bench = Bench().start()
    release = ReleaseJob("t", 7, "e", RANKS)
    assert bench.step(releases=(release,)) == Drained()
    assert bench.client.calls[-1] == ("release", "t", PeerAddr("10.0.0.2", 7001), "e", 7)
    bench.client.events.append(NotifyDone("t", "release", Code.PEER_UNREACHABLE))
    assert bench.step() == Drained()
    assert bench.worker.tally.counts["release_peer_unreachable"] == 1
    bench.client.raises["release"] = ClientError(Code.OVERLOADED, "full")
    bench.client.state = "down"
    assert bench.step(releases=(release,)) == Drained()
    bench.client.state = "up"
    assert bench.step(releases=(release,)) == Drained()
    assert bench.worker.tally.counts["release_not_sent"] == 1
    assert bench.worker.tally.counts["release_overloaded"] == 1


# --- life ---------------------------------------------------------------------------------------


def test_a_step_is_acted_on_once() -> None:
    bench = Bench().start()
    jobs = StepJobs(seq=4, fetches=(fetch(),))
    bench.worker.step(jobs)
    bench.worker.step(jobs)
    bench.worker.step(StepJobs(seq=3, fetches=(fetch("d-2"),)))
    assert list(bench.client.fetched) == ["f-d-1.0.0"]


def test_state_follows_the_client() -> None:
    bench = Bench()
    assert bench.worker.state().phase == "down"
    bench.start()
    assert (bench.worker.state().host, bench.worker.state().port) == ("10.0.0.1", 7000)
    bench.client.daemon_pid = 77
    assert (bench.worker.state().pid, bench.worker.state().pid_space) == (77, pid_space())
    for state, phase in [
        ("connecting", "pending"), ("registering", "pending"), ("draining", "down"),
        ("down", "down"), ("up", "up"),
    ]:  # fmt: skip
        bench.client.state = state
        assert bench.worker.state().phase == phase
    bench.client.state = "down"
    bench.client.events.append(Down(Code.DAEMON_GONE, "it closed"))
    bench.step()
    assert bench.worker.state().detail == "it closed"
    bench.client.come_up()
    bench.client.events.append(State(draining=True))
    bench.step()
    assert bench.worker.state().up, "the client's own state decides"


def test_a_degraded_rank_serves_on() -> None:
    bench = Bench()
    bench.worker.degrade("no room in /dev/shm")
    drained = bench.step(
        fetches=(fetch(),), offers=(offer(),), releases=(ReleaseJob("t", 1, "e", RANKS),),
        cancels=("d-9",), revoke_all=True,
    )  # fmt: skip
    assert drained == Drained(sending={"p-1"}, recving={"d-1"}, invalid_blocks={10, 20})
    assert bench.worker.state().detail == "no room in /dev/shm"
    bench.worker.shutdown()
    assert bench.step() == Drained()


def test_nothing_is_told_after_shutdown() -> None:
    bench = Bench().start()
    bench.step(fetches=(fetch(),), offers=(offer(),))
    bench.client.end_offer("t-p-1", 5)
    bench.worker.shutdown()
    bench.worker.shutdown()
    bench.client.end_fetch("f-d-1.0.0")
    assert bench.step(fetches=(fetch("d-2"),)) == Drained()
    assert bench.client.closed == 1


def test_a_stage_without_layers_in_the_last_group_leaves_its_blocks_out() -> None:
    bench = Bench(groups=2)
    bench.worker.start(bench.client, memory_description([0]))
    bench.step(fetches=(fetch(groups=2),))
    assert bench.client.fetched["f-d-1.0.0"]["blocks"] == [[10, 20]]
    bench.client.end_fetch("f-d-1.0.0", Code.PEER_LOST)
    assert bench.step() == Drained(recving={"d-1"}, failed={"d-1"})


class SlowClient(FakeClient):
    """Takes some polls until its daemon is there."""

    def __init__(self, clock: Clock, after_s: float) -> None:
        super().__init__(state="connecting")
        self._clock = clock
        self._at = clock.now + after_s

    def poll(self, timeout: float = 0.0) -> list[Any]:
        self._clock.now += timeout
        if self._clock.now >= self._at and self.state != "up":
            self.come_up()
        return super().poll(timeout)


@pytest.mark.parametrize(("after_s", "phase"), [(1.0, "up"), (60.0, "pending")])
def test_the_start_waits_a_bounded_time(after_s: float, phase: str) -> None:
    clock = Clock()
    begun = clock.now
    worker = WorkerHalf(Rank(), 1, ShimSettings(), clock=clock)
    worker.start(SlowClient(clock, after_s), memory_description())
    assert worker.state().phase == phase
    assert clock.now - begun <= worker.settings.connect_timeout_s + 0.2


def test_no_daemon_at_the_start_is_not_waited_for() -> None:
    bench = Bench()
    bench.client.state = "down"
    begun = bench.clock.now
    bench.start()
    assert bench.clock.now == begun
