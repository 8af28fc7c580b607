"""Shows what the demo measured: a table, the conditions, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvd.demo.results import Check, Results, Row, checks


def show(console: Console, results: Results, seconds: float) -> None:
    """Print the table, the conditions and the verdict."""
    console.print(_table(results))
    console.print()
    found = checks(results)
    grid = Table.grid(padding=(0, 1))
    for check in found:
        mark = Text(" ok ", "green") if check.ok else Text("FAIL", "bold white on red")
        grid.add_row(Text(), mark, Text.assemble((check.name, "bold"), ": ", check.detail))
    console.print(grid)
    console.print()
    failed = sum(not check.ok for check in found)
    if failed:
        console.print(f"[bold red]FAILED[/]: {failed} of {len(found)} conditions do not hold.")
        return
    console.print(
        f"[bold green]PASSED[/]: {len(results.rows)} prompts were answered through kvd exactly as "
        f"by one engine alone;\n        {results.fetched_tokens} tokens "
        f"({_size(results.fetched_bytes)}) of KV moved by {results.transports_used[0]}. "
        f"{seconds:.0f} s in all."
    )


def as_json(results: Results, seconds: float, extra: dict[str, Any] | None = None) -> str:
    """The same as one JSON object."""
    found = checks(results)
    return json.dumps(
        {
            "ok": passed(found),
            "transport": results.transport,
            "transports_used": results.transports_used,
            "seconds": round(seconds, 1),
            "block_size": results.block_size,
            "block_nbytes": results.block_nbytes,
            "rows": [_row(row, results) for row in results.rows],
            "control": {
                "answers": results.control.answers,
                "differing": results.control.differing,
                "bytes": results.control.nbytes,
                "errors": results.control.errors,
            },
            "totals": {
                "prompt_tokens": sum(row.prompt_tokens for row in results.rows),
                "local_hits": sum(row.local_hits for row in results.rows),
                "fetched_tokens": results.fetched_tokens,
                "external_prefix_cache_hits": results.external_hits,
                "alone_hits": results.alone_hits,
                "fetched_bytes": results.fetched_bytes,
                "served_bytes": results.served_bytes,
                "due_bytes": results.due_bytes,
            },
            "checks": [
                {"name": check.name, "ok": check.ok, "detail": check.detail} for check in found
            ],
            **(extra or {}),
        },
        indent=2,
    )


def passed(found: Sequence[Check]) -> bool:
    """All conditions hold, and there are some."""
    return bool(found) and all(check.ok for check in found)


def _row(row: Row, results: Results) -> dict[str, Any]:
    where = row.difference
    return {
        "name": row.name,
        "prompt_tokens": row.prompt_tokens,
        "n": row.n,
        "local_hits": row.local_hits,
        "fetches": row.fetches,
        "fetched_tokens": row.fetched_tokens,
        "bytes": row.nbytes,
        "blocks": row.nbytes // results.block_nbytes,
        "early_bytes": row.early_nbytes,
        "due_blocks": row.due_blocks(results.block_size),
        "transfer_ms": round(row.transfer_ms, 3),
        "ttft_ms": round(row.ttft_ms, 1),
        "output_tokens": sum(map(len, row.paired)),
        "identical": row.identical,
        "first_difference": None if where is None else list(where),
        "error": row.error,
    }


def _table(results: Results) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("prompt")
    for name in ("prompt\ntokens", "tokens\nfetched", "bytes", "blocks"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("transfer\nms", "TTFT\nms"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("identical", justify="center", no_wrap=True)
    for row in results.rows:
        table.add_row(
            row.name,
            f"{row.prompt_tokens}",
            f"{row.fetched_tokens}",
            f"{row.nbytes:,}",
            f"{row.nbytes // results.block_nbytes}",
            f"{row.transfer_ms:.2f}",
            f"{row.ttft_ms:.0f}",
            Text("yes", "green") if row.identical else Text("NO", "bold red"),
        )
    table.add_section()
    table.add_row(
        "all",
        f"{sum(row.prompt_tokens for row in results.rows)}",
        f"{results.fetched_tokens}",
        f"{sum(row.nbytes for row in results.rows):,}",
        f"{sum(row.nbytes for row in results.rows) // results.block_nbytes}",
        "",
        "",
        f"{sum(row.identical for row in results.rows)}/{len(results.rows)}",
    )
    return table


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.0f} KiB"
