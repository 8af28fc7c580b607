"""What several tests of fetches begin with."""

from __future__ import annotations

from typing import Any

from kvd.core.config import CoreConfig
from kvd.protocol import local, peer
from tests.unit.core.engine import BLOCK, NBYTES, Engine
from tests.unit.core.world import World


def with_jobs(at_least: int, at_most: int, **others: Any) -> CoreConfig:
    """Jobs between two sizes in bytes, on every transport."""
    return CoreConfig(
        min_job_bytes=at_least, max_job_bytes=at_most, max_shm_job_bytes=at_most, **others
    )


SMALL = with_jobs(NBYTES, 3 * NBYTES)
"""One block of the three layers a job, so that a fetch takes several."""


def closes(consumer: Engine) -> list[tuple[str, str]]:
    return [
        (message.fetch_id, message.code)
        for _, message in consumer.node.sent
        if isinstance(message, peer.FetchClose)
    ]


def streamed(producer: Engine, transfer: str, tokens: int, generation: int = 1) -> list[list[int]]:
    """An offer of which nothing is valid yet; returns its blocks."""
    blocks = [list(range(-(-tokens // BLOCK)))]
    producer.open_offer(transfer, generation, slot=generation)
    producer.give_blocks(transfer, generation, blocks)
    producer.give_digests(transfer, generation, [*range(BLOCK, tokens, BLOCK), tokens])
    return blocks


def pulling(world: World, producer: Engine) -> tuple[Engine, list[list[int]]]:
    """A consumer of a streamed offer, with a job in flight for each of three blocks; and those.

    No job is answered until the test does it."""
    world.auto_pull = False
    consumer = world.node("d", SMALL).engine("D")
    source = streamed(producer, "T", 48)
    producer.compute("T", 1, source)
    producer.say(local.Extend("T", 1, 48))
    blocks = consumer.fetch("f", "T", producer, end=48)
    world.settle()
    return consumer, blocks
