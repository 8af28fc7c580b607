"""The half of the connector that lives beside vLLM's scheduler.

It decides what is fetched and what is offered; it opens no socket and never waits. Requests and
blocks are vLLM's own objects, of whichever version; only attributes that all have are read.
No method raises because of what a request carries: the request goes on without kvd, and the
reason is counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from connector_shim.daemons import DaemonStates
from connector_shim.jobs import (
    FetchJob,
    OfferJob,
    RankId,
    RankState,
    ReleaseJob,
    StepJobs,
    pack_blocks,
)
from connector_shim.params import (
    ParamsError,
    RemotePrefill,
    offer_params,
    parse_remote_prefill,
    wanted_transfer_id,
    wants,
)
from connector_shim.plans import EngineShape, Plan, fetch_job, missing_ranks, offer_job
from connector_shim.prompts import finished_well, unfit
from connector_shim.readings import (
    clear_flag,
    fetch_end,
    fresh_blocks,
    valid_tokens,
)
from connector_shim.renewals import Renewals
from connector_shim.settings import ShimSettings
from connector_shim.streams import NULL_BLOCK_ID, Streams
from connector_shim.tally import Tally

log = logging.getLogger("vllm.kvd.scheduler")


_WAIT = Plan(0, 0, RemotePrefill("", None, "", (), None))
"""Stands for: ask again in the next step."""


class _NotThisOne(Exception):
    """Why kvd does nothing for one request."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class SchedulerHalf:
    """What this engine cannot do at all is the workers' to know: they say that they are down."""

    def __init__(
        self,
        shape: EngineShape,
        settings: ShimSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        started_ns: int | None = None,
    ) -> None:
        self.shape = shape
        self.settings = settings
        self.tally = Tally(log)
        self.daemons = DaemonStates(
            shape.pp_size * shape.tp_size,
            recheck_s=settings.recheck_s,
            wait_s=settings.daemon_wait_s,
            clock=clock,
        )
        # Generations and fetch ids of an earlier life of this engine are never given out again.
        started = (time.time_ns() if started_ns is None else started_ns) // 1000
        self._generation = started
        self._fetch_prefix = f"{started:x}"
        self._num_fetches = 0
        self._seq = 0

        # By request id; every request is taken out when it has blocks or has finished.
        self._plans: dict[str, Plan] = {}
        self._reasons: dict[str, _NotThisOne] = {}
        self._receiving: dict[str, str] = {}
        self._held: dict[str, int] = {}
        self._held_blocks = 0

        self._renewals = Renewals(settings.lease_s, clock)
        self._fetches: list[FetchJob] = []
        self._offers: list[OfferJob] = []
        self._cancels: dict[str, None] = {}
        self._releases: list[ReleaseJob] = []
        self._revoke_all = False
        self._streams = Streams(shape.block_sizes, self._next_generation)

    def _next_generation(self) -> int:
        self._generation += 1
        return self._generation

    # --- consumer ---------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """A request has entered the queue; vLLM before 0.22 does not tell."""
        try:
            params = request.kv_transfer_params
            if wants(params, "do_remote_prefill"):
                self._renewals.want(request.request_id, parse_remote_prefill(params))
        except ParamsError:
            return  # told when its turn comes
        except Exception:
            log.exception("kvd: the KV of a waiting request is not kept for it")
            self.tally.note("internal", "while looking at a new request")

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens to be loaded beyond the `num_computed_tokens` that are here, and "async".

        (None, False) asks the scheduler to come again in its next step. Changes nothing that a
        second call would notice, since vLLM asks at every step until the request has blocks.
        """
        req_id = request.request_id
        self._plans.pop(req_id, None)
        self._reasons.pop(req_id, None)
        try:
            plan = self._plan(request, num_computed_tokens)
        except _NotThisOne as reason:
            self._reasons[req_id] = reason
        except ParamsError as error:
            self._reasons[req_id] = _NotThisOne(f"params_{error.kind}", error.detail)
        except Exception as error:
            log.exception("kvd: a request is served without KV transfer")
            self._reasons[req_id] = _NotThisOne("internal", f"while planning a fetch: {error!r}")
        else:
            if plan is _WAIT:
                return None, False
            if plan is not None:
                self._plans[req_id] = plan
                return plan.end - plan.start, True
        return 0, False

    def _plan(self, request: Any, computed: int) -> Plan | None:
        params = request.kv_transfer_params
        consumer = wants(params, "do_remote_prefill")
        producer = wants(params, "do_remote_decode")
        if not (consumer or producer):
            return None
        plan = self._remote_plan(request, params, computed) if consumer else None
        if plan is None and not producer:
            return None
        # A producer asks as well: what it offers at its end relies on the same news.
        state = self.daemons.ask(request.request_id)
        if state == "wait":
            return _WAIT
        if plan is not None and state == "down":
            raise _NotThisOne("daemon_down", f"prefilled here: {self.daemons.problem()}")
        return plan

    def _remote_plan(self, request: Any, params: Mapping[str, Any], computed: int) -> Plan | None:
        remote = parse_remote_prefill(params)
        reason = unfit(request)
        if reason:
            raise _NotThisOne(f"unfit_{reason}", f"request {request.request_id!r}")
        block_size = self.shape.block_size
        end = fetch_end(request.num_prompt_tokens, remote.num_tokens, block_size)
        if computed >= end:
            return None
        if computed % block_size:
            raise _NotThisOne("unaligned_start", f"{computed} tokens are held here already")
        missing = missing_ranks(self.shape, remote.ranks)
        if missing and remote.bootstrap is None:
            raise _NotThisOne("missing_ranks", missing)
        self._renewals.want(request.request_id, remote)
        return Plan(computed, end, remote)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are given: fetch into them, or let the producer go when nothing is needed."""
        plan = self._plans.pop(request.request_id, None)
        self.daemons.forget(request.request_id)
        self._renewals.drop(request.request_id)
        known_reason = self._note_reason(request.request_id)
        params = request.kv_transfer_params
        asked = clear_flag(params)
        if num_external_tokens > 0:
            self._fetch(request, blocks, num_external_tokens, plan)
        elif asked:
            self._release(params, known_reason)
        self._stream(request)

    def _stream(self, request: Any) -> None:
        """Offer the request's KV while it is computed, if that is wanted and can be."""
        if self.settings.send_type == "get" or not self.shape.full_attention:
            return
        try:
            params = request.kv_transfer_params
            if wants(params, "do_remote_decode") and self._not_offered(request) is None:
                self._streams.want(request, wanted_transfer_id(params, request.request_id))
        except ParamsError:
            # Told when the request ends, like all that keeps it from being offered.
            return

    def _note_reason(self, req_id: str) -> bool:
        reason = self._reasons.pop(req_id, None)
        if reason is not None:
            self.tally.note(reason.kind, reason.detail)
        return reason is not None

    def _fetch(self, request: Any, blocks: Any, num_tokens: int, plan: Plan | None) -> None:
        self._num_fetches += 1
        fetch_id = f"{self._fetch_prefix}-{self._num_fetches}"
        try:
            job = fetch_job(self.shape, request, blocks, num_tokens, plan, fetch_id)
        except Exception as error:
            # The scheduler counts on this load now: it must end, so it ends in failure.
            log.exception("kvd: a fetch fails before it starts")
            self.tally.note("internal", "while preparing a fetch")
            job = FetchJob(
                request.request_id, fetch_id, "", None, "", (), 0, 0,
                blocks=tuple(pack_blocks(ids) for ids in fresh_blocks(blocks)),
                digest=bytes(16), doomed=f"internal: {error}",
            )  # fmt: skip
        self._receiving[request.request_id] = fetch_id
        self._fetches.append(job)

    def _release(self, params: Mapping[str, Any], noted: bool = False) -> None:
        try:
            remote = parse_remote_prefill(params)
        except ParamsError as error:
            if not noted:
                self.tally.note(f"params_{error.kind}", error.detail)
            return
        self._releases.append(remote.notice(ReleaseJob))

    # --- producer, and the end of every request ---------------------------------------------

    def request_finished(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """(keep the blocks until finished_sending, kv_transfer_params of the response)."""
        req_id = request.request_id
        self._plans.pop(req_id, None)
        self.daemons.forget(req_id)
        self._renewals.drop(req_id)
        known_reason = self._note_reason(req_id)
        hold, answer = False, None
        try:
            hold, answer = self._finished(request, block_ids, known_reason)
        except ParamsError as error:
            self.tally.note(f"params_{error.kind}", error.detail)
        except Exception:
            log.exception("kvd: the KV of a request is not offered")
            self.tally.note("internal", "while preparing an offer")
        if self._streams.finish(req_id, None) is not None:
            # Somebody may be reading: the blocks are free once the offer is known to be gone,
            # however the request ended.
            return True, None
        return hold, answer

    def _finished(
        self, request: Any, block_ids: Sequence[Sequence[int]], known_reason: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        if request.request_id in self._receiving:
            self._cancels[request.request_id] = None
            return False, None
        params = request.kv_transfer_params
        if clear_flag(params):
            self._release(params, known_reason)
            return False, None
        if not wants(params, "do_remote_decode") or not finished_well(request):
            return False, None
        return self._offer(request, params, block_ids)

    def _offer(
        self, request: Any, params: Mapping[str, Any], block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        reason = self._not_offered(request)
        if reason:
            self.tally.note(reason[0], f"not offered: {reason[1]}")
            return False, None
        tokens = valid_tokens(request)
        if tokens <= 0:
            return False, None
        tables = []
        for table, size in zip(block_ids, self.shape.block_sizes, strict=True):
            num_blocks = -(-tokens // size)
            if len(table) < num_blocks:
                return False, None
            tables.append(list(table[:num_blocks]))
        held = sum(1 for table in tables for block in table if block != NULL_BLOCK_ID)
        limit = self.settings.max_held_fraction * self.shape.num_blocks
        if self._held_blocks + held > limit:
            self.tally.note(
                "held_too_many",
                f"{self._held_blocks} blocks are held for consumers, {held} more would pass "
                f"max_held_fraction={self.settings.max_held_fraction:g}",
            )
            return False, None
        # A stream holds the prompt alone: what was generated after it is not offered.
        key = self._streams.finish(request.request_id, min(tokens, request.num_prompt_tokens))
        if key is not None:
            tokens = min(tokens, request.num_prompt_tokens)
        else:
            key = wanted_transfer_id(params, request.request_id), self._next_generation()
            self._offers.append(offer_job(self.shape, request, key, tokens, tables))
        answer = offer_params(
            transfer_id=key[0],
            generation=key[1],
            request_id=request.request_id,
            engine_id=self.shape.engine_id,
            tokens=tokens,
            block_ids=tables,
            ranks=self.daemons.addresses(),
            tp_size=self.shape.tp_size,
            lease_s=self.settings.lease_s,
        )
        self._held[request.request_id] = held
        self._held_blocks += held
        return True, answer

    def _not_offered(self, request: Any) -> tuple[str, str] | None:
        problem = self.daemons.problem()
        if problem:
            return "daemon_down", problem
        reason = unfit(request, consumer=False)
        return (f"unfit_{reason}", f"request {request.request_id!r}") if reason else None

    # --- each step --------------------------------------------------------------------------

    def take_jobs(self, scheduler_output: Any = None) -> StepJobs:
        """The jobs since the last call; empty ones too, so that workers see each step."""
        self._seq += 1
        if scheduler_output is not None:
            self._streams.observe(scheduler_output)
        opens, steps, revokes, finishes = self._streams.take()
        jobs = StepJobs(
            seq=self._seq,
            fetches=tuple(map(self._shared_or_sole, self._fetches)),
            offers=tuple(self._offers),
            cancels=tuple(self._cancels),
            releases=tuple(self._releases),
            renews=tuple(self._renewals.take()),
            revoke_all=self._revoke_all,
            revokes=revokes,
            opens=opens,
            steps=steps,
            finishes=finishes,
        )
        self._fetches.clear()
        self._offers.clear()
        self._cancels.clear()
        self._releases.clear()
        self._revoke_all = False
        return jobs

    def _shared_or_sole(self, job: FetchJob) -> FetchJob:
        """Others may wait for the same transfer: prompts that came in one list, for example."""
        if job.sole and self._renewals.waited_for(job.engine_id, job.transfer_id):
            return replace(job, sole=False)
        return job

    def worker_output(
        self, finished_sending: Iterable[str], finished_recving: Iterable[str]
    ) -> None:
        """What all workers have finished; vLLM tells it before it acts on it."""
        for req_id in finished_sending:
            self._held_blocks -= self._held.pop(req_id, 0)
        for req_id in finished_recving:
            self._receiving.pop(req_id, None)
            self._cancels.pop(req_id, None)

    def update_daemons(self, states: Mapping[RankId, RankState]) -> None:
        """News of the ranks' daemons."""
        self.daemons.update(states)

    def shutdown(self) -> None:
        """Nothing is asked any more."""
        self.daemons.close()

    def reset_cache(self) -> bool:
        """The engine's KV is void: take all offers back, and those not handed over yet too."""
        self._revoke_all = True
        return True

    def statistics(self) -> dict[str, int]:
        """Gauges and counts, for tests and metrics."""
        return {
            "held_blocks": self._held_blocks,
            "offers": len(self._held),
            "receiving": len(self._receiving),
            "planned": len(self._plans),
            "renewed": len(self._renewals),
            "streams": len(self._streams),
            "waiting": self.daemons.waiting,
            **{f"noted_{kind}": count for kind, count in self.tally.counts.items()},
        }
