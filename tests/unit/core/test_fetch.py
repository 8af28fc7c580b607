"""Fetches from end to end: a producer's core and a consumer's, joined."""

from __future__ import annotations

import pytest

from kvd.core import events as ev
from kvd.core.config import CoreConfig
from kvd.core.packed import NULL
from kvd.protocol import local
from tests.unit.core.engine import BLOCK, NBYTES, Engine
from tests.unit.core.fetching import SMALL, closes, streamed
from tests.unit.core.world import World


@pytest.mark.parametrize("whole", [True, False])
def test_a_finished_prefill_is_pulled_whole(
    world: World, producer: Engine, consumer: Engine, whole: bool
) -> None:
    producer.offer("T", tokens=40, blocks=[[7, 3, 9]])
    blocks = consumer.fetch("f", "T", producer, end=40, blocks=[[2, 4, 6]], whole=whole)
    world.settle()
    done = consumer.done("f")
    assert (done.code, done.tokens, done.generation) == ("ok", 40, 1)
    assert done.bad == [b"\0"]
    assert done.nbytes == 3 * 3 * NBYTES
    assert done.transport == "shm"
    assert done.stages.granted == 0.0
    assert consumer.tags(blocks) == {("T", 1)}
    assert closes(consumer) == [("f", "ok")]
    assert producer.node.recorded("fetch_served")[0]["nbytes"] == done.nbytes
    assert consumer.node.recorded("fetch_done")[0]["nbytes"] == done.nbytes


@pytest.mark.parametrize("whole", [True, False])
def test_the_only_fetch_frees_its_producer(
    world: World, producer: Engine, consumer: Engine, whole: bool
) -> None:
    for transfer, sole in (("T", False), ("U", True)):
        producer.offer(transfer, tokens=40)
        consumer.fetch(transfer, transfer, producer, end=40, sole=sole, whole=whole)
        world.settle()
        assert consumer.done(transfer).code == "ok"
    assert producer.ended("T") == []
    assert producer.ended("U") == [(1, "released")]


def test_blocks_are_matched_by_position(world: World, producer: Engine, consumer: Engine) -> None:
    producer.offer("T", tokens=70, blocks=[[9, 8, 7, 6, 5]])
    consumer.fetch("f", "T", producer, start=32, end=64, blocks=[[1, 0]])
    world.settle()
    assert consumer.done("f").code == "ok"
    assert consumer.memory[0, 0, 1] == ("T", 1, 2)
    assert consumer.memory[0, 2, 0] == ("T", 1, 3)


def test_groups_have_block_tables_of_their_own(world: World) -> None:
    producer = world.node("p").engine("P", groups=(0, 1, 0, 1))
    consumer = world.node("d").engine("D", groups=(0, 1, 0, 1))
    producer.offer("T", tokens=32, blocks=[[1, 2], [NULL, 4]])
    blocks = consumer.fetch("f", "T", producer, end=32, blocks=[[5, 6], [NULL, 8]])
    world.settle()
    done = consumer.done("f")
    assert (done.code, done.nbytes) == ("ok", (4 + 2) * NBYTES)
    assert consumer.tags(blocks) == {("T", 1)}


def test_what_the_producer_does_not_keep_is_not_made_up(world: World) -> None:
    producer = world.node("p").engine("P", groups=(0, 1))
    consumer = world.node("d").engine("D", groups=(0, 1))
    producer.offer("T", tokens=32, blocks=[[1, 2], [NULL, 4]])
    consumer.fetch("f", "T", producer, end=32, blocks=[[5, 6], [7, 8]])
    world.settle()
    done = consumer.done("f")
    assert (done.code, done.bad) == ("range_not_held", [b"\3", b"\3"])
    assert consumer.memory == {}


def test_a_fetch_in_which_nothing_is_wanted_is_ok(world: World) -> None:
    producer = world.node("p").engine("P")
    consumer = world.node("d").engine("D")
    producer.offer("T", tokens=32)
    consumer.fetch("f", "T", producer, end=32, blocks=[[NULL, NULL]])
    world.settle()
    assert (consumer.done("f").code, consumer.node.started) == ("ok", [])


