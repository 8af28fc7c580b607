"""Consumer, scheduler side: keeps prefill's offers alive while their requests wait in the queue.

vLLM asks the connector about a request only when its turn comes, which may be long after prefill
has ended. Until then its offer's lease is started again in time; prefill's daemon bounds how often
that helps (`lease_max_s`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable

from connector_shim.jobs import RenewJob
from connector_shim.params import RemotePrefill

PER_LEASE = 3
"""Renewals in the time of one lease, so that a lost one costs nothing."""
SHORTEST_S = 0.1
MAX_AT_ONCE = 256
"""Most renewals of one step; what is due beyond that goes with the next."""


class Renewals:
    """`lease_s`: the lease of producers that do not say theirs."""

    def __init__(self, lease_s: float, clock: Callable[[], float]) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._waiting: dict[str, RemotePrefill] = {}
        self._transfers: Counter[tuple[str, str]] = Counter()
        """How many wait for each (engine, transfer)."""
        self._due: list[tuple[float, str]] = []
        """A heap. An entry counts only if its request still waits."""

    def __len__(self) -> int:
        return len(self._waiting)

    def want(self, req_id: str, remote: RemotePrefill) -> None:
        """A request waits that will need this KV. Again for the same request does nothing."""
        if req_id not in self._waiting:
            self._waiting[req_id] = remote
            self._transfers[remote.engine_id, remote.transfer_id] += 1
            self._plan(req_id, remote)

    def drop(self, req_id: str) -> None:
        """Its turn has come, or it is over."""
        remote = self._waiting.pop(req_id, None)
        if remote is None:
            return
        key = (remote.engine_id, remote.transfer_id)
        self._transfers[key] -= 1
        if not self._transfers[key]:
            del self._transfers[key]

    def waited_for(self, engine_id: str, transfer_id: str) -> bool:
        """Whether a request that waits will need this transfer."""
        return (engine_id, transfer_id) in self._transfers

    def take(self) -> list[RenewJob]:
        """What is to be renewed in this step."""
        now = self._clock()
        jobs: list[RenewJob] = []
        while self._due and self._due[0][0] <= now and len(jobs) < MAX_AT_ONCE:
            _, req_id = heapq.heappop(self._due)
            remote = self._waiting.get(req_id)
            if remote is not None:
                jobs.append(remote.notice(RenewJob))
                self._plan(req_id, remote)
        return jobs

    def _plan(self, req_id: str, remote: RemotePrefill) -> None:
        lease_s = self._lease_s if remote.lease_s is None else remote.lease_s
        after = max(lease_s / PER_LEASE, SHORTEST_S)
        heapq.heappush(self._due, (self._clock() + after, req_id))
