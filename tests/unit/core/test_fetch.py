"""Fetches from end to end: a producer's core and a consumer's, joined."""

from __future__ import annotations

import pytest

from kvd.core import events as ev
from kvd.core.config import CoreConfig
from kvd.core.packed import NULL, pack
from kvd.protocol import local, peer
from kvd.protocol.types import PeerAddr, Watermark
from tests.unit.core.world import BLOCK, NBYTES, Engine, World, digest

SMALL = CoreConfig(min_job_bytes=NBYTES, max_job_bytes=3 * NBYTES)
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


def test_a_finished_prefill_is_pulled_whole(
    world: World, producer: Engine, consumer: Engine
) -> None:
    producer.offer("T", tokens=40, blocks=[[7, 3, 9]])
    blocks = consumer.fetch("f", "T", producer, end=40, blocks=[[2, 4, 6]])
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


# --- generations -----------------------------------------------------------------------------


def test_nothing_of_a_generation_that_is_gone_counts(
    world: World, producer: Engine, consumer: Engine
) -> None:
    world.auto_pull = False
    source = streamed(producer, "T", 48)
    producer.compute("T", 1, [source[0][:2]])
    producer.say(local.Extend("T", 1, 32))
    blocks = consumer.fetch("f", "T", producer, end=48)
    world.settle()
    (job,) = consumer.node.pulls
    world.post(world.answer_later(consumer.node, job))
    # The producer's word comes first, and the answer of a copy that was still valid after it.
    producer.fence[1] = 0
    producer.say(local.Revoke("T", 1))
    world.queue.rotate(-1)
    world.settle()
    assert consumer.took(local.FetchDone) == []
    producer.offer("T", 2, tokens=48, blocks=[[5, 6, 7]], slot=3)
    world.settle()
    for job in list(consumer.node.pulls):
        world.finish_pull(consumer.node, job)
    world.settle()
    done = consumer.done("f")
    assert (done.code, done.generation) == ("ok", 2)
    assert consumer.tags(blocks) == {("T", 2)}
    assert closes(consumer) == [("f", "ok")]


def test_a_new_grant_waits_for_the_jobs_of_the_old(world: World, producer: Engine) -> None:
    """A late byte of the old generation would land on the new one."""
    world.auto_pull = world.auto_stop = False
    consumer = world.node("d", SMALL).engine("D")
    source = streamed(producer, "T", 48)
    producer.compute("T", 1, source)
    producer.say(local.Extend("T", 1, 48))
    blocks = consumer.fetch("f", "T", producer, end=48)
    world.settle()
    old = sorted(consumer.node.pulls)
    assert len(old) == 3
    producer.offer("T", 2, tokens=48, slot=2)
    world.settle()
    assert consumer.node.stopped == ["f"]
    for job in old[:2]:
        world.fail_pull(consumer.node, job, "cancelled", 1.0)
        assert sorted(consumer.node.pulls) == [other for other in old if other > job]
    world.auto_pull = True
    world.fail_pull(consumer.node, old[2], "cancelled", 1.0)
    world.settle()
    done = consumer.done("f")
    assert (done.code, done.generation) == ("ok", 2)
    assert consumer.tags(blocks) == {("T", 2)}


def test_a_late_success_of_the_old_generation_is_none_of_the_new(
    world: World, producer: Engine
) -> None:
    world.auto_pull = world.auto_stop = False
    consumer = world.node("d", SMALL).engine("D")
    source = streamed(producer, "T", 48)
    producer.compute("T", 1, source)
    producer.say(local.Extend("T", 1, 48))
    blocks = consumer.fetch("f", "T", producer, end=48)
    world.settle()
    first, second, third = sorted(consumer.node.pulls)
    answers = [world.answer_later(consumer.node, job) for job in (first, second)]
    producer.offer("T", 2, tokens=48, slot=2)
    world.settle()
    for answer in answers:
        answer()
    assert sorted(consumer.node.pulls) == [third]
    world.auto_pull = True
    world.fail_pull(consumer.node, third, "fenced", 1.0)
    world.settle()
    done = consumer.done("f")
    assert (done.code, done.generation) == ("ok", 2)
    assert consumer.tags(blocks) == {("T", 2)}


