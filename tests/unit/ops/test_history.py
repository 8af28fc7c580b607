"""The ring of ended transfers."""

from __future__ import annotations

from kvd.core.instructions import Record
from kvd.history import History
from kvd.protocol.types import Stages


def done(number: int, code: str = "ok", **more: object) -> Record:
    return Record("fetch_done", {"code": code, "transfer_id": f"t{number}", **more})


def test_it_keeps_the_last_ones_newest_first_and_no_more() -> None:
    history = History(size=3, clock=lambda: 5.0)
    for number in range(10):
        history.record(done(number))
    assert [t["transfer_id"] for t in history.last(100)] == ["t9", "t8", "t7"]
    assert [t["transfer_id"] for t in history.last(1)] == ["t9"]
    assert history.last(0) == history.last(-1) == []
    assert history.last(1)[0]["at"] == 5.0


def test_both_directions_and_nothing_else() -> None:
    history = History()
    history.record(done(1))
    history.record(Record("fetch_served", {"code": "ok", "transfer_id": "t2"}))
    history.record(Record("offer_ended", {"reason": "expired", "transfer_id": "t3"}))
    assert [t["direction"] for t in history.last(9)] == ["served", "fetched"]


def test_stages_are_seconds_since_the_engine_asked() -> None:
    history = History()
    history.record(done(1, stages=Stages(0.1, 0.2, 0.3, 0.05), seconds=0.4))
    assert history.last(1)[0]["stages"] == {
        "parked": 0.05, "granted": 0.1, "first_byte": 0.2, "last_byte": 0.3, "told": 0.4,
    }  # fmt: skip


def test_a_transfer_that_was_served_has_the_stages_that_its_daemon_knows() -> None:
    history = History()
    fields = {"code": "ok", "transfer_id": "t", "stages": Stages(0.2, parked=0.0), "seconds": 0.4}
    history.record(Record("fetch_served", fields))
    assert history.last(1)[0]["stages"] == {
        "parked": 0.0, "granted": 0.2, "first_byte": -1.0, "last_byte": -1.0, "told": 0.4,
    }  # fmt: skip


def test_failures_are_counted_by_code_with_the_last_case_of_each() -> None:
    history = History()
    history.record(done(1, "deadline", detail="first"))
    history.record(done(2, "peer_lost", detail="gone"))
    history.record(done(3, "deadline", detail="again"))
    history.record(done(4))
    found = [(f["code"], f["count"], f["transfer_id"], f["detail"]) for f in history.failures()]
    assert found == [("deadline", 2, "t3", "again"), ("peer_lost", 1, "t2", "gone")]
