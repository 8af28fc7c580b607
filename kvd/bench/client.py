"""One of the bench's two client processes: `python -m kvd.bench.client`.

It is an engine to its daemon, and knows nothing of vLLM. The harness sends one JSON object a line
on stdin and reads one answer a line from stdout; the end of stdin ends the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import sys
import time
from typing import Any

import numpy as np

from connector_shim.client import Client
from connector_shim.errors import ClientError
from connector_shim.events import Down, Event
from kvd.bench import oracle
from kvd.bench.memory import Shape, describe, map_pools
from kvd.bench.presets import BLOCK_TOKENS
from kvd.protocol.local import FetchDone
from kvd.protocol.types import PeerAddr

UP_TIMEOUT_S = 60.0
FETCH_TIMEOUT_S = 60.0
LEASE_S = 600.0
MAX_COMMAND = 16 * 2**20
GENERATION = 1

Answer = dict[str, Any]


class BenchError(Exception):
    """The round cannot count; the text says why."""


def digest(transfer_id: str) -> bytes:
    """Stands for the prompt's digest at its end: 16 bytes, the same on both sides."""
    return hashlib.blake2b(transfer_id.encode(), digest_size=16).digest()


class BenchClient:
    """The commands. `setup` comes from the harness: socket, role, engine_id, fds and the shape."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._shape = Shape(setup["layers"], setup["blocks"], setup["piece"])
        self._pools = map_pools(setup["fds"], self._shape)
        self._origin: dict[int, int] = {}
        if setup["role"] == "producer":
            oracle.fill(self._pools)
        else:
            oracle.wipe(self._pools)
        self._client = Client(
            setup["socket"], engine_id=setup["engine_id"], role=setup["role"], client="kvd-bench"
        )
        self._client.describe(describe(setup["fds"], self._shape))

    def fileno(self) -> int | None:
        return self._client.fileno()

    def close(self) -> None:
        self._client.close()

    def run(self, command: dict[str, Any]) -> Answer:
        """Carry out one command; returns its answer. Raises BenchError."""
        operations = {
            "up": self.up,
            "offer": self.offer,
            "wipe": self.wipe,
            "fetch": self.fetch,
            "verify": self.verify,
        }
        return operations[command["op"]](command)

    def poll(self) -> None:
        """Keep the session alive between commands. Raises BenchError when the daemon is lost."""
        self._events(0.0)

    def _events(self, timeout: float) -> list[Event]:
        events = self._client.poll(timeout)
        for event in events:
            if isinstance(event, Down):
                raise BenchError(f"no daemon: {event.code} {event.detail}")
        return events

    def up(self, command: dict[str, Any]) -> Answer:
        """Wait until the daemon has taken the memory; answers with where it can be reached."""
        self._client.wait_up(UP_TIMEOUT_S)
        welcome = self._client.welcome
        assert welcome is not None
        return {"host": welcome.advertise.host, "port": welcome.advertise.port}

    def offer(self, command: dict[str, Any]) -> Answer:
        """Offer `transfers`, each a transfer id and the blocks that it holds, all of them valid."""
        for transfer_id, blocks in command["transfers"]:
            tokens = len(blocks) * BLOCK_TOKENS
            self._client.offer(
                transfer_id,
                GENERATION,
                blocks=[blocks],
                digests={tokens: digest(transfer_id)},
                tokens=tokens,
                lease_s=LEASE_S,
            )
        self.poll()
        return {}

    def wipe(self, command: dict[str, Any]) -> Answer:
        oracle.wipe(self._pools)
        return {}

    def fetch(self, command: dict[str, Any]) -> Answer:
        """The timed part: fetch every transfer at once, and wait for all of them.

        Answers with the seconds of the round, and of each request from its `fetch` call to the
        poll that returned its FetchDone.
        """
        remote = PeerAddr(command["host"], command["port"])
        started: dict[str, float] = {}
        ended: dict[str, float] = {}
        done: list[FetchDone] = []
        self._origin = {}
        for _, src, dst in command["transfers"]:
            self._origin.update(zip(dst, src, strict=True))
        self.poll()
        begin = time.perf_counter()
        for transfer_id, src, dst in command["transfers"]:
            now = time.perf_counter()
            fetch_id = self._client.fetch(
                transfer_id,
                remote=remote,
                engine_id=command["engine_id"],
                start=0,
                end=len(src) * BLOCK_TOKENS,
                blocks=[dst],
                digest=digest(transfer_id),
                deadline_s=FETCH_TIMEOUT_S,
                park_s=FETCH_TIMEOUT_S / 2,
            )
            started[fetch_id] = now
        deadline = begin + FETCH_TIMEOUT_S + 5.0
        while len(ended) < len(started):
            left = deadline - time.perf_counter()
            if left <= 0:
                raise BenchError(f"{len(started) - len(ended)} fetches never ended")
            for event in self._events(left):
                if isinstance(event, FetchDone):
                    ended[event.fetch_id] = time.perf_counter()
                    done.append(event)
        return {
            "seconds": max(ended.values()) - begin,
            "requests": [
                {
                    "seconds": ended[event.fetch_id] - started[event.fetch_id],
                    "code": event.code,
                    "detail": event.detail,
                    "nbytes": event.nbytes,
                    "transport": event.transport,
                    "granted": event.stages.granted,
                    "first_byte": event.stages.first_byte,
                    "last_byte": event.stages.last_byte,
                }
                for event in done
            ],
        }

    def verify(self, command: dict[str, Any]) -> Answer:
        """Check every word of the destination, of the blocks that were not fetched too."""
        self._damage(command.get("damage"))
        return {"wrong_words": oracle.wrong_words(self._pools, self._origin)}

    def _damage(self, kind: str | None) -> None:
        """Spoil what arrived, to prove that `verify` sees it: see `kvd bench --damage`."""
        first, second = list(self._origin)[:2]
        free = next(block for block in range(self._shape.blocks) if block not in self._origin)
        pool = self._pools[-1]
        if kind == "flip":
            pool[first, -1] ^= np.uint64(1)
        elif kind == "swap":
            pool[[first, second]] = pool[[second, first]]
        elif kind == "stray":
            pool[free, 0] = 0


class Lines:
    """Lines from a file descriptor, without a thread and without read-ahead into nowhere."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self.ended = False

    def read(self) -> list[bytes]:
        """Read what is there (blocks only if nothing is); complete lines, without their ends."""
        part = os.read(self._fd, 2**20)
        self.ended = not part
        *lines, self._rest = (self._rest + part).split(b"\n")
        if len(self._rest) > MAX_COMMAND:
            raise BenchError("a command without an end")
        return lines


def reply(answer: Answer) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def serve() -> int:
    """Carry out commands until stdin ends. Returns the exit status."""
    lines = Lines(sys.stdin.fileno())
    waiting: list[bytes] = []
    client: BenchClient | None = None
    try:
        while True:
            while waiting:
                command = json.loads(waiting.pop(0))
                if client is None:
                    client = BenchClient(command)
                    reply({"ok": True})
                    continue
                reply({"ok": True, **client.run(command)})
            if lines.ended:
                return 0
            fds = [sys.stdin.fileno()]
            if client is not None and (fd := client.fileno()) is not None:
                fds.append(fd)
            ready, _, _ = select.select(fds, [], [], 0.5)
            if client is not None:
                client.poll()
            if sys.stdin.fileno() in ready:
                waiting += lines.read()
    except (BenchError, ClientError) as error:
        reply({"ok": False, "error": str(error)})
        return 1
    except BrokenPipeError:
        return 1
    finally:
        if client is not None:
            client.close()


if __name__ == "__main__":
    sys.exit(serve())