def test_a_dead_word_waits_for_the_reason(world: World, producer: Engine) -> None:
    world.auto_pull = False
    consumer = world.node("d", SMALL).engine("D")
    source = streamed(producer, "T", 48)
    producer.compute("T", 1, source)
    producer.say(local.Extend("T", 1, 48))
    blocks = consumer.fetch("f", "T", producer, end=48)
    world.settle()
    producer.fence[1] = 0
    world.finish_pull(consumer.node, min(consumer.node.pulls))
    world.settle()
    assert consumer.node.pulls == {}
    assert consumer.took(local.FetchDone) == []
    producer.offer("T", 2, tokens=48, slot=2)
    world.auto_pull = True
    for job in list(consumer.node.pulls):
        world.finish_pull(consumer.node, job)
    world.settle()
    assert consumer.done("f").code == "ok"
    assert consumer.tags(blocks) == {("T", 2)}


def test_a_dead_word_without_a_reason_fails_all_blocks(world: World, producer: Engine) -> None:
    world.auto_pull = False
    consumer = world.node("d", SMALL).engine("D")
    producer.offer("T", tokens=48)
    consumer.fetch("f", "T", producer, end=48)
    world.settle()
    first, second, third = sorted(consumer.node.pulls)
    world.finish_pull(consumer.node, first)
    producer.fence[0] = 0
    world.finish_pull(consumer.node, second)
    world.settle()
    assert third not in consumer.node.pulls
    world.advance(0.9)
    assert consumer.took(local.FetchDone) == []
    world.advance(0.2)
    done = consumer.done("f")
    assert (done.code, done.bad, done.tokens) == ("fenced", [b"\7"], 0)


def test_a_sealed_offer_that_is_revoked_fails_the_fetch(
    world: World, producer: Engine, consumer: Engine
) -> None:
    world.auto_pull = False
    producer.offer("T", tokens=48)
    consumer.fetch("f", "T", producer, end=48)
    world.settle()
    producer.fence[0] = 0
    producer.say(local.Revoke("T", 1))
    world.settle()
    done = consumer.done("f")
    assert (done.code, done.bad) == ("revoked", [b"\7"])
    assert closes(consumer) == [("f", "revoked")]


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
    world: World, producer: Engine, consumer: Engine, blocks: list[list[int]], code: str
) -> None:
    producer.offer("T", tokens=48)
    consumer.fetch("f", "T", producer, end=48, blocks=blocks)
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


@pytest.mark.parametrize(
    ("start", "end", "code"),
    [(8, 48, "unaligned_range"), (32, 16, "unaligned_range"), (0, 2**60, "bad_message")],
)
def test_ranges_that_cannot_be(
    consumer: Engine, producer: Engine, start: int, end: int, code: str
) -> None:
    consumer.fetch("f", "T", producer, start=start, end=end, blocks=[])
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


# --- what the producer may not do -------------------------------------------------------------


def asked(world: World, producer: Engine, consumer: Engine) -> PeerAddr:
    consumer.fetch("f", "T", producer, end=48, park=30.0, generation=None)
    world.settle()
    return producer.node.addr


def grant(**changes: object) -> peer.Grant:
    fields: dict[str, object] = {
        "fetch_id": "f",
        "generation": 1,
        "ticket": bytes(16),
        "fence_slot": 0,
        "fence_word": 9,
        "blocks": [pack([1, 2, 3])],
        "valid": [Watermark(0, 3, 48)],
        "sealed": True,
    }
    return peer.Grant(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"blocks": [pack([1, 2, 64])]},
        {"blocks": [pack([1, 2, 3, 4])]},
        {"blocks": [b"abc"]},
        {"blocks": []},
        {"blocks": [pack([1]), pack([1])]},
        {"valid": [Watermark(2, 2, 48)]},
        {"valid": [Watermark(2**32 - 1, 2**32 - 1, 48)]},
        {"fence_slot": 64},
        {"fence_word": 0},
    ],
)
def test_a_grant_that_cannot_be_fails_the_fetch(
    world: World, producer: Engine, consumer: Engine, wrong: dict[str, object]
) -> None:
    addr = asked(world, producer, consumer)
    consumer.node.run(ev.PeerMessage(addr, grant(**wrong)))
    assert consumer.done("f").code == "bad_message"
    assert consumer.node.started == []


