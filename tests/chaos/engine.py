"""A fake engine of the fault suite, as a process: `python -m tests.chaos.engine SETUP`.

It keeps real shared memory behind the shipped client, does what the driver tells it by lines of
JSON on stdin, and reports by lines of JSON on stdout. It gives blocks up at the earliest moment
that the rules allow, writes over them at once, and takes those that were given up last first.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import itertools
import json
import os
import select
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from connector_shim.client import Client
from connector_shim.errors import ClientError
from connector_shim.events import Down, Up
from connector_shim.memory import shared_blocks
from connector_shim.tracking import bad_indices
from kvd.protocol import local
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr
from tests.chaos.stamps import MAX_GENERATIONS, Ink, Stamp, Words

BLOCK_SIZE = 16
AUDIT_EVERY_S = 1.0
NEVER = (
    Code.INTERNAL,
    Code.BAD_MESSAGE,
    Code.BAD_MEMORY,
    Code.GEOMETRY_MISMATCH,
    Code.UNALIGNED_RANGE,
    Code.RANGE_NOT_HELD,
    Code.UNSUPPORTED,
    Code.INTEGRITY,
)
"""Answers that no fault may lead to."""


def digest(transfer_id: str, position: int) -> bytes:
    return hashlib.blake2b(f"{transfer_id}@{position}".encode(), digest_size=16).digest()


@dataclass(slots=True)
class Prefill:
    """One generation of a transfer that this engine offers."""

    plan: dict[str, Any]
    generation: int
    blocks: list[int]
    filled: dict[int, int] = field(default_factory=dict)
    """Layer -> how many of its blocks hold the transfer's bytes."""

    @property
    def key(self) -> tuple[str, int]:
        return self.plan["tid"], self.generation


@dataclass(slots=True)
class Fetch:
    plan: dict[str, Any]
    blocks: list[int]