def test_an_empty_range_is_a_release(world: World, producer: Engine, consumer: Engine) -> None:
    producer.offer("T", tokens=32)
    consumer.fetch("f", "T", producer, start=32, end=32)
    done = consumer.done("f")
    assert (done.code, done.tokens, done.bad) == ("ok", 0, [b""])
    world.settle()
    assert producer.ended("T") == [(1, "released")]
    assert consumer.took(local.NotifyDone) == []


def test_layers_are_copied_as_they_come(world: World, producer: Engine, consumer: Engine) -> None:
    source = streamed(producer, "T", 40)
    consumer.fetch("f", "T", producer, end=40)
    world.settle()
    assert consumer.node.started == []
    for layer in range(3):
        producer.compute("T", 1, source, layers=[layer])
        producer.say(local.Extend("T", 1, 32, layer, 1))
        world.settle()
        assert sum(pull.nbytes for pull in consumer.node.started) == (layer + 1) * 2 * NBYTES
    assert consumer.took(local.FetchDone) == []
    producer.say(local.Seal("T", 1, 40))
    world.settle()
    assert consumer.done("f").code == "ok"


def test_a_block_that_is_not_full_yet_waits(
    world: World, producer: Engine, consumer: Engine
) -> None:
    source = streamed(producer, "T", 40)
    consumer.fetch("f", "T", producer, end=40)
    producer.compute("T", 1, source)
    moved = []
    for tokens in (15, 16, 31, 32, 39):
        producer.say(local.Extend("T", 1, tokens))
        world.settle()
        moved.append(sum(pull.nbytes for pull in consumer.node.started) // (3 * NBYTES))
    assert moved == [0, 1, 1, 2, 2]
    producer.say(local.Extend("T", 1, 40))
    world.settle()
    assert consumer.done("f").code == "ok"


def test_a_fetch_that_comes_before_its_offer(
    world: World, producer: Engine, consumer: Engine
) -> None:
    consumer.fetch("f", "T", producer, end=32, park=10.0)
    world.settle()
    world.advance(3.0)
    producer.offer("T", tokens=32)
    world.settle()
    done = consumer.done("f")
    assert (done.code, done.stages.granted) == ("ok", 3.0)
    assert done.stages.parked == 0.0


# --- failures --------------------------------------------------------------------------------


def test_a_broken_copy_names_the_blocks_that_are_not_there(world: World, producer: Engine) -> None:
    world.auto_pull = world.auto_stop = False
    consumer = world.node("d", SMALL).engine("D")
    producer.offer("T", tokens=80)
    consumer.fetch("f", "T", producer, end=80)
    world.settle()
    jobs = sorted(consumer.node.pulls)
    world.finish_pull(consumer.node, jobs[0])
    world.fail_pull(consumer.node, jobs[2], "transport_error", 0.5)
    world.settle()
    assert consumer.took(local.FetchDone) == [], "told while jobs are in flight"
    running = sorted(consumer.node.pulls)
    assert len(running) == 3
    world.finish_pull(consumer.node, running[0])
    for job in running[1:]:
        world.fail_pull(consumer.node, job, "cancelled")
    done = consumer.done("f")
    assert done.code == "transport_error"
    assert done.bad == [bytes([0b11100])]
    assert done.tokens == 2 * BLOCK
    assert done.nbytes == 2 * 3 * NBYTES
    world.settle()
    assert producer.node.recorded("fetch_served")[0]["nbytes"] == done.nbytes


def test_cancel_is_told_when_nothing_can_land(
    world: World, producer: Engine, consumer: Engine
) -> None:
    world.auto_pull = world.auto_stop = False
    producer.offer("T", tokens=48)
    consumer.fetch("f", "T", producer, end=48)
    world.settle()
    (job,) = consumer.node.pulls
    consumer.say(local.Cancel("f"))
    consumer.say(local.Cancel("f"))
    assert consumer.node.stopped == ["f"]
    world.advance(1000)
    assert consumer.took(local.FetchDone) == []
    world.fail_pull(consumer.node, job, "cancelled", 0.5)
    assert consumer.done("f").code == "cancelled"
    consumer.say(local.Cancel("f"))
    assert consumer.took(local.FetchDone) == []


@pytest.mark.parametrize("way", ["cancelled", "deadline"])
@pytest.mark.parametrize("stage", ["assembling", "connecting", "attaching", "opening", "asked"])
def test_cancel_and_deadline_at_each_stage(world: World, stage: str, way: str) -> None:
    world.auto_connect = stage != "connecting"
    world.auto_open = stage != "opening"
    producer = world.node("p").engine("P")
    consumer = world.node("d").engine("D")
    go = stage != "assembling"
    consumer.fetch("f", "T", producer, end=48, deadline=5.0, park=30.0, go=go)
    if stage == "attaching":
        world.step()
        world.queue.clear()
    world.settle()
    if way == "cancelled":
        consumer.say(local.Cancel("f"))
    else:
        limit = 5.0 if go else CoreConfig().fetch_max_s
        world.advance(limit - 0.1)
        assert consumer.took(local.FetchDone) == []
        world.advance(0.2)
    done = consumer.done("f")
    assert (done.code, done.bad) == (way, [b"\7"])
    assert closes(consumer) == ([("f", way)] if stage == "asked" else [])
    assert consumer.node.core.idle


def test_a_deadline_ends_a_fetch_in_the_middle(
    world: World, producer: Engine, consumer: Engine
) -> None:
    world.auto_pull = False
    producer.offer("T", tokens=48)
    consumer.fetch("f", "T", producer, end=48, deadline=2.0)
    world.settle()
    world.advance(2.1)
    done = consumer.done("f")
    assert (done.code, done.bad) == ("deadline", [b"\7"])


def test_a_copy_of_the_wrong_size_is_no_success(
    world: World, producer: Engine, consumer: Engine
) -> None:
    world.auto_pull = False
    producer.offer("T", tokens=48)
    consumer.fetch("f", "T", producer, end=48)
    world.settle()
    ((job, pull),) = consumer.node.pulls.items()
    del consumer.node.pulls[job]
    consumer.node.run(ev.PullDone(job, pull.nbytes - 1))
    done = consumer.done("f")
    assert (done.code, done.bad) == ("integrity", [b"\7"])


def test_a_job_is_answered_once(world: World, producer: Engine, consumer: Engine) -> None:
    world.auto_pull = False
    producer.offer("T", tokens=48)
    consumer.fetch("f", "T", producer, end=48)
    world.settle()
    ((job, pull),) = consumer.node.pulls.items()
    world.finish_pull(consumer.node, job)
    consumer.node.run(ev.PullDone(job, pull.nbytes))
    consumer.node.run(ev.PullFailed(job, "transport_error", ""))
    assert consumer.done("f").code == "ok"
    assert [fields["what"] for fields in consumer.node.recorded("late")] == [
        "PullDone",
        "PullFailed",
    ]


# --- what the shim may not do ----------------------------------------------------------------


def test_an_id_is_told_once(world: World, producer: Engine, consumer: Engine) -> None:
    producer.offer("T", tokens=48)
    consumer.fetch("f", "T", producer, end=48)
    consumer.fetch("f", "T", producer, end=48, blocks=[[7, 8, 9]])
    world.settle()
    assert consumer.done("f").code == "ok"
    consumer.fetch("f", "T", producer, end=48)
    world.settle()
    assert consumer.took(local.FetchDone) == []
    assert len(consumer.node.recorded("refused")) == 2


def test_two_engines_of_one_daemon_may_choose_the_same_id(world: World, producer: Engine) -> None:
    node = world.node("d")
    one, other = node.engine("D"), node.engine("E")
    producer.offer("T", tokens=48)
    one.fetch("f", "T", producer, end=48)
    other.fetch("f", "T", producer, end=48)
    world.settle()
    assert one.done("f").code == "ok"
    assert other.done("f").code == "duplicate"


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("blocks", "code"),
    [
        ([[0, 1]], "bad_message"),
        ([[0, 1, 2, 3]], "bad_message"),
        ([[0, 1, 1]], "bad_message"),
        ([[0, 1, 64]], "bad_message"),
        ([[]], "bad_message"),
        ([[0, 1, 2], [3]], "bad_message"),
    ],
)
def test_destinations_are_checked(
    world: World,
    producer: Engine,
    consumer: Engine,
    blocks: list[list[int]],
    code: str,
    whole: bool,
) -> None:
    producer.offer("T", tokens=48)
    consumer.fetch("f", "T", producer, end=48, blocks=blocks, whole=whole)
    world.settle()
    assert consumer.done("f").code == code
    assert consumer.node.started == []


