"""One event in, its instructions out in order, and bugs that stay where they are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvd.core import events
from kvd.core.instructions import Instruction, ReleaseSession
from kvd.reactor import Reactor
from tests.conftest import wait_for_async


class FakeCore:
    """Answers each event with what `answers` says; `deadline` is its next one."""

    def __init__(self, answers: Callable[[events.Event], list[Instruction]]) -> None:
        self.answers = answers
        self.heard: list[events.Event] = []
        self.times: list[float] = []
        self.deadline: float | None = None

    def handle(self, event: events.Event, now: float) -> list[Instruction]:
        self.heard.append(event)
        self.times.append(now)
        return self.answers(event)

    def next_deadline(self) -> float | None:
        return self.deadline


async def test_instructions_are_carried_out_in_order_before_the_next_event() -> None:
    story: list[object] = []

    def answers(event: events.Event) -> list[Instruction]:
        assert isinstance(event, events.SessionClosed)
        story.append(event.session)
        return [ReleaseSession(10 * event.session), ReleaseSession(10 * event.session + 1)]

    def carry_out(instruction: Instruction) -> None:
        assert isinstance(instruction, ReleaseSession)
        story.append(instruction.session)
        if instruction.session == 10:
            # What this brings about comes after the rest of this event's instructions.
            reactor.feed(events.SessionClosed(2))

    reactor = Reactor(FakeCore(answers), carry_out=carry_out, on_bug=lambda _w, _e: None)
    reactor.feed(events.SessionClosed(1))
    assert story == [1, 10, 11, 2, 20, 21]
    reactor.close()


async def test_a_bug_in_the_core_is_told_and_the_next_event_is_handled() -> None:
    told: list[tuple[object, str]] = []

    def answers(event: events.Event) -> list[Instruction]:
        if event == events.SessionClosed(1):
            raise RuntimeError("broken")
        return []

    core = FakeCore(answers)
    reactor = Reactor(
        core, carry_out=lambda _i: None, on_bug=lambda what, e: told.append((what, str(e)))
    )
    reactor.feed(events.SessionClosed(1))
    reactor.feed(events.SessionClosed(2))
    assert told == [(events.SessionClosed(1), "broken")]
    assert core.heard == [events.SessionClosed(1), events.SessionClosed(2)]
    assert reactor.bugs == 1
    reactor.close()


async def test_an_instruction_that_fails_does_not_stop_those_after_it() -> None:
    done: list[int] = []
    told: list[object] = []

    def carry_out(instruction: Instruction) -> None:
        assert isinstance(instruction, ReleaseSession)
        if instruction.session == 1:
            raise OSError("no")
        done.append(instruction.session)

    def on_bug(what: object, _error: Exception) -> None:
        told.append(what)
        raise RuntimeError("and again")

    core = FakeCore(lambda _e: [ReleaseSession(n) for n in range(3)])
    reactor = Reactor(core, carry_out=carry_out, on_bug=on_bug)
    reactor.feed(events.Tick())
    assert done == [0, 2]
    assert told == [ReleaseSession(1)]
    reactor.close()


async def test_the_core_is_ticked_at_its_deadline() -> None:
    core = FakeCore(lambda _e: [])
    loop = asyncio.get_running_loop()
    now = 100.0
    reactor = Reactor(
        core, carry_out=lambda _i: None, on_bug=lambda _w, _e: None, clock=lambda: now
    )
    core.deadline = 100.05
    before = loop.time()
    reactor.feed(events.SessionClosed(1))
    core.deadline = None
    await wait_for_async(lambda: events.Tick() in core.heard, what="the tick")
    assert loop.time() - before >= 0.04
    assert core.heard == [events.SessionClosed(1), events.Tick()]
    reactor.close()


async def test_a_deadline_that_stays_in_the_past_does_not_hog_the_loop() -> None:
    """A core that cannot get rid of a deadline, because handling it fails."""

    def answers(event: events.Event) -> list[Instruction]:
        if isinstance(event, events.Tick):
            raise RuntimeError("broken")
        return []

    core = FakeCore(answers)
    core.deadline = 1.0
    reactor = Reactor(
        core, carry_out=lambda _i: None, on_bug=lambda _w, _e: None, clock=lambda: 100.0
    )
    reactor.feed(events.SessionClosed(1))
    await wait_for_async(lambda: reactor.bugs >= 1, what="the first tick fails")
    assert reactor._timer is not None
    assert reactor._timer.when() - asyncio.get_running_loop().time() > 0.5
    reactor.close()


async def test_a_closed_reactor_is_silent() -> None:
    core = FakeCore(lambda _e: [])
    reactor = Reactor(core, carry_out=lambda _i: None, on_bug=lambda _w, _e: None)
    reactor.close()
    reactor.feed(events.Tick())
    assert core.heard == []
