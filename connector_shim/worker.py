"""The half of the connector that lives in each worker process: one rank, one daemon, one client.

It turns a step's jobs into calls of the client and the client's events into reports. It never
waits inside a step. With no daemon, or with memory that cannot be shared, every fetch fails at
once and no offer holds a block: the engine prefills locally and serves on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from connector_shim.errors import ClientError
from connector_shim.events import Down, Event, Up
from connector_shim.exits import pid_space
from connector_shim.jobs import (
    Drained,
    FetchJob,
    OfferJob,
    RankId,
    RankState,
    ReleaseJob,
    StepJobs,
    unpack_u32,
)
from connector_shim.keeper import DaemonKeeper
from connector_shim.memory import MemoryDescription
from connector_shim.reports import Reports
from connector_shim.settings import ShimSettings
from connector_shim.stream_gate import StreamGate, cuda_mark
from connector_shim.streamed import StreamedOffers
from connector_shim.tally import Tally
from connector_shim.telemetry import Telemetry
from kvd.protocol.codes import Code
from kvd.protocol.local import FetchDone, NotifyDone, OfferEnded, OfferRead, State, Welcome
from kvd.protocol.types import PeerAddr, Rank

log = logging.getLogger("vllm.kvd.worker")

DIGEST_SIZE = 16
OVERDUE_S = 5.0
"""How long after a fetch's own deadline the daemon is reminded of it with a cancel."""


class WorkerClient(Protocol):
    """What the worker half needs of `connector_shim.client.Client`."""

    @property
    def state(self) -> str: ...
    @property
    def welcome(self) -> Welcome | None: ...
    @property
    def daemon_pid(self) -> int: ...
    def describe(self, memory: MemoryDescription) -> None: ...
    def poll(self, timeout: float = 0.0) -> list[Event]: ...
    def offer(
        self,
        transfer_id: str,
        generation: int,
        *,
        blocks: Sequence[Sequence[int]],
        digests: Mapping[int, bytes],
        tokens: int | None = None,
        lease_s: float,
        watched: bool = False,
    ) -> None: ...
    def extend_blocks(
        self, transfer_id: str, generation: int, *, group: int, first: int, blocks: Sequence[int]
    ) -> bool: ...
    def extend(
        self,
        transfer_id: str,
        generation: int,
        *,
        tokens: int,
        first_layer: int = 0,
        num_layers: int = 0,
    ) -> bool: ...
    def seal(self, transfer_id: str, generation: int, *, tokens: int) -> bool: ...
    def revoke(self, transfer_id: str, generation: int) -> bool: ...
    def revoke_all(self) -> object: ...
    def fetch(
        self,
        transfer_id: str,
        *,
        remote: PeerAddr,
        engine_id: str,
        start: int,
        end: int,
        blocks: Sequence[Sequence[int]],
        digest: bytes,
        generation: int | None = None,
        deadline_s: float,
        park_s: float,
        fetch_id: str | None = None,
        traceparent: str = "",
        sole: bool = False,
    ) -> str: ...
    def cancel(self, fetch_id: str) -> object: ...
    def release(
        self, transfer_id: str, *, remote: PeerAddr, engine_id: str, generation: int | None = None
    ) -> None: ...
    def renew(
        self, transfer_id: str, *, remote: PeerAddr, engine_id: str, generation: int | None = None
    ) -> None: ...
    def close(self) -> object: ...