class ChaosEngine:
    """`number` is what the stamps call it; the rest is told to the client."""

    def __init__(
        self,
        socket: str,
        engine_id: str,
        number: int,
        num_layers: int,
        num_blocks: int,
        block_bytes: int,
        daemon_hang_s: float,
    ) -> None:
        description, self.mapping = shared_blocks(
            num_layers, num_blocks, block_bytes, block_size=BLOCK_SIZE, model="chaos"
        )
        self.number = number
        self.words: Words = np.frombuffer(self.mapping, dtype=np.uint64).reshape(
            num_layers, num_blocks, block_bytes // 8
        )
        self.ink = Ink(block_bytes // 8)
        self.uses = [0] * num_blocks
        self.free: list[int] = []
        self.give_up(range(num_blocks))
        self.client = Client(
            socket, engine_id=engine_id, client="chaos", daemon_hang_s=daemon_hang_s
        )
        self.client.describe(description)
        description.close()
        self.prefills: dict[tuple[str, int], Prefill] = {}
        self.fetches: dict[str, Fetch] = {}
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.after(AUDIT_EVERY_S, self.audit_again)

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.timers, (time.monotonic() + seconds, next(self._numbers), what))

    def say(self, event: str, **more: Any) -> None:
        data = json.dumps({"ev": event, **more}).encode() + b"\n"
        while data:
            data = data[os.write(sys.stdout.fileno(), data) :]

    def violated(self, what: str) -> None:
        self.say("violation", what=what)

    # --- blocks ---------------------------------------------------------------------------------

    def _canary(self, block: int) -> Stamp:
        return Stamp(self.number, True, self.uses[block], 0, 0, block)

    def give_up(self, blocks: range | list[int]) -> None:
        """Writes over blocks that are free from now on."""
        # A word of each at once, so that whoever still reads any of them reads what is wrong.
        self.words[:, list(blocks), -1] = 0
        for block in blocks:
            self.uses[block] += 1
            self.ink.write(self.words[:, block], self._canary(block))
        self.free.extend(blocks)

    def take(self, count: int) -> list[int] | None:
        """Free blocks, checked: nobody wrote into them. None if there are not so many."""
        if count > len(self.free):
            return None
        blocks = [self.free.pop() for _ in range(count)]
        self.check_free(blocks)
        return blocks

    def check_free(self, blocks: list[int]) -> None:
        for block in blocks:
            wrong = self.ink.wrong(self.words[:, block], self._canary(block))
            if wrong:
                self.violated(f"a byte landed in a free block: {wrong}")
                self.ink.write(self.words[:, block], self._canary(block))

    def audit(self) -> None:
        """All blocks but those of live fetches hold what their owner wrote."""
        self.check_free(self.free)
        for prefill in self.prefills.values():
            for layer, filled in prefill.filled.items():
                for index in range(filled):
                    stamp = self._stamp(prefill, layer, index)
                    block = self.words[layer : layer + 1, prefill.blocks[index]]
                    wrong = self.ink.wrong(block, stamp)
                    if wrong:
                        self.violated(f"a byte landed in an offered block: {wrong}")

    def audit_again(self) -> None:
        self.audit()
        self.after(AUDIT_EVERY_S, self.audit_again)

    # --- producer -------------------------------------------------------------------------------

    def _stamp(self, prefill: Prefill, layer: int, index: int) -> Stamp:
        return Stamp(self.number, False, prefill.plan["use"], prefill.generation, layer, index)

    def prefill(self, plan: dict[str, Any], generation: int = 1) -> None:
        """Offers a transfer, at once or in chunks, and perhaps takes it back meanwhile."""
        blocks = self.take(plan["blocks"])
        if blocks is None:
            self.say("full", tid=plan["tid"])
            return
        prefill = Prefill(plan, generation, blocks)
        streamed = plan["chunks"] > 0
        if not streamed:
            self._fill(prefill, range(len(self.words)), len(blocks))
        try:
            self.client.offer(
                *prefill.key,
                blocks=[[] if streamed else blocks],
                digests={} if streamed else self._digests(plan, 0, len(blocks)),
                tokens=None if streamed else plan["tokens"],
                lease_s=plan["lease_s"],
                watched=plan["aimed_s"] is not None,
            )
        except ClientError as exc:
            self.give_up(blocks)
            self.say("not_offered", tid=plan["tid"], code=str(exc.code))
            return
        self.prefills[prefill.key] = prefill
        if streamed:
            self.after(plan["gap_s"], lambda: self._step(prefill, 1))
        if plan["take_back_s"] is not None and generation <= plan["take_backs"]:
            self.after(plan["take_back_s"], lambda: self._take_back(prefill))

    def _digests(self, plan: dict[str, Any], first: int, last: int) -> dict[int, bytes]:
        """Of the ends of blocks `[first, last)`; the last block's is the transfer's own end."""
        ends = (min(BLOCK_SIZE * (index + 1), plan["tokens"]) for index in range(first, last))
        return {end: digest(plan["tid"], end) for end in ends}

    def _fill(self, prefill: Prefill, layers: range, upto: int) -> None:
        first = layers.start
        for index in range(prefill.filled.get(first, 0), upto):
            self.ink.write(
                self.words[first : layers.stop, prefill.blocks[index]],
                self._stamp(prefill, first, index),
            )
        prefill.filled |= dict.fromkeys(layers, upto)

    def _step(self, prefill: Prefill, chunk: int) -> None:
        """One prefill step: a chunk's blocks are written, layer by layer if the plan says so."""
        if prefill.key not in self.prefills:
            return
        plan, count = prefill.plan, len(prefill.blocks)
        before = count * (chunk - 1) // plan["chunks"]
        upto = count * chunk // plan["chunks"]
        last = chunk == plan["chunks"]
        tokens = plan["tokens"] if last else upto * BLOCK_SIZE
        transfer_id, generation = prefill.key
        every = range(len(self.words))
        try:
            if upto > before:
                self.client.extend_blocks(
                    transfer_id,
                    generation,
                    group=0,
                    first=before,
                    blocks=prefill.blocks[before:upto],
                )
                self.client.extend_digests(
                    transfer_id, generation, self._digests(plan, before, upto)
                )
                for layers in [range(n, n + 1) for n in every] if plan["layered"] else [every]:
                    self._fill(prefill, layers, upto)
                    self.client.extend(
                        transfer_id,
                        generation,
                        tokens=tokens,
                        first_layer=layers.start,
                        num_layers=len(layers),
                    )
            if last:
                self.client.seal(transfer_id, generation, tokens=tokens)
        except ClientError:
            self._take_back(prefill, resume=False)
            return
        if not last:
            self.after(plan["gap_s"], lambda: self._step(prefill, chunk + 1))

    def _read(self, event: local.OfferRead) -> None:
        prefill = self.prefills.get((event.transfer_id, event.generation))
        if prefill is None or not event.readers or prefill.generation > prefill.plan["take_backs"]:
            return
        self.after(prefill.plan["aimed_s"], lambda: self._take_back(prefill))

    def _take_back(self, prefill: Prefill, *, resume: bool = True) -> None:
        """Preemption, or the end of the request: the blocks are someone else's at once."""
        if self.prefills.pop(prefill.key, None) is None:
            return
        with contextlib.suppress(ClientError):  # the word is dropped, whatever can be told
            self.client.revoke(*prefill.key)
        self.give_up(prefill.blocks)
        self.say("taken_back")
        generation = prefill.generation + 1
        if resume and prefill.plan["resume"] and generation < MAX_GENERATIONS:
            self.prefill(prefill.plan, generation)

    # --- consumer -------------------------------------------------------------------------------

    def fetch(self, plan: dict[str, Any]) -> None:
        blocks = self.take(plan["blocks"] - plan["start"])
        if blocks is None:
            self.say("full", tid=plan["tid"])
            return
        end = plan["tokens"]
        try:
            fetch_id = self.client.fetch(
                plan["tid"],
                remote=PeerAddr(*plan["remote"]),
                engine_id=plan["engine_id"],
                start=plan["start"] * BLOCK_SIZE,
                end=end,
                blocks=[blocks],
                digest=digest(("?" if plan["misled"] else "") + plan["tid"], end),
                deadline_s=plan["deadline_s"],
                park_s=plan["park_s"],
                sole=plan["sole"],
            )
        except ClientError as exc:
            self.give_up(blocks)
            self.say("not_asked", tid=plan["tid"], code=str(exc.code))
            return
        self.fetches[fetch_id] = Fetch(plan, blocks)
        if plan["cancel_s"] is not None:
            self.after(plan["cancel_s"], lambda: self._cancel(fetch_id))

    def _cancel(self, fetch_id: str) -> None:
        with contextlib.suppress(ClientError):  # its end is told all the same
            self.client.cancel(fetch_id)

    def _done(self, done: local.FetchDone) -> None:
        """The oracle: what was told is true."""
        fetch = self.fetches.pop(done.fetch_id, None)
        if fetch is None:
            self.violated(f"told twice, or never asked: {done}")
            return
        plan = fetch.plan
        bad = set(bad_indices(done.bad[0])) if done.bad else set()
        if done.code == Code.OK and (bad or plan["misled"]):
            self.violated(f"ok with {len(bad)} bad blocks, misled {plan['misled']}: {done}")
        if plan["misled"] and len(bad) < len(fetch.blocks):
            self.violated(f"another prompt's bytes are told good: {done}")
        if done.code in NEVER or (done.code == Code.PROMPT_MISMATCH and not plan["misled"]):
            self.violated(f"an answer that no fault explains: {done}")
        good = [index for index in range(len(fetch.blocks)) if index not in bad]
        for index in good:
            stamp = Stamp(
                plan["number"], False, plan["use"], done.generation, 0, plan["start"] + index
            )
            wrong = self.ink.wrong(self.words[:, fetch.blocks[index]], stamp)
            if wrong:
                self.violated(f"told good ({done.code}, {done.transport}), is not: {wrong}")
        self.give_up(fetch.blocks)
        if plan["release"] and done.code != Code.OK:
            with contextlib.suppress(ClientError):  # the lease ends it
                self.client.release(
                    plan["tid"], remote=PeerAddr(*plan["remote"]), engine_id=plan["engine_id"]
                )
        nbytes = len(good) * self.words[:, 0].nbytes
        self.say("done", tid=plan["tid"], code=done.code, nbytes=nbytes, good=len(good))

    # --- the loop -------------------------------------------------------------------------------

    def poll(self) -> None:
        for event in self.client.poll():
            match event:
                case local.OfferEnded():
                    prefill = self.prefills.pop((event.transfer_id, event.generation), None)
                    if prefill is not None:
                        self.give_up(prefill.blocks)
                case local.OfferRead():
                    self._read(event)
                case local.FetchDone():
                    self._done(event)
                case Up():
                    self.say("up")
                case Down():
                    self.say("down", code=str(event.code))
                case _:
                    pass

    def command(self, message: dict[str, Any]) -> None:
        match message.pop("op"):
            case "prefill":
                self.after(message["delay_s"], lambda: self.prefill(message))
            case "fetch":
                self.after(message["delay_s"], lambda: self.fetch(message))
            case "audit":
                self.audit()
                self.say(
                    "audited",
                    state=self.client.state,
                    offers=len(self.client.offers),
                    fetches=len(self.fetches),
                    statistics=self.client.statistics(),
                )

    def run(self) -> None:
        """Until stdin ends."""
        rest = b""
        stdin = sys.stdin.fileno()
        while True:
            wait = min(0.05, max(0.0, self.timers[0][0] - time.monotonic()))
            fds = [stdin]
            if (fd := self.client.fileno()) is not None:
                fds.append(fd)
            ready, _, _ = select.select(fds, [], [], wait)
            self.poll()
            while self.timers[0][0] <= time.monotonic():
                heapq.heappop(self.timers)[2]()
                self.poll()
            if stdin in ready:
                part = os.read(stdin, 2**16)
                if not part:
                    return
                *lines, rest = (rest + part).split(b"\n")
                for line in lines:
                    self.command(json.loads(line))


def main() -> int:
    engine = ChaosEngine(**json.loads(sys.argv[1]))
    try:
        engine.run()
    finally:
        engine.client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
