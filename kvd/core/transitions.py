"""State tables `{(state, event): move}`, and what happens when a move is not in one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from kvd.errors import KvdError
from kvd.protocol.codes import Code

STORY_LENGTH = 32

Story = deque[tuple[float, str, str, str]]
"""The last moves of one subject: (time, state before, event, state after)."""


def new_story() -> Story:
    return deque(maxlen=STORY_LENGTH)


class Subject(Protocol):
    """Something that a table moves: an offer, a fetch, an attachment."""

    state: Any
    story: Story
    moving: bool

    @property
    def label(self) -> str: ...


class IllegalTransition(KvdError):
    """A move that the table does not know: a mistake in the core, never in its input."""

    code = Code.INTERNAL

    def __init__(self, table: str, subject: Subject, event: str, why: str) -> None:
        self.story = tuple(subject.story)
        told = "; ".join(f"{when:.3f} {old} -{what}-> {new}" for when, old, what, new in self.story)
        super().__init__(f"{table} {subject.label}: {event} in {subject.state}: {why} [{told}]")


@dataclass(frozen=True, slots=True)
class Move:
    """What an event does in a state; `to` lists every state that it may lead to."""

    to: tuple[StrEnum, ...]
    run: Callable[[Any, Any, Any], StrEnum]


Owner = TypeVar("Owner")
S = TypeVar("S", bound=Subject)
Function = Callable[[Owner, S, Any], StrEnum]


class Table(Generic[Owner, S]):
    """All moves of one kind of subject. `fire` is the only thing that changes a state."""

    def __init__(self, name: str, initial: StrEnum) -> None:
        self.name = name
        self.initial = initial
        self.moves: dict[tuple[StrEnum, StrEnum], Move] = {}

    def on(
        self, states: StrEnum | tuple[StrEnum, ...], event: StrEnum, *to: StrEnum
    ) -> Callable[[Function[Owner, S]], Function[Owner, S]]:
        """Enter the decorated function for `event` in `states`; without `to` the state stays."""

        def enter(run: Function[Owner, S]) -> Function[Owner, S]:
            for state in states if isinstance(states, tuple) else (states,):
                assert (state, event) not in self.moves, (state, event)
                self.moves[state, event] = Move(to or (state,), run)
            return run

        return enter

    def fire(self, owner: Owner, subject: S, event: StrEnum, now: float, arg: Any = None) -> None:
        """Raises IllegalTransition, with the subject's recent story, for a move not entered."""
        before = subject.state
        move = self.moves.get((before, event))
        if move is None:
            raise IllegalTransition(self.name, subject, event, "no such move")
        if subject.moving:
            raise IllegalTransition(self.name, subject, event, "in the middle of a move")
        subject.moving = True
        try:
            after = move.run(owner, subject, arg)
        finally:
            subject.moving = False
        subject.story.append((now, before, event, after))
        if after not in move.to:
            raise IllegalTransition(self.name, subject, event, f"led to {after}")
        subject.state = after
