"""Copy jobs: their sizes, and whose turn it is."""

from __future__ import annotations

from time import process_time

import pytest

from kvd.core import events as ev
from kvd.core.config import CoreConfig
from kvd.core.jobs import MAX_JOB_BLOCKS
from kvd.core.packed import unpack
from kvd.protocol import local
from tests.unit.core.engine import BLOCK, NBYTES, Engine
from tests.unit.core.fetching import with_jobs
from tests.unit.core.world import Node, World

ROW = 3 * NBYTES
"""One block over the three layers."""


def engines(world: World, config: CoreConfig, num_blocks: int = 512) -> tuple[Engine, Engine]:
    world.auto_pull = False
    producer = world.node("p").engine("P", num_blocks=num_blocks)
    return producer, world.node("d", config).engine("D", num_blocks=num_blocks)


def sizes(node: Node) -> list[int]:
    return [pull.nbytes for _, pull in sorted(node.pulls.items())]


def of(node: Node) -> list[str]:
    return [pull.fetch_id for _, pull in sorted(node.pulls.items())]


@pytest.mark.parametrize(
    ("rows", "at_least", "at_most", "expected"),
    [
        (40, 1, 100, [10, 10, 10, 10]),
        (40, 1, 4, [4, 4, 4, 4]),
        (10, 4, 100, [4, 4, 2]),
        (3, 4, 100, [3]),
        (41, 1, 100, [10, 10, 10, 11]),
    ],
)
def test_a_fetch_is_cut_into_jobs(
    rows: int, at_least: int, at_most: int, expected: list[int]
) -> None:
    world = World()
    config = CoreConfig(
        transports=("tcp",), min_job_bytes=at_least * ROW, max_job_bytes=at_most * ROW
    )
    producer, consumer = engines(world, config)
    producer.offer("T", tokens=rows * BLOCK)
    consumer.fetch("f", "T", producer, end=rows * BLOCK)
    world.settle()
    assert [nbytes / ROW for nbytes in sizes(consumer.node)] == expected


@pytest.mark.parametrize(("rows", "expected"), [(40, [40]), (50, [50]), (120, [50, 50, 20])])
def test_a_fetch_over_shm_is_one_job_while_that_is_not_too_large(
    rows: int, expected: list[int]
) -> None:
    world = World()
    config = CoreConfig(min_job_bytes=ROW, max_job_bytes=4 * ROW, max_shm_job_bytes=50 * ROW)
    producer, consumer = engines(world, config)
    producer.offer("T", tokens=rows * BLOCK)
    consumer.fetch("f", "T", producer, end=rows * BLOCK)
    world.settle()
    assert [nbytes / ROW for nbytes in sizes(consumer.node)] == expected
    for pull in consumer.node.pulls.values():
        (piece,) = pull.pieces
        assert (piece.first_layer, piece.num_layers) == (0, 3)


def test_a_block_that_is_too_big_is_cut_by_layers() -> None:
    world = World()
    producer, consumer = engines(world, with_jobs(1, 2 * NBYTES))
    producer.offer("T", tokens=2 * BLOCK)
    consumer.fetch("f", "T", producer, end=2 * BLOCK)
    world.settle()
    assert max(sizes(consumer.node)) == 2 * NBYTES
    while consumer.node.pulls:
        world.finish_pull(consumer.node, min(consumer.node.pulls))
    assert consumer.done("f").code == "ok"
    assert sum(pull.nbytes for pull in consumer.node.started) == 2 * ROW


def test_a_block_of_one_layer_is_the_least() -> None:
    world = World()
    producer, consumer = engines(world, with_jobs(1, 1))
    producer.offer("T", tokens=BLOCK)
    consumer.fetch("f", "T", producer, end=BLOCK)
    world.settle()
    assert sizes(consumer.node) == [NBYTES] * 3


def test_every_byte_is_copied_once() -> None:
    world = World()
    config = with_jobs(2 * ROW, 5 * ROW)
    producer, consumer = engines(world, config)
    producer.offer("T", tokens=100 * BLOCK)
    consumer.fetch("f", "T", producer, end=100 * BLOCK)
    world.settle()
    while consumer.node.pulls:
        world.finish_pull(consumer.node, min(consumer.node.pulls))
        world.settle()
    seen: list[int] = []
    for pull in consumer.node.started:
        for piece in pull.pieces:
            seen += unpack(piece.indices)
    assert sorted(seen) == list(range(100))
    assert consumer.done("f").nbytes == 100 * ROW


def test_one_big_fetch_starves_no_small_one() -> None:
    world = World()
    config = with_jobs(ROW, ROW)
    producer, consumer = engines(world, config)
    producer.offer("big", tokens=200 * BLOCK)
    producer.offer("small", tokens=2 * BLOCK, slot=1)
    consumer.fetch("big", "big", producer, end=200 * BLOCK)
    world.settle()
    consumer.fetch("small", "small", producer, end=2 * BLOCK, blocks=[[300, 301]])
    world.settle()
    assert of(consumer.node) == ["big"] * 4
    world.finish_pull(consumer.node, min(consumer.node.pulls))
    assert of(consumer.node) == ["big"] * 3 + ["small"]
    finished = 0
    while not consumer.took(local.FetchDone):
        world.finish_pull(consumer.node, min(consumer.node.pulls))
        finished += 1
    assert finished <= 8


