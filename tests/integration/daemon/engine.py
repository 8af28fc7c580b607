"""An engine that is not vLLM: real shared memory, the real client, and bytes to be told apart.

In the test's own process as `Engine`; as a process of its own by `python -m`, where one JSON object
a line on stdin says what to do and one a line on stdout what came of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from connector_shim.client import Client
from connector_shim.errors import ClientError
from connector_shim.events import Down, Event, Up
from connector_shim.memory import MemoryDescription, shared_blocks
from kvd.protocol import local
from kvd.protocol.types import PeerAddr, Rank

Words = npt.NDArray[np.uint64]
Result = dict[str, Any]

BLOCK_SIZE = 16
EMPTY = np.uint64(2**64 - 1)
TIMEOUT_S = 20.0


def digest(transfer_id: str) -> bytes:
    """Stands for the prompt's digest; the same on both sides."""
    return hashlib.blake2b(transfer_id.encode(), digest_size=16).digest()


def words(seed: int, layer: int, block: int, nbytes: int) -> Words:
    """What producer `seed` keeps in one block of one layer."""
    base = (seed << 48) | (layer << 32) | (block << 16)
    return np.uint64(base) + np.arange(nbytes // 8, dtype=np.uint64)


class Engine:
    """One rank of one engine. `seed` 0 holds nothing (a consumer); others hold their `words`."""

    def __init__(
        self,
        socket: str,
        engine_id: str,
        *,
        seed: int = 0,
        num_layers: int = 4,
        num_blocks: int = 64,
        block_bytes: int = 4096,
        model: str = "bytes",
        changes: Mapping[str, Any] | None = None,
        daemon_hang_s: float = 10.0,
        epoch: int | None = None,
        rank: Rank = Rank(),  # noqa: B008 - frozen
    ) -> None:
        self.engine_id = engine_id
        self.seed = seed
        description, self.mapping = self.make_memory(num_layers, num_blocks, block_bytes, model)
        if changes:
            geometry = msgspec.structs.replace(description.geometry, **changes)
            description = replace(description, geometry=geometry)
        self.words: Words = np.frombuffer(self.mapping, dtype=np.uint64).reshape(
            num_layers, num_blocks, block_bytes // 8
        )
        self.fill()
        self.client = Client(
            socket,
            engine_id=engine_id,
            client="test-engine",
            epoch=epoch,
            rank=rank,
            daemon_hang_s=daemon_hang_s,
        )
        self.client.describe(description)
        description.close()
        self.events: list[Event] = []
        self.done: dict[str, local.FetchDone] = {}

    def make_memory(
        self, num_layers: int, num_blocks: int, block_bytes: int, model: str
    ) -> tuple[MemoryDescription, Any]:
        """The memory, described, and a buffer over it that can be closed."""
        return shared_blocks(
            num_layers, num_blocks, block_bytes, block_size=BLOCK_SIZE, model=model
        )

    def fill(self) -> None:
        """Writes what a producer holds; wipes a consumer."""
        layers, blocks, size = self.words.shape
        if not self.seed:
            self.words[:] = EMPTY
            return
        for layer in range(layers):
            for block in range(blocks):
                self.words[layer, block] = words(self.seed, layer, block, size * 8)

    def close(self) -> None:
        self.client.close()
        del self.words
        self.mapping.close()

    # --- waiting ----------------------------------------------------------------------------

    def poll(self, timeout: float = 0.0) -> list[Event]:
        """Takes events in; each is kept."""
        got = self.client.poll(timeout)
        self.events += got
        for event in got:
            if isinstance(event, local.FetchDone):
                assert event.fetch_id not in self.done, "told twice"
                self.done[event.fetch_id] = event
        return got

    def wait(self, found: Callable[[], Any], what: str, timeout: float = TIMEOUT_S) -> Any:
        """Polls until `found()` is true and returns it."""
        deadline = time.monotonic() + timeout
        while not (value := found()):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{self.engine_id}: not within {timeout:g} s: {what}")
            self.poll(min(left, 0.2))
        return value

    def up(self) -> PeerAddr:
        """Waits until the daemon has taken the memory; returns the daemon's address."""
        self.wait(lambda: self.client.state == "up", "registered")
        welcome = self.client.welcome
        assert welcome is not None
        return welcome.advertise

    def state(self) -> str:
        self.poll()
        return self.client.state

    def seen(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    # --- producer ---------------------------------------------------------------------------

    def offer(
        self,
        transfer_id: str,
        blocks: Sequence[int],
        *,
        generation: int = 1,
        tokens: int | None = None,
        lease_s: float = 60.0,
        sealed: bool = True,
    ) -> None:
        tokens = len(blocks) * BLOCK_SIZE if tokens is None else tokens
        self.client.offer(
            transfer_id,
            generation,
            blocks=[list(blocks)],
            digests={
                at: digest(transfer_id) for at in [*range(BLOCK_SIZE, tokens, BLOCK_SIZE), tokens]
            },
            tokens=tokens if sealed else None,
            lease_s=lease_s,
        )
        self.poll()

    def offers(self) -> int:
        self.poll()
        return len(self.client.offers)

    # --- consumer ---------------------------------------------------------------------------

    def start_fetch(
        self,
        transfer_id: str,
        blocks: Sequence[int],
        *,
        remote: PeerAddr,
        engine_id: str,
        start: int = 0,
        tokens: int | None = None,
        generation: int | None = None,
        deadline_s: float = 15.0,
        park_s: float = 5.0,
        prompt: str | None = None,
        sole: bool = False,
    ) -> str:
        """`blocks` for tokens `[start, tokens)`; returns the fetch's id."""
        end = start + len(blocks) * BLOCK_SIZE if tokens is None else tokens
        return self.client.fetch(
            transfer_id,
            remote=remote,
            engine_id=engine_id,
            start=start,
            end=end,
            blocks=[list(blocks)],
            digest=digest(transfer_id if prompt is None else prompt),
            generation=generation,
            deadline_s=deadline_s,
            park_s=park_s,
            sole=sole,
        )

    def finish(self, fetch_id: str, timeout: float = TIMEOUT_S) -> local.FetchDone:
        done = self.wait(lambda: self.done.get(fetch_id), f"fetch {fetch_id} ends", timeout)
        assert isinstance(done, local.FetchDone)
        return done

    def fetch(self, transfer_id: str, blocks: Sequence[int], **how: Any) -> local.FetchDone:
        return self.finish(self.start_fetch(transfer_id, blocks, **how))

    def release(self, transfer_id: str, *, remote: PeerAddr, engine_id: str) -> local.NotifyDone:
        before = len(self.seen(local.NotifyDone))
        self.client.release(transfer_id, remote=remote, engine_id=engine_id)
        self.wait(lambda: len(self.seen(local.NotifyDone)) > before, "answer to release")
        done = self.seen(local.NotifyDone)[-1]
        assert isinstance(done, local.NotifyDone)
        return done

    def wrong(self, seed: int, pairs: Mapping[int, int]) -> int:
        """Wrong words when own block `d` should hold producer `seed`'s block `pairs[d]`, and all
        other blocks should still be empty."""
        layers, blocks, size = self.words.shape
        wrong = 0
        for layer in range(layers):
            for block in range(blocks):
                source = pairs.get(block)
                expected = EMPTY if source is None else words(seed, layer, source, size * 8)
                wrong += int(np.count_nonzero(self.words[layer, block] != expected))
        return wrong


# --- as a process of its own ------------------------------------------------------------------


class Commands:
    """What the harness may ask of an engine in another process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def up(self) -> Result:
        address = self.engine.up()
        welcome = self.engine.client.welcome
        assert welcome is not None
        return {"host": address.host, "port": address.port, "boot_id": welcome.boot_id}

    def offer(self, transfer_id: str, blocks: list[int], **how: Any) -> Result:
        self.engine.offer(transfer_id, blocks, **how)
        return {}

    def fetch(
        self, transfer_id: str, blocks: list[int], host: str, port: int, engine_id: str, **how: Any
    ) -> Result:
        done = self.engine.fetch(
            transfer_id, blocks, remote=PeerAddr(host, port), engine_id=engine_id, **how
        )
        return {
            "code": done.code,
            "detail": done.detail,
            "nbytes": done.nbytes,
            "tokens": done.tokens,
            "transport": done.transport,
            "bad": [part.hex() for part in done.bad],
        }

    def start(
        self, transfer_id: str, blocks: list[int], host: str, port: int, engine_id: str, **how: Any
    ) -> Result:
        fetch_id = self.engine.start_fetch(
            transfer_id, blocks, remote=PeerAddr(host, port), engine_id=engine_id, **how
        )
        self.engine.poll()
        return {"fetch_id": fetch_id}

    def wrong(self, seed: int, pairs: dict[str, int]) -> Result:
        wrong = self.engine.wrong(seed, {int(d): s for d, s in pairs.items()})
        return {"wrong": wrong}

    def state(self) -> Result:
        engine = self.engine
        return {
            "state": engine.state(),
            "offers": engine.offers(),
            "ups": len(engine.seen(Up)),
            "downs": len(engine.seen(Down)),
            "statistics": engine.client.statistics(),
        }


def main(make: type[Engine] = Engine, commanded: type[Commands] = Commands) -> int:
    buffer = b""
    while b"\n" not in buffer:
        part = os.read(sys.stdin.fileno(), 2**16)
        if not part:
            return 0
        buffer += part
    setup, _, buffer = buffer.partition(b"\n")
    engine = make(**json.loads(setup))
    commands = commanded(engine)
    try:
        while True:
            fds = [sys.stdin.fileno()]
            if (fd := engine.client.fileno()) is not None:
                fds.append(fd)
            ready, _, _ = select.select(fds, [], [], 0.1)
            engine.poll()
            if sys.stdin.fileno() in ready:
                part = os.read(sys.stdin.fileno(), 2**16)
                if not part:
                    return 0
                buffer += part
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                command = json.loads(line)
                run = getattr(commands, command.pop("op"))
                try:
                    answer = run(**command)
                except (ClientError, TimeoutError, AssertionError) as e:
                    answer = {"error": str(e)}
                print(json.dumps(answer), flush=True)
    finally:
        engine.close()


if __name__ == "__main__":
    sys.exit(main())
