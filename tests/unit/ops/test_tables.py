"""Tables in a terminal of 80 columns: nothing wraps, and no time or size is cut."""

from __future__ import annotations

import io

from rich.console import Console

from kvd.ops.tables import transfers_view


def lines(rows: list[dict[str, object]]) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(transfers_view(rows))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def transfer(**changes: object) -> dict[str, object]:
    stages = {
        "parked": 0.000999, "granted": 0.0123, "first_byte": 0.456, "last_byte": 12.3,
        "told": 119.0,
    }  # fmt: skip
    return {
        "at": 1.7e9, "direction": "fetched", "transfer_id": "cmpl-" + "0123456789" * 6,
        "code": "ok", "transport": "shm", "nbytes": 123_456_789, "stages": stages, **changes,
    }  # fmt: skip


def test_all_stages_are_shown_in_full() -> None:
    told = lines([transfer()])
    assert max(map(len, told)) <= 80
    assert " parked  grant  first   last   told" in told[0]
    assert told[-1].endswith("118MiB  999us 12.3ms  456ms  12.3s   119s")
    assert " in  cmpl-…" in told[-1]
    assert " ok shm " in told[-1]


def test_what_was_served_has_dashes_for_what_its_daemon_cannot_know() -> None:
    stages = {"parked": -1.0, "granted": 0.0, "first_byte": -1.0, "last_byte": -1.0, "told": 0.25}
    told = lines([transfer(direction="served", stages=stages)])
    assert " out cmpl-…" in told[-1]
    assert told[-1].split()[-5:] == ["-", "0us", "-", "-", "250ms"]


def test_what_failed_has_its_code_and_dashes() -> None:
    told = lines([transfer(code="geometry_mismatch", direction="served", stages={})])
    assert max(map(len, told)) <= 80
    assert "geomet…match" in told[-1]
    assert told[-1].split()[-5:] == ["-"] * 5