def test_destinations_stay_taken_until_the_end_is_told(
    world: World, producer: Engine, consumer: Engine
) -> None:
    world.auto_pull = world.auto_stop = False
    producer.offer("T", tokens=48)
    consumer.fetch("f", "T", producer, end=48, blocks=[[1, 2, 3]])
    world.settle()
    (job,) = consumer.node.pulls
    consumer.say(local.Cancel("f"))
    consumer.fetch("g", "T", producer, end=48, blocks=[[3, 4, 5]])
    assert consumer.done("g").code == "bad_message"
    world.fail_pull(consumer.node, job, "cancelled")
    assert consumer.done("f").code == "cancelled"
    world.auto_pull = True
    consumer.fetch("h", "T", producer, end=48, blocks=[[3, 4, 5]])
    world.settle()
    assert consumer.done("h").code == "ok"


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("start", "end", "code"),
    [(8, 48, "unaligned_range"), (32, 16, "unaligned_range"), (0, 2**60, "bad_message")],
)
def test_ranges_that_cannot_be(
    consumer: Engine, producer: Engine, start: int, end: int, code: str, whole: bool
) -> None:
    consumer.fetch("f", "T", producer, start=start, end=end, blocks=[], whole=whole)
    assert consumer.done("f").code == code


def test_who_may_fetch(world: World, producer: Engine) -> None:
    node = world.node("d", CoreConfig(max_fetches=1))
    for engine, code in (
        (node.engine("A", role="producer"), "unsupported"),
        (node.engine("B", register=False), "not_registered"),
    ):
        engine.fetch("f", "T", producer, end=48, blocks=[[0, 1, 2]])
        assert engine.done("f").code == code
    consumer = node.engine("C")
    consumer.fetch("f", "T", producer, end=48, go=False)
    consumer.fetch("g", "T", producer, end=48)
    assert consumer.done("g").code == "overloaded"
    node.run(ev.DrainStarted())
    consumer.fetch("h", "T", producer, end=48)
    assert consumer.done("h").code == "draining"
    assert not node.core.idle
    consumer.say(local.FetchGo("f"))
    assert "draining" not in [m.code for m in consumer.took(local.FetchDone)]


