"""Every series exists at 0, counts what it should, and nothing in there raises."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from kvd.core.instructions import Record
from kvd.core.offers import OfferState
from kvd.metrics import (
    CODES,
    DROPS,
    MAX_DROP_SERIES,
    OFFER_STATES,
    PEER_STATES,
    TRANSPORTS,
    Metrics,
)
from kvd.protocol.codes import Code
from kvd.transport.tcp_server import DROP_REASONS


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def done(**fields: Any) -> Record:
    base = {
        "code": Code.OK,
        "fetch_id": "f",
        "transfer_id": "t",
        "generation": 1,
        "engine_id": "e",
        "transport": "shm",
        "tokens": 100,
        "nbytes": 4096,
        "seconds": 0.25,
    }
    return Record("fetch_done", {**base, **fields})


def test_every_series_is_there_at_0(metrics: Metrics) -> None:
    series = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
    }
    expected: list[tuple[str, dict[str, Sequence[str]]]] = [
        ("kvd_fetches_total", {"code": CODES, "transport": TRANSPORTS}),
        ("kvd_served_fetches_total", {"code": CODES, "transport": TRANSPORTS}),
        ("kvd_attaches_total", {"code": CODES, "transport": TRANSPORTS}),
        ("kvd_offers_total", {"reason": CODES}),
        ("kvd_refused_total", {"code": CODES}),
        ("kvd_fetched_bytes_total", {"transport": TRANSPORTS}),
        ("kvd_fetched_tokens_total", {"transport": TRANSPORTS}),
        ("kvd_served_bytes_total", {"transport": TRANSPORTS}),
        ("kvd_fetch_seconds_count", {"transport": TRANSPORTS}),
        ("kvd_open_offers", {"state": OFFER_STATES}),
        ("kvd_peers", {"state": PEER_STATES}),
        ("kvd_fetches_in_flight", {}),
        ("kvd_parked", {}),
        ("kvd_sessions", {}),
        ("kvd_clients", {}),
        ("kvd_mapped_bytes", {}),
        ("kvd_late_total", {}),
        ("kvd_late_bytes_total", {}),
        ("kvd_loop_lag_seconds", {}),
    ]
    for name, labels in expected:
        for values in product(*labels.values()):
            key = (name, *sorted(zip(labels, values, strict=True)))
            assert series.get(key) == 0, key
    for where, reasons in DROPS.items():
        for reason in reasons:
            assert series["kvd_dropped_total", ("reason", reason), ("where", where)] == 0


def test_labels_follow_the_code_list_and_the_core() -> None:
    assert set(CODES) == {str(c) for c in Code}
    assert set(OFFER_STATES) == {str(s) for s in OfferState} - {"ended"}


def test_every_place_that_drops_is_listed() -> None:
    assert set(DROPS["data"]) == set(DROP_REASONS)
    root = Path(__file__).parents[3] / "kvd"
    calls = [
        (call[1], call[2])
        for path in root.rglob("*.py")
        for call in re.finditer(r'drop(?:ped)?\(\s*"(\w+)",\s*"(\w+)"', path.read_text())
    ]
    assert len(calls) > 5
    assert [c for c in calls if c[1] not in DROPS.get(c[0], ())] == []


def test_the_build_is_named(metrics: Metrics) -> None:
    [family] = [f for f in metrics.registry.collect() if f.name == "kvd_build_info"]
    [sample] = family.samples
    assert sample.value == 1
    assert set(sample.labels) == {"version", "protocol", "python"}
    assert all(sample.labels.values())


def test_a_fetch_that_succeeded(metrics: Metrics) -> None:
    metrics.record(done())
    metrics.record(done(transport="tcp", nbytes=1))
    assert metrics.value("kvd_fetches_total", code="ok", transport="shm") == 1
    assert metrics.value("kvd_fetches_total", code="ok", transport="tcp") == 1
    assert metrics.value("kvd_fetched_bytes_total", transport="shm") == 4096
    assert metrics.value("kvd_fetched_bytes_total", transport="tcp") == 1
    assert metrics.value("kvd_fetched_tokens_total", transport="shm") == 100
    assert metrics.value("kvd_fetch_seconds_sum", transport="shm") == 0.25


def test_a_fetch_that_failed_counts_bytes_but_no_tokens_and_no_time(metrics: Metrics) -> None:
    metrics.record(done(code=Code.DEADLINE, nbytes=7))
    metrics.record(done(code=Code.PEER_UNREACHABLE, transport="", nbytes=0))
    assert metrics.value("kvd_fetches_total", code="deadline", transport="shm") == 1
    assert metrics.value("kvd_fetches_total", code="peer_unreachable", transport="none") == 1
    assert metrics.value("kvd_fetched_bytes_total", transport="shm") == 7
    assert metrics.value("kvd_fetched_tokens_total", transport="shm") == 0
    assert metrics.value("kvd_fetch_seconds_count", transport="shm") == 0


def test_the_other_records(metrics: Metrics) -> None:
    metrics.record(
        Record("fetch_served", {"code": "ok", "transport": "tcp", "nbytes": 9, "fetch_id": "f"})
    )
    metrics.record(Record("offer_ended", {"reason": "expired", "transfer_id": "t"}))
    metrics.record(Record("refused", {"code": "overloaded", "what": "offer", "detail": ""}))
    metrics.record(Record("attached", {"transport": "shm", "attach_id": "a"}))
    metrics.record(Record("attach_failed", {"code": "geometry_mismatch", "transport": ""}))
    metrics.record(Record("late", {"what": "progress"}))
    metrics.late_bytes(64)
    metrics.record(Record("a kind of the future", {"code": "ok"}))
    assert metrics.value("kvd_served_fetches_total", code="ok", transport="tcp") == 1
    assert metrics.value("kvd_served_bytes_total", transport="tcp") == 9
    assert metrics.value("kvd_offers_total", reason="expired") == 1
    assert metrics.value("kvd_refused_total", code="overloaded") == 1
    assert metrics.value("kvd_attaches_total", code="ok", transport="shm") == 1
    assert metrics.value("kvd_attaches_total", code="geometry_mismatch", transport="none") == 1
    assert metrics.value("kvd_late_total") == 1
    assert metrics.value("kvd_late_bytes_total") == 64
    assert metrics.value("kvd_dropped_total", where="metrics", reason="internal") == 0


def test_values_that_are_not_on_a_list_share_one_series(metrics: Metrics) -> None:
    for i in range(100):
        metrics.record(done(code=f"code{i}", transport=f"transport{i}"))
    assert metrics.value("kvd_fetches_total", code="other", transport="other") == 100


def test_drops_are_bounded(metrics: Metrics) -> None:
    for i in range(2 * MAX_DROP_SERIES):
        metrics.dropped("somewhere", f"reason{i}")
    [family] = [f for f in metrics.registry.collect() if f.name == "kvd_dropped"]
    assert len([s for s in family.samples if s.name == "kvd_dropped_total"]) <= MAX_DROP_SERIES + 1
    assert sum(s.value for s in family.samples if s.name == "kvd_dropped_total") == (
        2 * MAX_DROP_SERIES
    )


def test_states_that_are_gone_go_back_to_0(metrics: Metrics) -> None:
    metrics.set_offers({"leased": 3, "serving": 1})
    metrics.set_offers({"serving": 2})
    metrics.set_peers({"up": 4})
    assert metrics.value("kvd_open_offers", state="leased") == 0
    assert metrics.value("kvd_open_offers", state="serving") == 2
    assert metrics.value("kvd_peers", state="up") == 4


def test_gauges(metrics: Metrics) -> None:
    metrics.set_fetches_in_flight(1)
    metrics.set_parked(2)
    metrics.set_sessions(3)
    metrics.set_clients(4)
    metrics.set_mapped_bytes(5)
    metrics.set_loop_lag(0.5)
    names = ("fetches_in_flight", "parked", "sessions", "clients", "mapped_bytes")
    assert [metrics.value(f"kvd_{n}") for n in names] == [1, 2, 3, 4, 5]
    assert metrics.value("kvd_loop_lag_seconds") == 0.5


json_like: st.SearchStrategy[object] = st.one_of(
    st.none(), st.sampled_from(["ok", "x", ""]), st.integers(), st.floats(), st.just([])
)
shared = Metrics()


@settings(max_examples=50)
@given(
    st.sampled_from(["fetch_done", "fetch_served", "offer_ended", "refused", "attached", "late"]),
    st.dictionaries(
        st.sampled_from(["code", "transport", "nbytes", "seconds", "tokens", "reason"]), json_like
    ),
)
def test_no_record_raises_or_counts_backwards(kind: str, fields: dict[str, object]) -> None:
    shared.record(Record(kind, fields))
    for family in shared.registry.collect():
        if family.name.startswith("kvd_"):
            assert all(s.value >= 0 for s in family.samples), family


def test_a_broken_metric_is_counted_and_harms_nothing(metrics: Metrics) -> None:
    metrics.record(done(nbytes="many"))
    metrics.record(None)  # type: ignore[arg-type]
    metrics.set_sessions("three")  # type: ignore[arg-type]
    assert metrics.value("kvd_dropped_total", where="metrics", reason="internal") == 3
    metrics.record(done())
    assert metrics.value("kvd_fetched_bytes_total", transport="shm") == 4096


def test_both_formats_parse_and_every_family_has_help(metrics: Metrics) -> None:
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    families = {f.name: f for f in parse_text(body.decode())}
    assert families["kvd_fetches"].documentation
    assert all(f.documentation for n, f in families.items() if n.startswith("kvd_"))
    assert not any(s.name.endswith("_created") for f in families.values() for s in f.samples)

    body, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    parsed = parse_openmetrics(body.decode())  # type: ignore[no-untyped-call]
    assert {f.name for f in parsed} >= {"kvd_offers", "kvd_open_offers"}


def test_two_daemons_in_one_process_do_not_share_series() -> None:
    a, b = Metrics(), Metrics()
    a.record(done())
    assert b.value("kvd_fetches_total", code="ok", transport="shm") == 0
