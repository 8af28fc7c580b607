"""A daemon's state as tables that fit on a terminal of 80 columns."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

MAX_ROWS = 12
"""Of each table; the JSON has them all."""
GOOD, BAD, MEH = "green", "red", "yellow"


def seconds(value: object) -> str:
    """A time as three figures and a unit; a dash for what never came."""
    if not isinstance(value, int | float) or value < 0:
        return "-"
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.0f} h" if value < 172_800 else f"{value / 86_400:.0f} d"


def size(value: object) -> str:
    """Bytes with a binary unit."""
    if not isinstance(value, int | float):
        return "-"
    amount = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} TiB"


def short(value: object, width: int = 24) -> str:
    """Long names lose their middle: both ends tell them apart."""
    text = "".join(c if c.isprintable() else "?" for c in str(value))
    if len(text) <= width:
        return text
    return f"{text[: width // 2]}…{text[-(width - width // 2 - 1) :]}"


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False,
        padding=(0, 1, 0, 0), show_edge=False,
    )  # fmt: skip
    for name in columns:
        table.add_column(
            name, justify="right" if name in right else "left", overflow="ellipsis", no_wrap=True
        )
    return table


def _rows(table: Table, rows: Iterable[Sequence[str | Text]], total: int) -> Table:
    for number, row in enumerate(rows):
        if number == MAX_ROWS:
            break
        table.add_row(*row)
    if total > MAX_ROWS:
        table.caption = f"and {total - MAX_ROWS} more"
        table.caption_justify = "left"
    return table


def _state(text: str) -> Text:
    style = {"up": GOOD, "ready": GOOD, "down": BAD, "ok": GOOD}.get(text, MEH)
    return Text(text, style=style)


def daemon_view(where: str, found: dict[str, Any]) -> RenderableType:
    """Everything worth a look of one daemon."""
    d, counts = found["daemon"], found["counts"]
    state = "draining" if d["draining"] else "ready" if d["ready"] else "not ready"
    keys = "no keys" if d["keys"] is None else f"{d['keys']} peer keys"
    head = Text.assemble(
        (f"{where}", "bold"), "  ", _state(state), f"  up {seconds(d['uptime_s'])}"
    )
    parts: list[RenderableType] = [
        head,
        Text(f"  kvd {d['version']}  pid {d['pid']}  {'/'.join(d['transports'])}  {keys}"),
        Text(f"  peers {d['advertise']}  data {d['data_port'] or '-'}  http {d['metrics'] or '-'}"),
        Text(
            f"  in flight: {sum(counts['fetches'].values())} fetches, {counts['parked']} parked, "
            f"{sum(counts['offers'].values())} offers ({counts['offered_blocks']} blocks), "
            f"{size(found['mapped_bytes'])} mapped"
        ),
    ]
    parts += [Text(f"  {name}: {why}", style=MEH) for name, why in d["reasons"].items()]
    for table in (_engines, _peers, _clients, _fetches, _offers, _failures):
        made = table(found)
        if made.row_count:
            parts += [Text(), made]
    return Group(*parts)


def _engines(found: dict[str, Any]) -> Table:
    rows = found["engines"]
    table = _table(
        "Engines", "engine", "role", "state", "offers", "fetches", right=("offers", "fetches")
    )
    return _rows(
        table,
        (
            (
                short(e["engine_id"], 36),
                e["role"],
                _state("up" if e["registered"] else "registering" if e["alive"] else "gone"),
                str(e["offers"]),
                str(e["fetches"]),
            )
            for e in rows
        ),
        len(rows),
    )


def _peers(found: dict[str, Any]) -> Table:
    rows = found["peers"]
    using: dict[str, set[str]] = {}
    for one in found["attachments"]:
        if one["transport"]:
            using.setdefault(one["peer"], set()).add(one["transport"])
    table = _table("Peers that we ask", "peer", "state", "by", "RTT", "key", "last problem",
                   right=("RTT",))  # fmt: skip
    return _rows(
        table,
        (
            (
                short(p["address"], 24),
                _state(p["state"]),
                ",".join(sorted(using.get(p["address"], ()))) or "-",
                seconds(p["rtt_s"]),
                short(p["key"] or "-", 12),
                short(p["problem"] or "-", 60),
            )
            for p in rows
        ),
        len(rows),
    )


def _clients(found: dict[str, Any]) -> Table:
    rows = found["clients"]
    table = _table("Peers that ask us", "daemon", "from", "key", "heard", right=("heard",))
    return _rows(
        table,
        (
            (
                short(c["daemon_id"], 32),
                short(c["source"], 20),
                short(c["key"] or "-", 12),
                seconds(c["silent_s"]),
            )
            for c in rows
        ),
        len(rows),
    )


def _fetches(found: dict[str, Any]) -> Table:
    rows = sorted(found["fetches"], key=lambda f: f["age"], reverse=True)
    numbers = ("bytes", "age", "ends in")
    table = _table("Fetches in flight", "transfer", "peer", "state", "by", *numbers, right=numbers)
    return _rows(
        table,
        (
            (
                short(f["transfer_id"], 20),
                short(f["peer"], 18),
                f["state"],
                f["transport"] or "-",
                size(f["nbytes"]),
                seconds(f["age"]),
                seconds(f["ends_in"]),
            )
            for f in rows
        ),
        sum(found["counts"]["fetches"].values()),
    )


def _offers(found: dict[str, Any]) -> Table:
    rows = found["offers"]
    table = _table("Offers", "transfer", "engine", "state", "blocks", "fetches", "lease",
                   right=("blocks", "fetches", "lease"))  # fmt: skip
    return _rows(
        table,
        (
            (
                short(o["transfer_id"], 24),
                short(o["engine_id"], 20),
                o["state"],
                str(o["blocks"]),
                str(o["grants"]),
                seconds(o["ends_in"]),
            )
            for o in rows
        ),
        sum(found["counts"]["offers"].values()),
    )


def _failures(found: dict[str, Any]) -> Table:
    rows = found["failures"]
    table = _table("Failures since the start", "code", "times", "last", "what", right=("times",))
    now = time.time()
    return _rows(
        table,
        (
            (
                Text(f["code"], style=BAD),
                str(f["count"]),
                f"{seconds(max(0.0, now - f['at']))} ago",
                short(f["detail"] or f["transfer_id"], 60),
            )
            for f in rows
        ),
        len(rows),
    )


STAGES = ("parked", "granted", "first_byte", "last_byte", "told")


def transfers_view(rows: Sequence[dict[str, Any]]) -> Table:
    """Ended transfers, newest first, with the time at which each passed its stages.

    Times and sizes are never cut, the names beside them may be.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0, show_edge=False)
    for name, width, right in (
        ("when", 8, False), ("", 3, False), ("transfer", 11, False), ("outcome", 12, False),
        ("bytes", 7, True), ("parked", 6, True), ("grant", 6, True), ("first", 6, True),
        ("last", 6, True), ("told", 6, True),
    ):  # fmt: skip
        side: Literal["left", "right"] = "right" if right else "left"
        table.add_column(name, width=width, no_wrap=True, justify=side)
    for t in rows:
        stages = t["stages"]
        outcome = f"ok {t['transport'] or ''}" if t["code"] == "ok" else short(t["code"], 12)
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(t["at"])),
            {"fetched": "in", "served": "out"}.get(t["direction"], "?"),
            short(t["transfer_id"], 11),
            Text(outcome, style=GOOD if t["code"] == "ok" else BAD),
            size(t["nbytes"]).replace(" ", ""),
            *(seconds(stages.get(s, -1)).replace(" ", "") for s in STAGES),
        )
    return table
