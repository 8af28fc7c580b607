"""The reporting rules R1 to R6, against a model of what vLLM does with each report.

vLLM's scheduler asserts that it knows every id that it is told, and frees blocks on it. The
model does the same and fails where vLLM's EngineCore would die or would use blocks too early.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from connector_shim.jobs import Drained, pack_blocks
from connector_shim.reports import Reports


def bitmap(indices: set[int], count: int) -> bytes:
    data = bytearray(-(-count // 8))
    for index in indices:
        data[index // 8] |= 1 << (index % 8)
    return bytes(data)


class Rules(RuleBasedStateMachine):
    """The scheduler's view: who waits for a load, and whose blocks are held."""

    num_groups = 1
    receives = Bundle("receives")
    ended_receives = Bundle("ended_receives")
    holds = Bundle("holds")
    ended_holds = Bundle("ended_holds")

    def __init__(self) -> None:
        super().__init__()
        self.reports = Reports(self.num_groups)
        self.count = 0
        self.waiting: dict[str, tuple[tuple[int | None, ...], ...]] = {}
        self.landed: dict[str, bool] = {}
        """Receives that are over: whether some of their blocks are bad."""
        self.bad: dict[str, set[int]] = {}
        self.held: set[str] = set()
        self.flipped: set[str] = set()
        self.told: set[tuple[str, str]] = set()
        self.shut = False

    def fresh(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}-{self.count}"

    # --- what the engine does ---------------------------------------------------------------

    @rule(target=receives, size=st.integers(1, 20), null=st.booleans())
    def start_receive(self, size: int, null: bool) -> Any:
        req_id, fetch_id = self.fresh("r"), self.fresh("f")
        base = self.count * 1000
        tables = tuple(
            tuple(None if null and g and i < size - 1 else base + 100 * g + i for i in range(size))
            for g in range(self.num_groups)
        )
        started = self.reports.receive_started(
            req_id, fetch_id, tuple(pack_blocks(table) for table in tables)
        )
        assert started is not self.shut
        if not started:
            return multiple()
        self.waiting[req_id] = tables
        return req_id, fetch_id

    @rule(receive=receives)
    def start_receive_twice(self, receive: tuple[str, str]) -> None:
        req_id, fetch_id = receive
        if req_id in self.waiting and not self.shut:
            assert not self.reports.receive_started(req_id, "another", ())
            assert not self.reports.receive_started("another", fetch_id, ())

    @rule(target=holds)
    def start_hold(self) -> Any:
        req_id, name = self.fresh("h"), self.fresh("t")
        started = self.reports.hold_started(req_id, (name, self.count))
        assert started is not self.shut
        if not started:
            return multiple()
        self.held.add(req_id)
        return req_id, (name, self.count)

    # --- what the daemon says, once, twice, late or about strangers --------------------------

    @rule(
        target=ended_receives,
        receive=consumes(receives),
        ok=st.booleans(),
        marks=st.sets(st.integers(0, 19)),
        form=st.sampled_from(["bitmaps", "none", "short", "wrong_count"]),
    )
    def end_receive(
        self, receive: tuple[str, str], ok: bool, marks: set[int], form: str
    ) -> tuple[str, str]:
        req_id, fetch_id = receive
        tables = self.waiting[req_id]
        size = len(tables[0])
        marks = {mark for mark in marks if mark < size}
        maps: list[bytes] | None = [bitmap(marks, size) for _ in tables]
        usable = True
        if form == "none":
            maps, usable = None, False
        elif form == "short":
            maps, usable = [b"" for _ in tables], False
        elif form == "wrong_count":
            maps, usable = [b"\0" * 9] * (self.num_groups + 1), False
        assert self.reports.receive_ended(fetch_id, ok=ok, bad=maps)
        every = {b for table in tables for b in table if b is not None}
        if usable:
            marked = {t[i] for t in tables for i in marks if t[i] is not None}
            bad: set[Any] = marked or (set() if ok else every)
        elif form == "none":
            bad = set() if ok else every
        else:
            bad = every
        self.bad[req_id] = bad
        self.landed[req_id] = bool(bad)
        return receive

    @rule(receive=ended_receives, ok=st.booleans())
    def end_receive_again(self, receive: tuple[str, str], ok: bool) -> None:
        assert not self.reports.receive_ended(receive[1], ok=ok)

    @rule(target=ended_holds, hold=consumes(holds))
    def end_hold(self, hold: tuple[str, tuple[str, int]]) -> Any:
        assert self.reports.hold_ended(hold[1])
        self.flipped.add(hold[0])
        return hold

    @rule(hold=ended_holds)
    def end_hold_again(self, hold: tuple[str, tuple[str, int]]) -> None:
        assert not self.reports.hold_ended(hold[1])

    @rule(name=st.text(max_size=3))
    def strangers(self, name: str) -> None:
        assert not self.reports.receive_ended(f"?{name}", ok=True)
        assert not self.reports.hold_ended((f"?{name}", 1))

    # --- a step -----------------------------------------------------------------------------

    @rule()
    def step(self) -> None:
        drained = self.reports.drain()
        if self.shut:
            assert drained == Drained(), "R6"
            return
        for req_id in drained.recving:
            assert req_id in self.waiting, "R1: vLLM asserts that it knows the id"
            assert req_id in self.landed, "R1: a byte could still land"
            assert ("recv", req_id) not in self.told, "R1: told twice"
            self.told.add(("recv", req_id))
        for req_id in drained.sending:
            assert req_id in self.held, "R2: vLLM asserts that it knows the id"
            assert req_id in self.flipped, "R2: a reader could still take these blocks for valid"
            assert ("send", req_id) not in self.told, "R2: told twice"
            self.told.add(("send", req_id))
        failed = {r for r in drained.recving if self.landed[r]}
        if self.num_groups > 1:
            assert drained.failed == failed, "R4: failures, and in both sets"
            assert not drained.invalid_blocks, "R4: vLLM dies of them with several groups"
        else:
            expected = set().union(*(self.bad[r] for r in failed)) if failed else set()
            assert drained.invalid_blocks == expected, "R4: exactly the bad blocks, in this step"
            assert not drained.failed
        for req_id in drained.recving:
            del self.waiting[req_id]

    @rule()
    def shutdown(self) -> None:
        self.reports.shutdown()
        self.shut = True

    @invariant()
    def nothing_is_forgotten(self) -> None:
        if not self.shut:
            outstanding = [r for r in self.waiting if r not in self.landed]
            assert self.reports.receiving >= len(outstanding)

    def teardown(self) -> None:
        if self.shut:
            return
        drained = self.reports.drain()
        told = {r for kind, r in self.told if kind == "recv"} | drained.recving
        assert told == set(self.landed), "R1: each one that ended is told"
        sent = {r for kind, r in self.told if kind == "send"} | drained.sending
        assert sent == self.flipped, "R2: each one that ended is told"