def test_fetches_take_turns() -> None:
    world = World()
    config = with_jobs(ROW, ROW, max_jobs_per_fetch=1, max_jobs_per_attachment=1)
    producer, consumer = engines(world, config)
    for i in range(3):
        producer.offer(f"T{i}", tokens=3 * BLOCK, slot=i)
        consumer.fetch(
            f"f{i}", f"T{i}", producer, end=3 * BLOCK, blocks=[[9 * i, 9 * i + 1, 9 * i + 2]]
        )
    world.settle()
    order: list[str] = []
    while consumer.node.pulls:
        order += of(consumer.node)
        world.finish_pull(consumer.node, min(consumer.node.pulls))
    assert order == ["f0", "f1", "f2"] * 3


def test_stuck_peers_leave_room_for_others() -> None:
    world = World()
    world.auto_pull = False
    config = with_jobs(ROW, ROW, max_jobs=8)
    consumer = world.node("d", config).engine("D", num_blocks=512)
    stuck = [world.node(f"p{i}").engine(f"P{i}") for i in range(4)]
    for i, producer in enumerate(stuck):
        producer.offer("T", tokens=20 * BLOCK)
        blocks = [list(range(20 * i, 20 * i + 20))]
        consumer.fetch(f"s{i}", "T", producer, end=20 * BLOCK, blocks=blocks)
        world.settle()
    counts = [of(consumer.node).count(f"s{i}") for i in range(4)]
    assert counts == [4, 4, 1, 1]
    healthy = world.node("h").engine("H")
    healthy.offer("T", tokens=3 * BLOCK)
    consumer.fetch("f", "T", healthy, end=3 * BLOCK, blocks=[[400, 401, 402]])
    world.settle()
    for _ in range(3):
        (job,) = [job for job, pull in consumer.node.pulls.items() if pull.fetch_id == "f"]
        world.finish_pull(consumer.node, job)
    assert consumer.done("f").code == "ok"


def test_limits_hold_for_many_fetches() -> None:
    world = World()
    config = with_jobs(ROW, ROW, max_jobs=6, max_jobs_per_attachment=5)
    producer, consumer = engines(world, config)
    for i in range(10):
        producer.offer(f"T{i}", tokens=8 * BLOCK, slot=i)
        blocks = [list(range(8 * i, 8 * i + 8))]
        consumer.fetch(f"f{i}", f"T{i}", producer, end=8 * BLOCK, blocks=blocks)
    world.settle()
    while consumer.node.pulls:
        assert len(consumer.node.pulls) <= 5
        world.finish_pull(consumer.node, min(consumer.node.pulls))
    assert [m.code for m in consumer.took(local.FetchDone)] == ["ok"] * 10


@pytest.mark.parametrize(("transport", "jobs"), [("tcp", 20), ("shm", 2)])
def test_a_large_model_is_planned_without_a_walk_over_blocks_and_layers(
    transport: str, jobs: int
) -> None:
    """8192 blocks of 80 layers; the bound is far above what is needed, and far below a walk."""
    world = World()
    world.auto_pull = False
    groups = (0,) * 80
    config = CoreConfig(transports=(transport,))
    producer = world.node("p", config).engine("P", groups=groups, num_blocks=8192)
    consumer = world.node("d", config).engine("D", groups=groups, num_blocks=8192)
    tokens = 8192 * BLOCK
    ids = list(range(8192))
    producer.open_offer("T")
    for first in range(0, 8192, 1024):
        producer.give_blocks("T", 1, [ids[first : first + 1024]], first=first)
    producer.give_digests("T", 1, [tokens])
    producer.say(local.Seal("T", 1, tokens))
    consumer.fetch("f", "T", producer, end=tokens, blocks=[ids])
    world.settle()
    node, spent = consumer.node, 0.0
    while node.pulls:
        job, pull = node.pulls.popitem()
        before = process_time()
        out = node.core.handle(ev.PullDone(job, pull.nbytes), world.now)
        spent += process_time() - before
        for instruction in out:
            node._carry_out(instruction)
    done = consumer.done("f")
    assert (done.code, done.nbytes) == ("ok", 8192 * 80 * NBYTES)
    assert len(node.started) >= jobs
    assert spent / len(node.started) < 0.05


def test_a_job_has_a_bounded_number_of_blocks_however_small_they_are() -> None:
    """Its lists of ids are walked on the event loop."""
    world = World()
    world.auto_pull = False
    config = CoreConfig(transports=("shm",))
    count = 3 * MAX_JOB_BLOCKS - 1
    producer = world.node("p", config).engine("P", num_blocks=count)
    consumer = world.node("d", config).engine("D", num_blocks=count)
    producer.offer("T", tokens=count * BLOCK, blocks=[list(range(count))])
    consumer.fetch("f", "T", producer, end=count * BLOCK, blocks=[list(range(count))])
    world.settle()
    sizes = []
    while consumer.node.pulls:
        job = min(consumer.node.pulls)
        sizes.append(sum(len(p.indices) // 4 for p in consumer.node.pulls[job].pieces))
        world.finish_pull(consumer.node, job)
    assert consumer.done("f").code == "ok"
    assert sorted(sizes) == [MAX_JOB_BLOCKS - 1, MAX_JOB_BLOCKS, MAX_JOB_BLOCKS]
