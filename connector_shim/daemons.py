"""What the scheduler half knows of its ranks' daemons, and how fresh that is.

The news come with the workers' output of each step. An engine that idles makes no steps, so old
news say little: a request that finds them old waits for the next ones, which costs one empty step.
It waits for that once, however long a step takes here; and both that wait and the wait for a
daemon that is just registering are bounded in time.

News of a death come too late for a request that ends in the very step in which its daemon died, so
where the daemon's process can be seen from here, its exit counts as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from connector_shim.exits import Exits
from connector_shim.jobs import Address, RankId, RankState

Answer = Literal["up", "down", "wait"]


class DaemonStates:
    """`ranks`: how many there must be. `clock` gives seconds that never go back."""

    def __init__(
        self, ranks: int, *, recheck_s: float, wait_s: float, clock: Callable[[], float]
    ) -> None:
        self.recheck_s = recheck_s
        self._ranks = ranks
        self._wait_s = wait_s
        self._clock = clock
        self._states: dict[RankId, RankState] = {}
        self._exits = Exits()
        self._heard = float("-inf")
        self._updates = 0
        self._waits: dict[str, tuple[int, float]] = {}
        """Of each request that was told to wait: updates until then, and when it was first told."""
        self._pending_since: float | None = None
        self._pending_pids: tuple[int, ...] = ()
        """Whom that is about: another process has its own time to get ready."""

    def update(self, states: Mapping[RankId, RankState]) -> None:
        """News from the workers; ranks that are not named keep their state."""
        self._states.update(states)
        self._exits.follow(states)
        self._heard = self._clock()
        self._updates += 1
        pids = tuple(state.pid for _, state in sorted(self._states.items()) if not state.up)
        if self.problem() is None or not self._pending():
            self._pending_since = None
        elif self._pending_since is None or pids != self._pending_pids:
            self._pending_since = self._heard
        self._pending_pids = pids

    def problem(self) -> str | None:
        """Why not all ranks' daemons are up, None when they are."""
        if len(self._states) < self._ranks:
            return f"{self._ranks - len(self._states)} of {self._ranks} ranks have not reported"
        for (pp, tp), state in sorted(self._states.items()):
            if not state.up:
                return f"rank pp={pp} tp={tp}: {state.detail or state.phase}"
        for pp, tp in sorted(self._exits.seen()):
            return f"rank pp={pp} tp={tp}: the daemon has exited"
        return None

    def ask(self, req_id: str) -> Answer:
        """Whether a request may rely on the daemons now, or must ask again in the next step."""
        now = self._clock()
        updates, since = self._waits.get(req_id, (self._updates, now))
        answer = self._judge(now, news_since_it_asked=self._updates > updates)
        if answer != "wait":
            return answer
        if now - since <= self._wait_s:
            self._waits[req_id] = (updates, since)
            return "wait"
        return "down" if self.problem() else "up"

    def forget(self, req_id: str) -> None:
        """The request does not ask any more."""
        self._waits.pop(req_id, None)

    @property
    def waiting(self) -> int:
        """Requests that were told to wait."""
        return len(self._waits)

    def _judge(self, now: float, news_since_it_asked: bool) -> Answer:
        old = now - self._heard > self.recheck_s or self._exits.seen()
        if old and not news_since_it_asked:
            return "wait"
        if self.problem() is None:
            return "up"
        if self._pending_since is not None and now - self._pending_since < self._wait_s:
            return "wait"
        return "down"

    def addresses(self) -> dict[RankId, Address]:
        """Where peers reach each rank's daemon."""
        return {rank: (state.host, state.port) for rank, state in self._states.items()}

    def close(self) -> None:
        """Lets go of the processes that were watched."""
        self._exits.close()

    def _pending(self) -> bool:
        """Whether waiting can help: no rank is down for good, and all have reported."""
        return len(self._states) >= self._ranks and all(
            state.phase in ("up", "pending") for state in self._states.values()
        )
