"""State diagrams, drawn from the tables that the core runs on."""

from __future__ import annotations

from typing import Any

from kvd.core import attachments as attachments
from kvd.core import fetch_moves as fetch_moves  # fills the table of fetches
from kvd.core.attachment import ATTACHMENTS
from kvd.core.fetch import FETCHES
from kvd.core.offers import OFFERS
from kvd.core.transitions import Table

TABLES: tuple[Table[Any, Any], ...] = (OFFERS, FETCHES, ATTACHMENTS)


def mermaid(name: str | None = None) -> str:
    """Mermaid text of one table ("offer", "fetch", "attachment"), or of all, one after the other.

    Raises KeyError for a name that is no table's.
    """
    if name is None:
        return "\n".join(_draw(table) for table in TABLES)
    return _draw({table.name: table for table in TABLES}[name])


def _draw(table: Table[Any, Any]) -> str:
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, event), move in table.moves.items():
        for target in move.to:
            arrows.setdefault((_id(state), _id(target)), []).append(str(event))
    lines = ["stateDiagram-v2", f"    [*] --> {_id(table.initial)}"]
    for (start, stop), labels in sorted(arrows.items()):
        lines.append(f"    {start} --> {stop}: {' | '.join(sorted(labels))}")
    sources = {source for source, _ in arrows}
    finals = sorted({target for _, target in arrows} - sources)
    lines.extend(f"    {final} --> [*]" for final in finals)
    return "\n".join([f"%% {table.name}", *lines, ""])


def _id(state: object) -> str:
    return str(state).replace(" ", "_")