class RulesOfTwoGroups(Rules):
    num_groups = 2


TestOneGroup = Rules.TestCase
TestTwoGroups = RulesOfTwoGroups.TestCase
TestOneGroup.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTwoGroups.settings = TestOneGroup.settings


def test_a_failure_without_any_real_block_is_still_told() -> None:
    reports = Reports(2)
    reports.receive_started("r", "f", (pack_blocks([None]), pack_blocks([None])))
    assert reports.receive_ended("f", ok=False)
    assert reports.drain().failed == {"r"}
    single = Reports(1)
    single.receive_started("r", "f", (b"",))
    assert single.receive_ended("f", ok=False)
    assert single.drain().failed == {"r"}


@pytest.mark.parametrize("again", [True, False])
def test_case_6_late_and_double_completions(again: bool) -> None:
    """done twice, failed after done, and an end of sending and one of receiving in one step."""
    reports = Reports(1)
    reports.receive_started("d", "f", (pack_blocks([1, 2]),))
    reports.hold_started("p", ("t", 1))
    assert reports.receive_ended("f", ok=True, bad=[b"\0"])
    assert not reports.receive_ended("f", ok=True, bad=[b"\0"])
    if again:
        assert not reports.receive_ended("f", ok=False)
    assert reports.hold_ended(("t", 1))
    assert not reports.hold_ended(("t", 1))
    assert not reports.hold_ended(("t", 2))
    drained = reports.drain()
    assert (drained.recving, drained.sending) == ({"d"}, {"p"})
    assert (drained.failed, drained.invalid_blocks) == (set(), set())
    assert reports.drain() == Drained()
