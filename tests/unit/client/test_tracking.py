"""The tracking: every end is told exactly once, whatever the daemon says and in whatever order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from connector_shim.errors import ClientError
from connector_shim.fence import DEAD, FenceTable
from connector_shim.tracking import Tracker, bad_indices
from kvd.protocol.codes import Code
from kvd.protocol.local import FetchDone, NotifyDone, OfferEnded
from kvd.protocol.types import NULL_BLOCK
from tests.unit.client.fake import fetch_done

BLOCKS = ((1).to_bytes(4, "little") + (2).to_bytes(4, "little"),)


@pytest.fixture
def tracker() -> Iterator[Tracker]:
    found = Tracker(max_fetches=3, max_notifies=2, remembered=4)
    found.fence = FenceTable(3)
    yield found
    found.fence.close()


def test_late_double_and_unknown_ends_are_counted_and_dropped(tracker: Tracker) -> None:
    tracker.open_fetch("f", BLOCKS, 0.0, 5.0)
    tracker.open_offer(("t", 1), 0.0, 5.0)
    assert tracker.fetch_done(fetch_done("f"))
    assert tracker.end_offer(("t", 1), "released")
    assert not tracker.fetch_done(fetch_done("f"))
    assert not tracker.fetch_done(fetch_done("f", "cancelled", [b"\3"]))
    assert not tracker.fetch_done(fetch_done("never"))
    assert not tracker.end_offer(("t", 1), "expired")
    assert not tracker.end_offer(("t", 2), "expired")
    assert not tracker.notify_done(NotifyDone("t", "release", "ok"))
    assert [type(e) for e in tracker.take_events()] == [FetchDone, OfferEnded]
    assert tracker.counts == {
        "fetch_late": 2,
        "fetch_unknown": 1,
        "offer_late": 1,
        "offer_unknown": 1,
        "notify_unknown": 1,
    }
    assert tracker.take_events() == []


def test_the_word_is_dropped_before_the_end_is_an_event(tracker: Tracker) -> None:
    assert tracker.fence is not None
    slot, word = tracker.open_offer(("t", 1), 0.0, 5.0)
    words_at_event: list[int] = []

    class Watching(list):  # type: ignore[type-arg]
        def append(self, event: object) -> None:
            assert tracker.fence is not None
            words_at_event.append(tracker.fence.word(slot))
            super().append(event)

    tracker._events = Watching()
    assert tracker.fence.word(slot) == word
    tracker.end_offer(("t", 1), "released")
    assert words_at_event == [DEAD]


def test_what_ended_cannot_begin_again_on_one_connection(tracker: Tracker) -> None:
    tracker.open_fetch("f", BLOCKS, 0.0, 5.0)
    tracker.open_offer(("t", 1), 0.0, 5.0)
    for _ in range(2):
        with pytest.raises(ClientError) as caught:
            tracker.open_fetch("f", BLOCKS, 0.0, 5.0)
        assert caught.value.code is Code.DUPLICATE
        with pytest.raises(ClientError) as caught:
            tracker.open_offer(("t", 1), 0.0, 5.0)
        assert caught.value.code is Code.DUPLICATE
        tracker.fetch_done(fetch_done("f"))
        tracker.end_offer(("t", 1), "released")
    tracker.new_session()
    tracker.open_fetch("f", BLOCKS, 0.0, 5.0)
    tracker.open_offer(("t", 1), 0.0, 5.0)


def test_everything_is_bounded(tracker: Tracker) -> None:
    for index in range(3):
        tracker.open_fetch(f"f{index}", BLOCKS, 0.0, 5.0)
        tracker.open_offer((f"t{index}", 1), 0.0, 5.0)
    with pytest.raises(ClientError, match="3 fetches") as caught:
        tracker.open_fetch("f3", BLOCKS, 0.0, 5.0)
    assert caught.value.code is Code.OVERLOADED
    with pytest.raises(ClientError, match="3 slots") as caught:
        tracker.open_offer(("t3", 1), 0.0, 5.0)
    assert caught.value.code is Code.OVERLOADED
    for _ in range(2):
        tracker.check_notify()
        tracker.open_notify("t", "release", 0.0)
    with pytest.raises(ClientError, match="2 notifications") as caught:
        tracker.check_notify()
    assert caught.value.code is Code.OVERLOADED
    for index in range(50):
        tracker.end_offer(("t0", 1), "released")
        tracker.open_offer(("t0", index + 2), 0.0, 5.0)
        tracker.end_offer(("t0", index + 2), "released")
    assert len(tracker._ended) <= 4


def test_a_cancel_is_asked_for_once_and_never_for_what_ended(tracker: Tracker) -> None:
    tracker.open_fetch("f", BLOCKS, 0.0, 5.0)
    assert [tracker.cancel_fetch("f"), tracker.cancel_fetch("f")] == [True, False]
    tracker.fetch_done(fetch_done("f", "cancelled", [b"\3"]))
    assert not tracker.cancel_fetch("f")
    assert not tracker.cancel_fetch("never")


def test_failed_fetches_name_all_their_blocks_but_the_null_ones(tracker: Tracker) -> None:
    ids = [5, NULL_BLOCK, 7, *range(8, 14), NULL_BLOCK]
    packed = b"".join(block.to_bytes(4, "little") for block in ids)
    tracker.open_fetch("f", (packed, b""), 0.0, 5.0)
    tracker.fail_fetches(Code.DAEMON_GONE, "gone")
    (done,) = tracker.take_events()
    assert isinstance(done, FetchDone)
    assert (done.code, done.detail) == (Code.DAEMON_GONE, "gone")
    assert [bad_indices(bitmap) for bitmap in done.bad] == [[0, 2, 3, 4, 5, 6, 7, 8], []]


@pytest.mark.parametrize(
    ("code", "bad"),
    [
        pytest.param("ok", [b"\1"], id="success with a bad block"),
        pytest.param("ok", [b"\0", b"\0"], id="success with too many groups"),
        pytest.param("ok", [b"\0\0"], id="success with too many blocks"),
        pytest.param("deadline", [], id="failure that names no blocks"),
        pytest.param("deadline", [b"\1\0"], id="failure of other blocks"),
        pytest.param("no such code", [], id="a code of another world"),
    ],
)
def test_an_end_that_contradicts_itself_fails_every_block(
    tracker: Tracker, code: str, bad: list[bytes]
) -> None:
    tracker.open_fetch("f", BLOCKS, 0.0, 5.0)
    tracker.fetch_done(fetch_done("f", code, bad))
    (done,) = tracker.take_events()
    assert isinstance(done, FetchDone)
    assert done.code == (code if code == "deadline" else "internal")
    assert [bad_indices(bitmap) for bitmap in done.bad] == [[0, 1]]
    assert tracker.counts["fetch_rewritten"] == 1


@pytest.mark.parametrize(
    ("code", "bad"), [("ok", [b"\0"]), ("ok", []), ("deadline", [b"\2"]), ("cancelled", [b"\0"])]
)
def test_an_end_that_makes_sense_is_passed_on(
    tracker: Tracker, code: str, bad: list[bytes]
) -> None:
    tracker.open_fetch("f", BLOCKS, 0.0, 5.0)
    message = fetch_done("f", code, bad)
    tracker.fetch_done(message)
    assert tracker.take_events() == [message]


def test_notifications_are_told_once_also_without_an_answer(tracker: Tracker) -> None:
    tracker.open_notify("t", "release", 0.0)
    tracker.open_notify("t", "renew", 10.0)
    tracker.notify_done(NotifyDone("t", "renew", "ok"))
    tracker.expire_notifies(29.0)
    assert tracker.take_events() == [NotifyDone("t", "renew", "ok")]
    tracker.expire_notifies(30.0)
    tracker.expire_notifies(31.0)
    assert tracker.take_events() == [NotifyDone("t", "release", "deadline")]
    tracker.open_notify("t", "release", 31.0)
    tracker.fail_notifies(Code.DAEMON_GONE)
    tracker.fail_notifies(Code.DAEMON_GONE)
    assert tracker.take_events() == [NotifyDone("t", "release", "daemon_gone")]


def test_overdue_fetches_are_found_when_they_are_due(tracker: Tracker) -> None:
    tracker.open_fetch("long", BLOCKS, 0.0, 100.0)
    tracker.open_fetch("short", BLOCKS, 0.0, 5.0)
    assert tracker.overdue(34.9) is None
    assert tracker.overdue(35.0) == "short"
    assert tracker.overdue(36.0) == "short"
    tracker.fetch_done(fetch_done("short"))
    assert tracker.overdue(36.0) is None
    assert tracker.overdue(130.0) == "long"


class Machine(RuleBasedStateMachine):
    """Random calls and random messages against a model of what must have been told."""

    fetch_ids = Bundle("fetch_ids")
    offer_keys = Bundle("offer_keys")

    def __init__(self) -> None:
        super().__init__()
        self.tracker = Tracker(max_fetches=4)
        self.tracker.fence = FenceTable(4)
        self.now = 0.0
        self.number = 0
        self.running: set[str] = set()
        self.held: dict[tuple[str, int], tuple[int, int]] = {}
        self.opened: Counter[object] = Counter()
        self.told: Counter[object] = Counter()

    def teardown(self) -> None:
        self.take()
        assert self.tracker.fence is not None
        self.tracker.fence.close()

    @rule(target=fetch_ids)
    def open_fetch(self) -> str:
        self.number += 1
        fetch_id = f"f{self.number}"
        if len(self.running) == 4:
            with pytest.raises(ClientError, match="overloaded"):
                self.tracker.open_fetch(fetch_id, BLOCKS, self.now, 5.0)
        else:
            self.tracker.open_fetch(fetch_id, BLOCKS, self.now, 5.0)
            self.running.add(fetch_id)
            self.opened[fetch_id] += 1
        return fetch_id

    @rule(target=offer_keys, transfer=st.sampled_from("ab"), lease=st.sampled_from([1.0, 9.0]))
    def open_offer(self, transfer: str, lease: float) -> tuple[str, int]:
        self.number += 1
        key = (transfer, self.number)
        if len(self.held) == 4:
            with pytest.raises(ClientError, match="overloaded"):
                self.tracker.open_offer(key, self.now, lease)
        else:
            self.held[key] = self.tracker.open_offer(key, self.now, lease)
            self.opened[key] += 1
        return key

    @rule(fetch_id=fetch_ids, code=st.sampled_from(["ok", "deadline", "nonsense"]))
    def daemon_tells_fetch(self, fetch_id: str, code: str) -> None:
        known = self.tracker.fetch_done(fetch_done(fetch_id, code))
        assert known == (fetch_id in self.running)
        self.running.discard(fetch_id)

    @rule(key=offer_keys)
    def daemon_tells_offer(self, key: tuple[str, int]) -> None:
        assert self.tracker.end_offer(key, "released") == (key in self.held)
        self.held.pop(key, None)

    @rule(fetch_id=fetch_ids)
    def cancel(self, fetch_id: str) -> None:
        if self.tracker.cancel_fetch(fetch_id):
            assert fetch_id in self.running

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def time_passes_in_silence(self, seconds: float) -> None:
        self.now += seconds
        for key in self.tracker.expire_offers(self.now):
            del self.held[key]

    @rule()
    def daemon_goes(self) -> None:
        self.tracker.end_all_offers(Code.DAEMON_GONE)
        self.tracker.fail_fetches(Code.DAEMON_GONE, "")
        self.held.clear()
        self.running.clear()
        self.tracker.new_session()

    @rule()
    def take(self) -> None:
        for event in self.tracker.take_events():
            if isinstance(event, FetchDone):
                self.told[event.fetch_id] += 1
            elif isinstance(event, OfferEnded):
                self.told[event.transfer_id, event.generation] += 1

    @invariant()
    def nothing_is_told_twice_or_unasked(self) -> None:
        assert all(count <= self.opened[key] for key, count in self.told.items())

    @invariant()
    def words_live_exactly_as_long_as_offers(self) -> None:
        assert self.tracker.fence is not None
        alive = dict(self.held.values())
        for slot in range(4):
            assert self.tracker.fence.word(slot) == alive.get(slot, DEAD)

    @invariant()
    def what_ended_was_told_or_will_be(self) -> None:
        pending = Counter[object]()
        for event in self.tracker._events:
            if isinstance(event, FetchDone):
                pending[event.fetch_id] += 1
            elif isinstance(event, OfferEnded):
                pending[event.transfer_id, event.generation] += 1
        outstanding = Counter[object]([*self.running, *self.held])
        assert self.told + pending + outstanding == self.opened


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTrackerMachine = Machine.TestCase