def test_a_producer_that_waits_hears_of_each_part_once_it_has_arrived_whole() -> None:
    world = World()
    producer, consumer = world.node("p").engine("P"), world.node("d", SMALL).engine("D")
    producer.fence[0] = 77
    producer.say(local.Offer("T", 1, 0, 77, 30.0, watched=True))
    producer.give_blocks("T", 1, [[0, 1, 2, 3]])
    producer.give_digests("T", 1, [16, 32, 48, 64])
    producer.compute("T", 1, [[0, 1, 2, 3]])
    consumer.fetch("f", "T", producer, end=64, start=16, blocks=[[5, 6, 7]])
    world.settle()

    def told() -> list[tuple[int, int]]:
        return [(one.readers, one.tokens) for one in producer.took(local.OfferRead)]

    assert told() == [(1, 16)], "what the consumer has from elsewhere counts"
    world.auto_pull = False
    producer.say(local.Extend("T", 1, 48))
    world.settle()
    jobs = list(consumer.node.pulls)
    assert len(jobs) == 2, "one block of three layers each"
    world.finish_pull(consumer.node, jobs[0])
    world.settle()
    assert told() == [], "a part that is on its way is not there"
    world.finish_pull(consumer.node, jobs[1])
    world.settle()
    assert told() == [(1, 48)]
    # Layer by layer: what counts is that all layers have it.
    world.auto_pull = True
    producer.say(local.Extend("T", 1, 64, 0, 2))
    world.settle()
    assert told() == []
    producer.say(local.Seal("T", 1, 64))
    world.settle()
    assert told() == [(0, 0)]
    assert consumer.done("f").code == "ok"