def test_marks_without_blocks_move_nothing(
    world: World, producer: Engine, consumer: Engine
) -> None:
    addr = asked(world, producer, consumer)
    consumer.node.run(ev.PeerMessage(addr, grant(blocks=[b""])))
    assert consumer.node.started == []
    news = peer.Progress("f", 1, [pack([1])], [], False)
    consumer.node.run(ev.PeerMessage(addr, news))
    assert [pull.nbytes for pull in consumer.node.started] == [3 * NBYTES]
    consumer.node.run(ev.PeerMessage(addr, peer.Progress("f", 1, [pack([NULL])], [], False)))
    assert consumer.node.stopped == ["f"]


def test_words_about_fetches_that_are_not_asked_are_late(
    world: World, producer: Engine, consumer: Engine
) -> None:
    addr = asked(world, producer, consumer)
    stranger = PeerAddr("x", 1)
    node = consumer.node
    for message in (
        peer.Progress("f", 1, [b""], [], False),
        peer.FetchRevoked("f", 1, "revoked", True),
        peer.FetchRevoked("g", 1, "revoked", True),
        grant(fetch_id="g"),
        peer.FetchRefused("g", "released", ""),
    ):
        node.run(ev.PeerMessage(addr, message))
    node.run(ev.PeerMessage(stranger, grant()))
    assert len(node.recorded("late")) == 6
    assert consumer.took(local.FetchDone) == []
    node.run(ev.PeerMessage(addr, grant()))
    node.run(ev.PeerMessage(addr, grant(generation=2)))
    node.run(ev.PeerMessage(addr, peer.Progress("f", 2, [b""], [], False)))
    node.run(ev.PeerMessage(addr, peer.FetchRevoked("f", 2, "revoked", False)))
    assert len(node.recorded("late")) == 9
    assert consumer.took(local.FetchDone) == []


def test_a_grant_of_another_generation_than_named(
    world: World, producer: Engine, consumer: Engine
) -> None:
    consumer.fetch("f", "T", producer, end=48, generation=4, park=30.0)
    world.settle()
    consumer.node.run(ev.PeerMessage(producer.node.addr, grant(generation=5)))
    assert consumer.done("f").code == "stale_generation"


def test_a_refusal_is_never_a_success(world: World, producer: Engine, consumer: Engine) -> None:
    addr = asked(world, producer, consumer)
    consumer.node.run(ev.PeerMessage(addr, peer.FetchRefused("f", "ok", "")))
    assert consumer.done("f").code == "internal"


def test_another_prompt_moves_nothing(world: World, producer: Engine, consumer: Engine) -> None:
    producer.offer("T", tokens=48, prompt="a")
    assert digest("a", 48) != digest("b", 48)
    consumer.fetch("f", "T", producer, end=48, prompt="b")
    world.settle()
    assert consumer.done("f").code == "prompt_mismatch"
    assert consumer.memory == {}


# --- releases and renewals -------------------------------------------------------------------


def test_release_and_renew_are_answered(world: World, producer: Engine, consumer: Engine) -> None:
    producer.offer("T", tokens=48, lease=2.0)
    consumer.say(local.Renew("T", 1, producer.node.addr, "P"))
    consumer.say(local.Renew("U", None, producer.node.addr, "P"))
    consumer.say(local.Release("T", None, producer.node.addr, "P"))
    world.settle()
    assert [(m.transfer_id, m.what, m.code) for m in consumer.took(local.NotifyDone)] == [
        ("T", "renew", "ok"),
        ("U", "renew", "unknown_transfer"),
        ("T", "release", "ok"),
    ]
    assert producer.ended("T") == [(1, "released")]


def test_a_release_to_a_dead_peer_is_answered_too(world: World, consumer: Engine) -> None:
    nobody = PeerAddr("nobody", 1)
    consumer.say(local.Release("T", None, nobody, "P"))
    world.settle()
    assert [m.code for m in consumer.took(local.NotifyDone)] == ["peer_unreachable"]
    world.auto_connect = False
    consumer.say(local.Release("U", None, PeerAddr("silent", 1), "P"))
    world.advance(CoreConfig().attach_timeout_s + 0.1)
    assert [m.code for m in consumer.took(local.NotifyDone)] == ["peer_unreachable"]


def test_notifies_are_bounded(world: World) -> None:
    world.auto_connect = False
    consumer = world.node("d", CoreConfig(max_notifies=2)).engine("D")
    for i in range(3):
        consumer.say(local.Release(f"T{i}", None, PeerAddr("p", 1), "P"))
    assert [m.code for m in consumer.took(local.NotifyDone)] == ["overloaded"]


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
