"""Calls wait for the GPU's stream: in order, by being polled, and never by waiting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from connector_shim import worker as worker_module
from connector_shim.memory import Segment
from connector_shim.stream_gate import StreamGate
from kvd.protocol.types import Rank
from tests.unit.shim.fakes import memory_description
from tests.unit.shim.test_worker import Bench, fetch, offer


class Stream:
    """Marks of a stream: `reach(n)` says that its first n have run."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []

    def record(self) -> Mark:
        self.marks.append(Mark())
        return self.marks[-1]

    def reach(self, count: int) -> None:
        for mark in self.marks[:count]:
            mark.done = True


class Mark:
    done = False
    looks = 0

    def query(self) -> bool:
        self.looks += 1
        return self.done


def gate_of(stream: Stream) -> StreamGate:
    gate = StreamGate()
    gate.start(stream.record)
    return gate


def test_without_a_gpu_calls_are_made_at_once() -> None:
    gate, made = StreamGate(), [""]
    gate.run(gate.mark(), "k", lambda: made.append("one"))
    assert made == ["", "one"]
    assert not gate.keeps
    assert len(gate) == 0


def test_calls_are_made_in_order_once_their_mark_is_reached() -> None:
    stream, made = Stream(), list[str]()
    gate = gate_of(stream)
    gate.run(gate.mark(), "a", lambda: made.append("a"))
    gate.run(gate.mark(), "b", lambda: made.append("b"))
    gate.poll()
    assert made == []
    stream.marks[1].done = True  # the later one alone changes nothing
    gate.poll()
    assert made == []
    stream.reach(1)
    gate.run(stream.marks[1], "c", lambda: made.append("c"))
    assert made == []  # nor does it overtake
    gate.poll()
    assert made == ["a", "b", "c"]


def test_what_is_dropped_is_never_called() -> None:
    stream, made = Stream(), list[str]()
    gate = gate_of(stream)
    gate.run(gate.mark(), "a", lambda: made.append("a"))
    gate.run(gate.mark(), "b", lambda: made.append("b"))
    assert gate.drop("a")
    assert not gate.drop("a")
    stream.reach(2)
    gate.poll()
    assert made == ["b"]


class GpuBench(Bench):
    """A worker half whose KV memory is on a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        super().__init__(**settings)
        self.stream = Stream()
        monkeypatch.setattr(worker_module, "cuda_mark", self.stream.record)
        memory = memory_description(range(1))
        on_gpu = Segment(0, 4096, kind="cuda_ipc", device="GPU-1", handle=b"h" * 64)
        self.worker.start(self.client, replace(memory, segments=(on_gpu,)), None)

    def calls(self, *names: str) -> list[str]:
        return [call[0] for call in self.client.calls if call[0] in names]


def test_a_fetch_waits_for_what_was_launched_before(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = GpuBench(monkeypatch)
    bench.step(fetches=(fetch(),))
    assert bench.calls("fetch") == []  # a step that still runs may use the blocks
    bench.stream.reach(1)
    bench.step()
    assert bench.calls("fetch") == ["fetch"]


def test_a_fetch_that_is_cancelled_meanwhile_is_never_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = GpuBench(monkeypatch)
    bench.step(fetches=(fetch(),))
    drained = bench.step(cancels=("d-1",))
    assert drained.recving == {"d-1"}
    bench.stream.reach(1)
    bench.step()
    assert bench.calls("fetch", "cancel") == []


def test_an_offer_is_valid_only_after_the_forward_that_computed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = GpuBench(monkeypatch)
    bench.worker.forward_done()
    bench.step(offers=(offer(),))
    assert bench.calls("offer", "seal") == ["offer"]
    assert bench.client.offered["t-p-1", 5]["tokens"] is None
    bench.stream.reach(1)
    bench.step()
    assert bench.calls("offer", "seal") == ["offer", "seal"]


def test_on_a_cpu_nothing_of_this_happens() -> None:
    bench = Bench(rank=Rank()).start()
    bench.step(fetches=(fetch(),), offers=(offer(),))
    assert bench.client.names() == ["describe", "offer", "fetch"]
    assert bench.client.offered["t-p-1", 5]["tokens"] == 20
