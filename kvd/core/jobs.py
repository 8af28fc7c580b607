"""Consumer: copy jobs in flight, and whose turn it is.

Attachments take turns, and so do the fetches of one attachment. An attachment has a cap of its
own and may always have one job, so that peers which got stuck hold nobody else back.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvd.core.config import CoreConfig
from kvd.core.context import Context
from kvd.core.instructions import StartPull
from kvd.core.manifest import Plan

if TYPE_CHECKING:
    from kvd.core.attachment import Attachment
    from kvd.core.fetch import Fetch

SHM = "shm"
MAX_JOB_BLOCKS = 8_192
"""Of a job, in all of its pieces: lists of ids are walked on the event loop, about 1 us an id."""


@dataclass(frozen=True, slots=True)
class Job:
    number: int
    fetch: Fetch
    attachment: Attachment
    plan: Plan


def job_limit(config: CoreConfig, one: Attachment) -> int:
    """Most bytes of one of its jobs, where that is more than one block of one layer."""
    return config.max_shm_job_bytes if one.transport == SHM else config.max_job_bytes


class Jobs:
    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.running: dict[int, Job] = {}
        self._ready: deque[Attachment] = deque()

    def wake(self, fetch: Fetch) -> None:
        """A fetch may have something to copy now."""
        one = fetch.attachment
        if one is None or fetch.queued or not self._may_copy(fetch):
            return
        fetch.queued = True
        one.ready.append(fetch)
        if not one.queued:
            one.queued = True
            self._ready.append(one)

    def _may_copy(self, fetch: Fetch) -> bool:
        return (
            fetch.copies
            and fetch.manifest is not None
            and fetch.manifest.pending_nbytes > 0
            and fetch.jobs < self._ctx.config.max_jobs_per_fetch
        )

    def _may_start(self, one: Attachment) -> bool:
        config = self._ctx.config
        if one.jobs == 0:
            return True
        return one.jobs < config.max_jobs_per_attachment and len(self.running) < config.max_jobs

    def pump(self) -> None:
        """Start what may start."""
        blocked = 0
        while blocked < len(self._ready):
            one = self._ready.popleft()
            if not one.ready:
                one.queued = False
                continue
            self._ready.append(one)
            if not self._may_start(one):
                blocked += 1
                continue
            fetch = one.ready.popleft()
            fetch.queued = False
            if self._may_copy(fetch) and self._start(fetch, one):
                self.wake(fetch)
                blocked = 0

    def _start(self, fetch: Fetch, one: Attachment) -> bool:
        manifest, config = fetch.manifest, self._ctx.config
        assert manifest is not None
        limit = job_limit(config, one)
        # Over shm all copy threads work on one job; other transports want several at once.
        slots = 1 if one.transport == SHM else config.max_jobs_per_fetch - fetch.jobs
        share = -(-manifest.pending_nbytes // slots)
        budget = max(1, min(max(share, config.min_job_bytes), limit))
        plan = manifest.plan(budget, limit, MAX_JOB_BLOCKS)
        if plan is None:
            return False
        job = Job(self._ctx.number(), fetch, one, plan)
        self.running[job.number] = job
        fetch.jobs += 1
        one.jobs += 1
        fetch.session.jobs += 1
        self._ctx.emit(
            StartPull(
                job=job.number,
                attach_id=one.id,
                session=fetch.session.id,
                fetch_id=fetch.id,
                ticket=fetch.ticket,
                fence_slot=fetch.fence_slot,
                fence_word=fetch.fence_word,
                pieces=plan.pieces,
                nbytes=plan.nbytes,
            )
        )
        return True

    def take(self, number: int) -> Job | None:
        """The job that was answered; None if it is not in flight."""
        job = self.running.pop(number, None)
        if job is not None:
            job.fetch.jobs -= 1
            job.attachment.jobs -= 1
            job.fetch.session.jobs -= 1
        return job