class WorkerHalf:
    """`degraded`: why this rank cannot use kvd at all, known before there is a client."""

    def __init__(
        self,
        rank: Rank,
        num_groups: int,
        settings: ShimSettings,
        *,
        degraded: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.rank_id: RankId = (rank.pp_rank, rank.tp_rank)
        self.settings = settings
        self.degraded = degraded
        self.reports = Reports(num_groups)
        self.tally = Tally(log)
        self.stats = Telemetry()
        self._client: WorkerClient | None = None
        self._keeper: DaemonKeeper | None = None
        self._clock = clock
        self._last_seq = 0
        self._detail = "not registered yet"
        self._num_tables = num_groups
        self._gate = StreamGate()
        self._streaming = StreamedOffers(self.reports, self.tally, settings, self._gate)
        self._asked: dict[str, tuple[float, float]] = {}
        """When each fetch was asked for, and when it is overdue."""
        self._shut = False

    # --- start and end ----------------------------------------------------------------------

    def start(
        self, client: WorkerClient, memory: MemoryDescription, keeper: DaemonKeeper | None = None
    ) -> None:
        """Take the client, describe the memory to it, and wait a bounded time for the daemon.

        `keeper`: the daemon is a child of ours, which takes longer to be there.
        """
        self._client = client
        self._keeper = keeper
        self._num_tables = memory.num_groups
        self._streaming.start(client, memory)
        if memory.on_gpu:
            self._gate.start(cuda_mark)
        client.describe(memory)
        settings = self.settings
        end = self._clock() + (settings.spawn_wait_s if keeper else settings.connect_timeout_s)
        self._poll(0.0)
        while (left := end - self._clock()) > 0 and (
            client.state in ("connecting", "registering")
            or (keeper is not None and keeper.running and client.state == "down")
        ):
            self._poll(min(left, 0.1))
        if not self.state().up:
            log.warning("kvd: rank %s serves without KV transfer until there is a daemon: %s",
                        self.rank_id, self.state().detail)  # fmt: skip

    def degrade(self, reason: str) -> None:
        """This rank serves without kvd for good."""
        self.degraded = reason
        log.error("kvd: rank %s serves without KV transfer: %s", self.rank_id, reason)

    def shutdown(self) -> None:
        """Takes all offers back and closes the client; nothing is reported afterwards."""
        if self._shut:
            return
        self._shut = True
        self.reports.shutdown()
        if self._client is not None:
            self._guarded("close", self._client.close)
        if self._keeper is not None:
            self._keeper.stop()

    # --- each step --------------------------------------------------------------------------

    def step(self, jobs: StepJobs) -> None:
        """Act on a step's jobs, before the step's forward. A step that was seen is not repeated."""
        if self._shut or jobs.seq <= self._last_seq:
            return
        self._last_seq = jobs.seq
        # Before the forward of this step, and before anything else: it may write those blocks.
        self._streaming.revoke(jobs.revokes)
        self._poll()
        self._streaming.step(jobs, usable=self.state().up)
        for offer in jobs.offers:
            self._offer(offer)
        if jobs.revoke_all and self._client is not None:
            self._guarded("revoke_all", self._client.revoke_all)
        for fetch in jobs.fetches:
            self._fetch(fetch)
        for req_id in jobs.cancels:
            self._cancel(req_id)
        for release in jobs.releases:
            self._notify("release", release)
        for renew in jobs.renews:
            self._notify("renew", renew)
        # What was just queued goes out now, not after the forward.
        self._poll()

    def layer_saved(self, layer: str) -> None:
        """The forward has computed one layer's attention: its KV of this step is there."""
        if not self._shut and self._streaming.layer_saved(layer):
            self._poll()

    def forward_done(self) -> None:
        """The step's forward has run: what it computed may be read."""
        if not self._shut and self._streaming.forward_done():
            self._poll()
            self._wait_until_read()

    def _wait_until_read(self) -> None:
        """send_type "put": the one wait within a step. Ends when nobody is left to wait for,
        however that comes: all was read, fetches ended, a peer was lost, the daemon is gone."""
        end = self._clock() + self.settings.put_wait_s
        while unread := self._streaming.unread():
            left = end - self._clock()
            if left > 0:
                self._poll(left)
                continue
            for key in unread:
                self._streaming.stop_waiting(key)
                self.tally.note("put_overdue", f"transfer {key[0]!r} is read too slowly")

    def drain(self) -> Drained:
        """What this step has to tell vLLM, each thing once."""
        if not self._shut:
            self._poll()
            self._remind_overdue()
            if self._keeper is not None:
                self._keeper.keep()
        return self.reports.drain()

    def state(self) -> RankState:
        """This rank's daemon, for the scheduler half."""
        if self.degraded:
            return RankState("down", detail=self.degraded)
        client = self._client
        if client is None:
            return RankState("down", detail=self._detail)
        match client.state:
            case "up" if (welcome := client.welcome) is not None:
                return RankState(
                    "up",
                    welcome.advertise.host,
                    welcome.advertise.port,
                    pid=client.daemon_pid,
                    pid_space=pid_space(),
                )
            case "connecting" | "registering":
                detail = "the daemon is registering this engine"
                return RankState("pending", detail=detail, pid=client.daemon_pid)
            case "draining":
                return RankState("down", detail="the daemon is draining")
            case _:
                return RankState("down", detail=self._detail)

    # --- jobs -------------------------------------------------------------------------------

    def _fetch(self, job: FetchJob) -> None:
        fetch_id = f"{job.fetch_id}.{self.rank.pp_rank}.{self.rank.tp_rank}"
        # A pipeline stage may have no layer in the last groups, and so no use for their blocks.
        tables = job.blocks[: self._num_tables]
        if not self.reports.receive_started(job.req_id, fetch_id, tables):
            self.tally.note("fetch_twice", f"request {job.req_id!r}", logging.ERROR)
            return
        client, problem = self._usable()
        address = _address(job, self.rank_id)
        problem = job.doomed or problem
        if client is None or problem or address is None:
            self.tally.note("fetch_not_tried", problem or "no address for this rank")
            self._fetch_ended(fetch_id, Code.NOT_REGISTERED)
            return
        # Kernels that were launched before may still use these blocks.
        ask = partial(self._ask, client, job, fetch_id, address)
        self._gate.run(self._gate.mark(), fetch_id, ask)

    def _ask(self, client: WorkerClient, job: FetchJob, fetch_id: str, address: PeerAddr) -> None:
        settings = self.settings
        try:
            client.fetch(
                job.transfer_id,
                remote=address,
                engine_id=job.engine_id,
                start=job.start,
                end=job.end,
                blocks=[unpack_u32(table) for table in job.blocks[: self._num_tables]],
                digest=job.digest,
                generation=job.generation,
                deadline_s=self.settings.fetch_deadline_s,
                # Both engines were asked at once: the producer has its own queue to go through.
                park_s=settings.park_s if job.bootstrap is None else settings.fetch_deadline_s,
                fetch_id=fetch_id,
                traceparent=job.traceparent,
                sole=job.sole,
            )
        except ClientError as error:
            self.tally.note(f"fetch_{error.code}", error.detail)
            self._fetch_ended(fetch_id, error.code)
            return
        now = self._clock()
        self._asked[fetch_id] = (now, now + self.settings.fetch_deadline_s + OVERDUE_S)

    def _fetch_ended(self, fetch_id: str, code: Code) -> None:
        self.stats.fetch_ended(code)
        self.reports.receive_ended(fetch_id, ok=False)

    def _offer(self, job: OfferJob) -> None:
        key = (job.transfer_id, job.generation)
        if not self.reports.hold_started(job.req_id, key):
            self.tally.note("offer_twice", f"request {job.req_id!r}", logging.ERROR)
            return
        client, problem = self._usable()
        if client is None or problem:
            self.tally.note("offer_not_made", problem)
            self.stats.offer_ended(Code.NOT_REGISTERED)
            self.reports.hold_ended(key)
            return
        digests = {
            position: job.digests[i * DIGEST_SIZE : (i + 1) * DIGEST_SIZE]
            for i, position in enumerate(unpack_u32(job.positions))
        }
        try:
            client.offer(
                job.transfer_id,
                job.generation,
                blocks=[unpack_u32(table) for table in job.blocks[: self._num_tables]],
                digests=digests,
                tokens=None if self._gate.keeps else job.tokens,
                lease_s=self.settings.lease_s,
            )
            if self._gate.keeps:
                seal = partial(self._seal, client, key, job.tokens)
                self._gate.run(self._gate.latest(), key, seal)
        except ClientError as error:
            self.tally.note(f"offer_{error.code}", error.detail)
            self.stats.offer_ended(error.code)
            self.reports.hold_ended(key)

    def _seal(self, client: WorkerClient, key: tuple[str, int], tokens: int) -> None:
        """Its KV was computed by forwards that have run by now."""
        self._guarded("seal", partial(client.seal, *key, tokens=tokens))

    def _cancel(self, req_id: str) -> None:
        fetch_id = self.reports.fetch_of(req_id)
        if fetch_id is not None and self._gate.drop(fetch_id):
            self._fetch_ended(fetch_id, Code.CANCELLED)
        elif fetch_id is not None and self._client is not None:
            self._guarded("cancel", partial(self._client.cancel, fetch_id))

    def _notify(self, what: str, job: ReleaseJob) -> None:
        client, problem = self._usable()
        address = _address(job, self.rank_id)
        if client is None or problem or address is None:
            self.tally.note(f"{what}_not_sent", problem or "no address for this rank")
            return
        send = partial(
            client.release if what == "release" else client.renew,
            job.transfer_id,
            remote=address,
            engine_id=job.engine_id,
            generation=job.generation,
        )
        self._guarded(what, send)

    def _usable(self) -> tuple[WorkerClient | None, str]:
        state = self.state()
        return self._client, "" if state.up else state.detail or state.phase

    # --- events -----------------------------------------------------------------------------

    def _poll(self, timeout: float = 0.0) -> None:
        if self._client is None:
            return
        self._gate.poll()
        try:
            events = self._client.poll(timeout)
        except ClientError as error:
            self.tally.note(f"poll_{error.code}", error.detail)
            return
        for event in events:
            self._on_event(event)

    def _on_event(self, event: Event) -> None:
        match event:
            case FetchDone():
                self._fetch_done(event)
            case OfferEnded(transfer_id=transfer_id, generation=generation, reason=reason):
                # A stream can be fetched whole, and be over, before its request has finished.
                streamed = self._streaming.ended((transfer_id, generation))
                if self.reports.hold_ended((transfer_id, generation)) or streamed:
                    self.stats.offer_ended(reason)
                else:
                    self.tally.note("late_offer_end", f"{transfer_id!r} {reason}", logging.DEBUG)
            case OfferRead(transfer_id=transfer_id, generation=generation):
                self._streaming.read((transfer_id, generation), event.readers, event.tokens)
            case NotifyDone(transfer_id=transfer_id, what=what, code=code):
                if code != Code.OK:
                    self.tally.note(f"{what}_{code}", f"transfer {transfer_id!r}", logging.INFO)
            case Up(welcome=welcome):
                self._detail = ""
                log.info("kvd: rank %s: daemon %s is up at %s", self.rank_id, welcome.daemon_id,
                         welcome.advertise)  # fmt: skip
            case Down(code=code, detail=detail):
                self._detail = detail
                log.warning("kvd: rank %s: no daemon (%s): %s", self.rank_id, code, detail)
            case State(draining=draining):
                log.info("kvd: rank %s: the daemon %s", self.rank_id,
                         "drains" if draining else "takes work again")  # fmt: skip
            case _:
                self.tally.note("unknown_event", type(event).__name__)

    def _fetch_done(self, done: FetchDone) -> None:
        asked, _ = self._asked.pop(done.fetch_id, (-1.0, 0.0))
        ok = done.code == Code.OK
        if not self.reports.receive_ended(done.fetch_id, ok=ok, bad=list(done.bad)):
            self.tally.note("late_fetch_end", f"{done.fetch_id} {done.code}", logging.DEBUG)
            return
        seconds = self._clock() - asked if asked >= 0 else -1.0
        self.stats.fetch_ended(done.code, done.nbytes, done.tokens, seconds)
        if not ok:
            self.tally.note(f"fetch_{done.code}", done.detail or done.fetch_id)

    def _remind_overdue(self) -> None:
        """Cancels a fetch past its deadline, once; its blocks stay held until it really ends."""
        client = self._client
        if client is None:
            return
        now = self._clock()
        for fetch_id, (asked, overdue) in list(self._asked.items()):
            if overdue < now:
                self._asked[fetch_id] = (asked, float("inf"))
                self.tally.note("fetch_overdue", f"{fetch_id} is past its deadline", logging.ERROR)
                self._guarded("cancel", partial(client.cancel, fetch_id))

    def _guarded(self, what: str, call: Callable[[], object]) -> None:
        """Calls whose failure changes nothing for vLLM."""
        try:
            call()
        except ClientError as error:
            self.tally.note(f"{what}_{error.code}", error.detail)


def _address(job: FetchJob | ReleaseJob, rank_id: RankId) -> PeerAddr | None:
    if job.bootstrap is not None:
        return PeerAddr(*job.bootstrap, rank_id)
    return next((PeerAddr(*address) for rank, address in job.ranks if rank == rank_id), None)
