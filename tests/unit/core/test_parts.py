"""The small parts that the machine is made of."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core import diagram
from kvd.core.attachment import ATTACHMENTS
from kvd.core.context import Refusal, failure_code
from kvd.core.deadlines import Deadlines
from kvd.core.fetch import FETCHES, Fetch, FetchEvent, FetchState
from kvd.core.manifest import Manifest, Plan
from kvd.core.offers import OFFERS, OfferEvent, OfferState
from kvd.core.packed import (
    NULL,
    bitmap,
    gather,
    has_null,
    indices,
    lowest_runs,
    ones,
    pack,
    present,
    unpack,
)
from kvd.core.remembered import Remembered
from kvd.core.sessions import Group
from kvd.core.transitions import STORY_LENGTH, IllegalTransition
from kvd.core.watermarks import Watermarks, news_for
from kvd.protocol.codes import Code
from kvd.protocol.types import Watermark
from tests.unit.core.engine import Engine
from tests.unit.core.world import World

IDS = st.lists(st.integers(0, 2**32 - 1) | st.just(NULL), max_size=70)


@given(IDS)
def test_packed_ids(ids: list[int]) -> None:
    packed = pack(ids)
    assert packed == b"".join(block.to_bytes(4, "little") for block in ids)
    assert list(unpack(packed)) == ids
    assert has_null(packed) == (NULL in ids)
    mask = sum(1 << i for i, block in enumerate(ids) if block != NULL)
    assert present(packed) == mask
    got = bitmap(mask, len(ids))
    assert [i for i in range(len(ids)) if got[i // 8] >> i % 8 & 1] == [
        i for i, block in enumerate(ids) if block != NULL
    ]


@given(st.sets(st.integers(0, 300)), st.integers(0, 320))
def test_runs_of_the_lowest(members: set[int], count: int) -> None:
    mask = sum(1 << i for i in members)
    taken, runs = lowest_runs(mask, count)
    chosen = sorted(members)[:count]
    assert taken == sum(1 << i for i in chosen)
    assert list(itertools.chain(*(range(*run) for run in runs))) == chosen
    assert all(stop < start for (_, stop), (start, _) in itertools.pairwise(runs))
    packed = pack(range(400))
    assert list(unpack(gather(packed, runs))) == chosen
    assert b"".join(indices(*run) for run in runs) == pack(chosen)


def test_sets_of_all() -> None:
    assert ones(0) == 0
    assert ones(3) == 7
    assert list(unpack(indices(3000, 3003))) == [3000, 3001, 3002]


@given(
    st.lists(
        st.tuples(st.integers(0, 7), st.floats(0, 10) | st.none()),
        max_size=200,
    )
)
def test_deadlines_surface_in_order_whatever_was_moved(
    moves: list[tuple[int, float | None]],
) -> None:
    deadlines = Deadlines()
    truth: dict[tuple[str, int], float] = {}
    for number, when in moves:
        key = ("k", number)
        if when is None:
            deadlines.clear(key)
            truth.pop(key, None)
        else:
            deadlines.set(key, when)
            truth[key] = when
        assert deadlines.next() == min(truth.values(), default=None)
        assert len(deadlines) == len(truth)
    assert len(deadlines._heap) <= 64 + 2 * 8 + 1
    seen = []
    while (due := deadlines.pop_due(10.0)) is not None:
        assert isinstance(due[1], int)
        seen.append(truth.pop(("k", due[1])))
    assert seen == sorted(seen)
    assert truth == {}


def test_a_renewed_deadline_hides_no_other() -> None:
    deadlines = Deadlines()
    deadlines.set(("renewed",), 1.0)
    deadlines.set(("due",), 2.0)
    deadlines.set(("renewed",), 100.0)
    assert deadlines.pop_due(1.5) is None
    assert deadlines.pop_due(2.0) == ("due",)
    assert deadlines.pop_due(50.0) is None
    assert ("renewed",) in deadlines


def test_what_is_remembered_is_bounded_and_ages() -> None:
    table: Remembered[str, int] = Remembered(ttl=10.0, bound=2)
    table.put("a", 1, now=0.0)
    table.put("b", 2, now=1.0)
    table.put("a", 3, now=2.0)
    table.put("c", 4, now=3.0)
    assert table.get("b", 3.0) is None
    assert table.get("a", 3.0) == 3
    assert table.get("a", 12.0) is None
    assert table.next_expiry() == 12.0
    table.trim(12.0)
    assert len(table) == 1
    table.drop("c")
    assert table.next_expiry() is None


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 50)), max_size=20),
    st.integers(0, 50),
)
def test_watermarks_against_a_plain_list(
    layers: int, raises: list[tuple[int, int, int]], end: int
) -> None:
    marks, truth, told = Watermarks(layers), [0] * layers, [0] * layers
    for a, b, tokens in raises:
        first, stop = min(a, b, layers), min(max(a, b), layers)
        news = marks.raise_to(first, stop, tokens)
        for layer in range(first, stop):
            truth[layer] = max(truth[layer], tokens)
        for mark in news_for(news, end):
            for layer in range(mark.first_layer, mark.first_layer + mark.num_layers):
                assert told[layer] < mark.tokens, "told, but no news"
                told[layer] = mark.tokens
        assert told == [min(tokens, end) for tokens in truth]
        clipped = [0] * layers
        for mark in marks.clipped(end):
            for layer in range(mark.first_layer, mark.first_layer + mark.num_layers):
                clipped[layer] = mark.tokens
        assert clipped == told
    assert marks.highest() == max(truth)


GROUPS = (Group((0, 2, 3), (10, 20, 30)), Group((1,), (7,)))


@settings(max_examples=40, deadline=None, derandomize=True, report_multiple_bugs=False)
@given(st.data())
def test_a_manifest_against_a_plain_set(data: st.DataObject) -> None:
    """Random grants, news, budgets and arrivals; a set of (group, layer, index) is the truth."""
    bs, first = 4, data.draw(st.integers(0, 2))
    start = first * bs
    end = start + data.draw(st.integers(1, 22))
    count = -(-end // bs) - first
    dst = []
    for _ in GROUPS:
        ids = data.draw(st.permutations(range(100, 100 + count)))
        holes = data.draw(st.sets(st.integers(0, count - 1)))
        dst.append([NULL if i in holes else block for i, block in enumerate(ids)])
    manifest = Manifest(
        GROUPS, [pack(ids) for ids in dst], start=start, end=end, block_size=bs, source_blocks=50
    )
    src: list[list[int]] = [[] for _ in GROUPS]
    tokens = [0] * 4
    wanted = {
        (g, layer, i)
        for g, group in enumerate(GROUPS)
        for layer in group.layers
        for i in range(count)
        if dst[g][i] != NULL
    }
    done: set[tuple[int, int, int]] = set()
    planned: set[tuple[int, int, int]] = set()
    running: list[tuple[Plan, set[tuple[int, int, int]]]] = []
    for step in range(25):
        more = [
            data.draw(st.integers(0, count - len(known))) if step < 10 else count - len(known)
            for known in src
        ]
        news = []
        for g, number in enumerate(more):
            ids = [(len(src[g]) + i) % 50 for i in range(number)]
            src[g] += ids
            news.append(pack(ids))
        a = data.draw(st.integers(0, 3)) if step < 10 else 0
        b = data.draw(st.integers(a, 4)) if step < 10 else 4
        upto = data.draw(st.integers(0, end)) if step < 10 else end
        for layer in range(a, b):
            tokens[layer] = max(tokens[layer], upto)
        manifest.extend(news, [Watermark(a, b - a, upto)])
        manifest.check()
        limit = data.draw(st.integers(30, 400))
        most = data.draw(st.integers(1, 12))
        plan = manifest.plan(data.draw(st.integers(1, limit)), limit, most)
        if plan is not None:
            places = set()
            for piece in plan.pieces:
                for i, s, d in zip(
                    unpack(piece.indices), unpack(piece.src), unpack(piece.dst), strict=True
                ):
                    assert (s, d) == (src[piece.group][i], dst[piece.group][i])
                    for layer in GROUPS[piece.group].layers:
                        if piece.first_layer <= layer < piece.first_layer + piece.num_layers:
                            places.add((piece.group, layer, i))
                            assert min((first + i + 1) * bs, end) <= tokens[layer], "not valid yet"
            assert places <= wanted - planned
            sizes = {layer: n for g in GROUPS for layer, n in zip(g.layers, g.nbytes, strict=True)}
            assert plan.nbytes == sum(sizes[layer] for _, layer, _ in places)
            assert plan.nbytes <= limit
            assert sum(len(unpack(piece.indices)) for piece in plan.pieces) <= most
            planned |= places
            running.append((plan, places))
        elif step >= 10:
            assert planned == wanted
        arrive: bool = data.draw(st.booleans())
        if running and arrive:
            plan, places = running.pop(data.draw(st.integers(0, len(running) - 1)))
            manifest.arrived(plan)
            done |= places
        assert manifest.complete == (done == wanted)
        lacking = {(g, i) for g, _, i in wanted - done}
        for g, bad in enumerate(manifest.bad()):
            assert {i for i in range(count) if bad[i // 8] >> i % 8 & 1} == {
                i for h, i in lacking if h == g
            }
        whole = min([i for _, i in lacking], default=count)
        assert manifest.tokens == min(end, start + whole * bs) - start


def test_a_manifest_refuses_what_it_cannot_copy() -> None:
    def fresh() -> Manifest:
        dst = [pack([1, NULL]), pack([3, 4])]
        return Manifest(GROUPS, dst, start=0, end=8, block_size=4, source_blocks=50)

    fresh().extend([pack([1, NULL]), b""], [])
    for blocks, code in (
        ([pack([NULL]), b""], Code.RANGE_NOT_HELD),
        ([pack([50]), b""], Code.BAD_MESSAGE),
        ([pack([1, 2, 3]), b""], Code.BAD_MESSAGE),
        ([b"xyz", b""], Code.BAD_MESSAGE),
        ([b""], Code.BAD_MESSAGE),
    ):
        with pytest.raises(Refusal) as caught:
            fresh().extend(blocks, [])
        assert caught.value.code is code
    with pytest.raises(Refusal):
        fresh().extend([b"", b""], [Watermark(0, 5, 4)])


@pytest.mark.parametrize(
    ("text", "code"),
    [("peer_lost", Code.PEER_LOST), ("ok", Code.INTERNAL), ("surprise", Code.INTERNAL)],
)
def test_a_failure_is_no_success(text: str, code: Code) -> None:
    assert failure_code(text) is code


# --- tables ----------------------------------------------------------------------------------


def a_fetch(world: World) -> tuple[Engine, Fetch]:
    producer = world.node("p").engine("P")
    consumer = world.node("d").engine("D")
    consumer.fetch("f", "T", producer, end=32, park=30.0)
    world.settle()
    return consumer, consumer.node.core.fetches.by_id["f"]


def test_an_illegal_move_tells_the_story() -> None:
    world = World()
    consumer, fetch = a_fetch(world)
    with pytest.raises(IllegalTransition) as caught:
        consumer.node.core.fetches.fire(fetch, FetchEvent.GO)
    assert [(old, new) for _, old, _, new in caught.value.story] == [
        ("assembling", "connecting"),
        ("connecting", "attaching"),
        ("attaching", "asked"),
    ]
    assert "f of T: go in asked" in str(caught.value)
    assert fetch.state is FetchState.ASKED


def test_a_story_is_bounded() -> None:
    world = World()
    producer = world.node("p").engine("P")
    producer.offer("T", tokens=32)
    offer = producer.node.core.sessions.by_id[producer.session].offers["T"]
    for _ in range(3 * STORY_LENGTH):
        producer.node.core.offers.fire(offer, OfferEvent.RENEWED)
    assert len(offer.story) == STORY_LENGTH


def test_every_state_is_reached_and_left() -> None:
    for table in (OFFERS, FETCHES, ATTACHMENTS):
        states = set(type(table.initial))
        sources = {state for state, _ in table.moves}
        targets = {target for move in table.moves.values() for target in move.to}
        assert sources | targets == states
        assert targets | {table.initial} == states
        assert len(states - sources) == 1, "one final state"


def test_the_diagram_shows_every_move() -> None:
    text = diagram.mermaid("offer")
    assert text.startswith("%% offer\nstateDiagram-v2\n    [*] --> leased\n")
    assert "    ended --> [*]" in text
    assert "    serving --> lingering: last grant closed" in text
    for (state, event), move in OFFERS.moves.items():
        for target in move.to:
            lines = [line for line in text.splitlines() if f" {state} --> {target}:" in line]
            assert len(lines) == 1
            assert str(event) in lines[0]
    everything = diagram.mermaid()
    assert everything.count("stateDiagram-v2") == 3
    assert text in everything
    with pytest.raises(KeyError):
        diagram.mermaid("nothing")


def test_offer_states_are_the_ones_of_the_table() -> None:
    assert OFFERS.initial is OfferState.LEASED
