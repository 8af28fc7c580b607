"""The producer's side dies or stops while many fetches run: each ends once, and says the truth."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvd.protocol import local
from kvd.protocol.codes import Code
from tests.integration.daemon.conftest import TRANSPORTS, Site
from tests.integration.daemon.engine import EMPTY, Engine, words
from tests.integration.daemon.harness import Daemon, EngineProcess

LAYERS, BLOCK_BYTES, FETCHES, BLOCKS = 4, 64 * 1024, 32, 16
SIZE = {"num_layers": LAYERS, "block_bytes": BLOCK_BYTES, "num_blocks": FETCHES * BLOCKS}
BOUND_S = 30.0
"""peer_timeout_s, data_timeout_s and one connection attempt are far below; the deadline above."""


def held(engine: Engine, seed: int, block: int, source: int) -> str:
    """Whether a block holds its source's bytes, nothing, or something else."""
    size = BLOCK_BYTES
    right = [
        bool((engine.words[layer, block] == words(seed, layer, source, size)).all())
        for layer in range(LAYERS)
    ]
    empty = [bool((engine.words[layer, block] == EMPTY).all()) for layer in range(LAYERS)]
    if all(right):
        return "right"
    return "empty" if all(empty) else "partial"


Break = Callable[[Daemon, EngineProcess], None]


def kill_daemon(p: Daemon, _producer: EngineProcess) -> None:
    p.kill(signal.SIGKILL)


def stop_daemon(p: Daemon, _producer: EngineProcess) -> None:
    p.kill(signal.SIGSTOP)


def kill_engine(_p: Daemon, producer: EngineProcess) -> None:
    producer.kill(signal.SIGKILL)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("breaks", [kill_daemon, stop_daemon, kill_engine])
def test_each_fetch_ends_once_and_truly(site: Site, transport: str, breaks: Break) -> None:
    settings: dict[str, Any] = {
        "transport": transport,
        "peer_timeout_s": 3.0,
        "data_timeout_s": 3.0,
        "max_jobs": 1,
        "max_jobs_per_fetch": 1,
        "max_jobs_per_attachment": 1,
    }
    p, d = site.daemon("p", **settings), site.daemon("d", **settings)
    p.ready()
    d.ready()
    producer = site.process(p, "producer", seed=9, **SIZE)
    consumer = site.engine(d, "consumer", **SIZE)
    producer.up()
    consumer.up()
    rng = np.random.default_rng(3)
    sources = rng.permutation(SIZE["num_blocks"]).reshape(FETCHES, BLOCKS).tolist()
    targets = rng.permutation(SIZE["num_blocks"]).reshape(FETCHES, BLOCKS).tolist()
    for number in range(FETCHES):
        producer.ask("offer", transfer_id=f"t{number}", blocks=sources[number])
    fetches = [
        consumer.start_fetch(
            f"t{number}", targets[number], remote=p.address, engine_id="producer", deadline_s=300.0
        )
        for number in range(FETCHES)
    ]
    consumer.wait(lambda: consumer.done, "the first fetch ends")
    breaks(p, producer)
    broken = time.monotonic()
    consumer.wait(lambda: len(consumer.done) == FETCHES, "all have ended", BOUND_S)
    assert time.monotonic() - broken < BOUND_S
    at_the_end = consumer.words.copy()
    codes = [consumer.done[fetch].code for fetch in fetches]
    assert codes.count(Code.OK) >= 1
    for number, fetch in enumerate(fetches):
        done: local.FetchDone = consumer.done[fetch]
        bad = int.from_bytes(done.bad[0], "little")
        for index, (block, source) in enumerate(zip(targets[number], sources[number], strict=True)):
            if not bad >> index & 1:
                assert held(consumer, 9, block, source) == "right", (number, index, done)
        if done.code == Code.OK:
            assert bad == 0
        else:
            # Nothing may be bad: the last copy can end well after the failure was met.
            assert done.code in (
                Code.PEER_LOST,
                Code.PEER_UNREACHABLE,
                Code.TRANSPORT_ERROR,
                Code.ENGINE_GONE,
                Code.UNKNOWN_ENGINE,
                Code.FENCED,
                Code.REVOKED,
            ), done
    if breaks is stop_daemon:
        p.kill(signal.SIGCONT)
    # Once told, nothing lands any more, whatever the other side still sends.
    assert consumer.state() == "up"
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        consumer.poll(0.1)
    assert np.array_equal(consumer.words, at_the_end)
