"""Producer, worker side: offers that grow while prefill computes.

What a step will have computed is told after its forward (or after each layer of it), never before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

from connector_shim.digests import DIGEST_SIZE
from connector_shim.errors import ClientError
from connector_shim.jobs import FinishJob, StepJobs, StreamKey, StreamOpen, StreamStep, unpack_u32
from connector_shim.memory import MemoryDescription
from connector_shim.reports import Reports
from connector_shim.settings import ShimSettings
from connector_shim.stream_gate import Mark, StreamGate
from connector_shim.tally import Tally


class OfferCalls(Protocol):
    """What is needed of `connector_shim.client.Client`."""

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


class StreamedOffers:
    """Until `start`, and for a stream that could not be opened, every end is told at once."""

    def __init__(
        self, reports: Reports, tally: Tally, settings: ShimSettings, gate: StreamGate
    ) -> None:
        self._gate = gate
        self._marks: dict[StreamKey, Mark | None] = {}
        """Where in the GPU's stream each open offer's last tokens were computed."""
        self._reports = reports
        self._tally = tally
        self._settings = settings
        self._client: OfferCalls | None = None
        self._num_tables = 0
        self._layers: dict[str, int] = {}
        self._offered: set[StreamKey] = set()
        """Offers of which the client has not told the end yet."""
        self._open: set[StreamKey] = set()
        """Those of them that may still grow."""
        self._after_forward: dict[StreamKey, int] = {}
        """Tokens that are valid once the forward of this step has run."""
        self._watched = settings.send_type == "put"
        self._reading: dict[StreamKey, int] = {}
        """Of offers that somebody reads: tokens that all who do have."""
        self._due: dict[StreamKey, int] = {}
        """Tokens that this step is to see read, where it waits for that."""
        self._patient: set[StreamKey] = set()
        """Offers whose readers have kept up so far."""

    def start(self, client: OfferCalls, memory: MemoryDescription) -> None:
        self._client = client
        self._num_tables = memory.num_groups
        if self._settings.stream_unit == "layer":
            self._layers = {layer.name: i for i, layer in enumerate(memory.layers)}

    # --- before the forward -----------------------------------------------------------------

    def revoke(self, keys: Iterable[StreamKey]) -> None:
        """When this returns, the fence words are flipped: the blocks may be written."""
        for key in keys:
            self._after_forward.pop(key, None)
            self._marks.pop(key, None)
            self._gate.drop(key)
            if key in self._open and self._client is not None:
                self._open.discard(key)
                self._guarded("revoke", key, lambda c, k: c.revoke(*k))

    def step(self, jobs: StepJobs, usable: bool) -> None:
        # A step that ran no forward leaves nothing behind that the next one could tell too early.
        self._after_forward.clear()
        self._due.clear()
        for job in jobs.opens:
            self._opened(job, usable)
        for step in jobs.steps:
            self._stepped(step)
        for finish in jobs.finishes:
            self._finished(finish)

    def _opened(self, job: StreamOpen, usable: bool) -> None:
        if self._client is None or not usable:
            self._tally.note("stream_not_opened", f"request {job.req_id!r}: no daemon")
            return
        digests = {
            position: job.digests[i * DIGEST_SIZE : (i + 1) * DIGEST_SIZE]
            for i, position in enumerate(unpack_u32(job.positions))
        }
        alive = self._guarded(
            "offer",
            job.key,
            lambda c, k: c.offer(
                *k,
                blocks=[[] for _ in range(self._num_tables)],
                digests=digests,
                lease_s=self._settings.lease_s,
                watched=self._watched,
            ),
        )
        if alive:
            self._offered.add(job.key)
            self._open.add(job.key)
            if self._watched:
                self._patient.add(job.key)

    def _stepped(self, step: StreamStep) -> None:
        if step.key not in self._open:
            return
        for group, first, packed in step.blocks:
            if group < self._num_tables:
                self._extend_blocks(step.key, group, first, unpack_u32(packed))
        if step.tokens:
            self._after_forward[step.key] = step.tokens

    def _extend_blocks(self, key: StreamKey, group: int, first: int, blocks: Sequence[int]) -> None:
        self._guarded(
            "extend", key, lambda c, k: c.extend_blocks(*k, group=group, first=first, blocks=blocks)
        )

    def _finished(self, job: FinishJob) -> None:
        if not self._reports.hold_started(job.req_id, job.key):
            self._tally.note("offer_twice", f"request {job.req_id!r}", logging.ERROR)
            return
        alive = False
        tokens = job.tokens
        if job.key in self._open:
            self._open.discard(job.key)
            if tokens is None:
                # OfferEnded follows, and ends the hold.
                alive = self._guarded("revoke", job.key, lambda c, k: c.revoke(*k))
            else:
                mark = self._marks.pop(job.key, None)
                self._gate.run(mark, job.key, partial(self._seal, job.key, tokens))
                return
        self._marks.pop(job.key, None)
        if not alive:
            self._reports.hold_ended(job.key)

    def _seal(self, key: StreamKey, tokens: int) -> None:
        if not self._guarded("seal", key, lambda c, k: c.seal(*k, tokens=tokens)):
            self._reports.hold_ended(key)

    # --- while and after it -----------------------------------------------------------------

    def layer_saved(self, layer: str) -> bool:
        """True if the daemon was told something."""
        index = self._layers.get(layer)
        if index is None or not self._after_forward:
            return False
        mark = self._gate.mark()
        for key, tokens in self._after_forward.items():
            self._gate.run(mark, key, partial(self._extend, key, tokens, index, 1))
        return True

    def forward_done(self) -> bool:
        """All layers, also those without a hook. True if the daemon was told something."""
        told = bool(self._after_forward)
        # Also where no offer grows: one that is made whole later refers to it.
        mark = self._gate.mark()
        for key, tokens in self._after_forward.items():
            if key in self._open:
                self._marks[key] = mark
            self._gate.run(mark, key, partial(self._extend, key, tokens, 0, 0))
            if key in self._patient:
                self._due[key] = tokens
        self._after_forward.clear()
        return told

    # --- who reads, for a step that waits -----------------------------------------------------

    def read(self, key: StreamKey, readers: int, tokens: int) -> None:
        """`readers` fetches lack some of an offer, and have tokens `[0, tokens)` of it."""
        self._reading.pop(key, None)
        if readers and key in self._patient:
            self._reading[key] = tokens

    def ended(self, key: StreamKey) -> bool:
        """There is no such offer any more. True if it was one of these, and this was not known."""
        self._open.discard(key)
        self.stop_waiting(key)
        known = key in self._offered
        self._offered.discard(key)
        return known

    def unread(self) -> list[StreamKey]:
        """Offers of which this step's part has not reached all who fetch it."""
        return [key for key, tokens in self._due.items() if self._reading.get(key, tokens) < tokens]

    def stop_waiting(self, key: StreamKey) -> None:
        """Its readers are gone, or too slow: no later step waits for them either."""
        self._reading.pop(key, None)
        self._patient.discard(key)

    def _extend(self, key: StreamKey, tokens: int, first_layer: int, num_layers: int) -> None:
        self._guarded(
            "extend",
            key,
            lambda c, k: c.extend(
                *k, tokens=tokens, first_layer=first_layer, num_layers=num_layers
            ),
        )

    def _guarded(
        self, what: str, key: StreamKey, call: Callable[[OfferCalls, StreamKey], bool | None]
    ) -> bool:
        """Whether the offer is alive after the call. A call that fails ends the stream."""
        client = self._client
        if client is None:
            return False
        try:
            alive = call(client, key) is not False
        except ClientError as error:
            self._tally.note(f"{what}_{error.code}", error.detail)
            alive = False
            if what in ("extend", "seal"):
                client.revoke(*key)
        if not alive:
            self._open.discard(key)
            self.stop_waiting(key)
        return alive
