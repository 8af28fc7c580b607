"""Producer, scheduler side: offers that grow while prefill computes.

A stream opens when the scheduler first schedules a request whose KV is wanted elsewhere. Each
step adds the blocks that the request was given and says how many tokens will be valid once the
step's forward has run; the worker tells the daemon after it. Preemption ends a stream before its
blocks can be written again; when the request resumes, a new generation starts over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any

from connector_shim.jobs import FinishJob, StreamKey, StreamOpen, StreamStep, pack_blocks, pack_u32
from connector_shim.prompts import prompt_digest

NULL_BLOCK_ID = 0
"""vLLM's null block: it stands for what a sliding window has left behind."""


@dataclass(slots=True)
class _Stream:
    """One request that is being prefilled for a consumer elsewhere."""

    request: Any
    transfer_id: str
    key: StreamKey | None = None
    """(transfer, generation) of the open offer; None before the first step and while preempted."""
    num_blocks: list[int] = field(default_factory=list)
    """Blocks told so far, of each group."""


class Streams:
    """`next_generation` numbers the attempts of this engine; all its ranks hear the same."""

    def __init__(self, block_sizes: Sequence[int], next_generation: Callable[[], int]) -> None:
        self._sizes = tuple(block_sizes)
        self._block_size = lcm(*block_sizes)
        self._next_generation = next_generation
        self._streams: dict[str, _Stream] = {}
        self._opens: list[StreamOpen] = []
        self._steps: list[StreamStep] = []
        self._revokes: list[StreamKey] = []
        self._finishes: list[FinishJob] = []

    def __len__(self) -> int:
        return len(self._streams)

    def want(self, request: Any, transfer_id: str) -> None:
        """The request was given blocks; its next step opens a stream."""
        self._streams.setdefault(request.request_id, _Stream(request, transfer_id))

    # --- each step --------------------------------------------------------------------------

    def observe(self, output: Any) -> None:
        """Read one step of the scheduler. `output` is vLLM's SchedulerOutput, of any version."""
        if not self._streams:
            return
        cached = output.scheduled_cached_reqs
        resumed = set(getattr(cached, "resumed_req_ids", None) or ())
        for req_id in {*(getattr(output, "preempted_req_ids", None) or ()), *resumed}:
            self._preempted(req_id)
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            self._scheduled(new.req_id, new.block_ids, new.num_computed_tokens, scheduled, True)
        for i, req_id in enumerate(cached.req_ids):
            self._scheduled(
                req_id,
                cached.new_block_ids[i],
                cached.num_computed_tokens[i],
                scheduled,
                req_id in resumed,
            )

    def _preempted(self, req_id: str) -> None:
        stream = self._streams.get(req_id)
        if stream is not None and stream.key is not None:
            self._revokes.append(stream.key)
            stream.key = None

    def _scheduled(
        self,
        req_id: str,
        blocks: Sequence[Sequence[int]] | None,
        computed: int,
        scheduled: Any,
        whole: bool,
    ) -> None:
        """`whole`: `blocks` is the request's whole table, not what was added to it."""
        stream = self._streams.get(req_id)
        if stream is None:
            return
        if whole:
            # Also where a runner hands a resumed request over as a new one.
            self._preempted(req_id)
        if stream.key is None:
            if not whole:
                return
            self._open(req_id, stream)
        assert stream.key is not None
        added = []
        for group, ids in enumerate(blocks or ()):
            first = stream.num_blocks[group]
            stream.num_blocks[group] += len(ids)
            if ids:
                table = pack_blocks(None if one == NULL_BLOCK_ID else one for one in ids)
                added.append((group, first, table))
        prompt = int(stream.request.num_prompt_tokens)
        tokens = min(int(computed) + int(scheduled.get(req_id, 0)), prompt)
        if tokens < prompt:
            # The tail of a block is still to be written: it goes when the block is whole.
            tokens -= tokens % self._block_size
        self._steps.append(StreamStep(stream.key, tuple(added), tokens))

    def _open(self, req_id: str, stream: _Stream) -> None:
        request = stream.request
        prompt = int(request.num_prompt_tokens)
        digest = prompt_digest(request, prompt)
        positions = digest.boundaries(self._block_size, prompt)
        stream.key = (stream.transfer_id, self._next_generation())
        stream.num_blocks = [0] * len(self._sizes)
        self._opens.append(
            StreamOpen(req_id, stream.key, pack_u32(positions), b"".join(digest.at(positions)))
        )

    # --- the end ----------------------------------------------------------------------------

    def finish(self, req_id: str, tokens: int | None) -> StreamKey | None:
        """The request has ended. `tokens`: how many its offer holds, None to take it back.

        Returns the open stream's key: its blocks are then held until finished_sending. None if
        there is no open stream, and nothing to hold for it.
        """
        stream = self._streams.pop(req_id, None)
        if stream is None or stream.key is None:
            return None
        self._finishes.append(FinishJob(req_id, stream.key, tokens))
        return stream.key

    def take(
        self,
    ) -> tuple[
        tuple[StreamOpen, ...],
        tuple[StreamStep, ...],
        tuple[StreamKey, ...],
        tuple[FinishJob, ...],
    ]:
        """What the workers have to do in this step: opens, steps, revokes, finishes."""
        taken = (
            tuple(self._opens),
            tuple(self._steps),
            tuple(self._revokes),
            tuple(self._finishes),
        )
        for part in (self._opens, self._steps, self._revokes, self._finishes):
            part.clear()
        return taken

    def open_keys(self) -> Iterable[StreamKey]:
        return [one.key for one in self._streams.values() if one.key is not None]
