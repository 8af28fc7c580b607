"""What one run of the bench found, as JSON and as a table."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """GB are 1e9 bytes. `None` stands for what could not be measured; nothing is estimated."""

    transport: str
    preset: str
    requests: int
    """Measured requests; the first round, which attaches the two engines, is not among them."""
    concurrency: int
    pieces: int
    piece_bytes: int
    request_bytes: int
    verified: bool
    """Every word of every request was right, and no word beside them was touched."""

    gbs: float
    """Median over rounds of a round's bytes by its time; a round is `concurrency` requests."""
    gbs_min: float
    gbs_max: float
    limit_gbs: float | None
    """Median of the limit program's better method, on the same blocks, before each round and after
    the last one."""
    ratio: float | None
    """`gbs` by `limit_gbs`."""
    limit_method: str | None
    limit_methods: dict[str, float]
    limit_samples: int
    limit_note: str
    """Why there is no limit, if there is none."""

    p50_ms: float
    """From the client's fetch call to the poll that returned its FetchDone."""
    p99_ms: float
    first_ms: float
    """The round before the measured ones: connect, handshake, mapping, and its bytes."""
    granted_ms: float
    """Medians of the daemon's own clock: asked to granted, to the first byte, to the last byte."""
    first_byte_ms: float
    last_byte_ms: float

    cpu_s_per_gb: float
    """CPU seconds of both daemons for each GB moved."""
    producer_cpu_s_per_gb: float
    consumer_cpu_s_per_gb: float
    limit_cpu_s_per_gb: float | None

    threads: int | None
    """Copying threads of shm; None for tcp."""
    streams: int | None
    """Connections of tcp; None for shm. The limit is always one socket pair."""
    congestion_control: str | None
    verify: str
    """The daemons' own setting: whether they compare checksums too, which costs time."""
    settings: dict[str, str]
    version: str
    cpus: int
    kernel: str

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)


def _gbs(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f} GB/s"


def print_table(result: Result, console: Console) -> None:
    """The result for people."""
    title = f"kvd bench: {result.transport}, {result.preset}"
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    mib = result.request_bytes / 2**20
    table.add_row(
        "request",
        f"{mib:.0f} MiB in {result.pieces} pieces of {result.piece_bytes / 1024:.0f} KiB",
    )
    table.add_row("requests", f"{result.requests}, {result.concurrency} at once")
    table.add_row("bytes", "all verified" if result.verified else "[red]WRONG[/red]")
    table.add_row(
        "kvd",
        f"{_gbs(result.gbs)}  ({result.gbs_min:.2f} to {result.gbs_max:.2f}), median of rounds",
    )
    if result.limit_gbs is None:
        table.add_row("limit", f"not measured: {result.limit_note}")
    else:
        others = ", ".join(
            f"{name} {gbs:.2f}"
            for name, gbs in result.limit_methods.items()
            if name != result.limit_method
        )
        table.add_row(
            "limit",
            f"{_gbs(result.limit_gbs)}  ({result.limit_method}{'; ' + others if others else ''}),"
            f" median of {result.limit_samples}",
        )
    table.add_row("ratio", "not known" if result.ratio is None else f"{result.ratio:.2f}")
    table.add_row("request time", f"p50 {result.p50_ms:.2f} ms, p99 {result.p99_ms:.2f} ms")
    table.add_row(
        "of that",
        f"granted after {result.granted_ms:.2f} ms, first byte {result.first_byte_ms:.2f} ms,"
        f" last byte {result.last_byte_ms:.2f} ms",
    )
    table.add_row("first round", f"{result.first_ms:.1f} ms (connects and maps; not counted)")
    limit_cpu = result.limit_cpu_s_per_gb
    table.add_row(
        "CPU",
        f"{result.cpu_s_per_gb:.3f} s/GB (producer {result.producer_cpu_s_per_gb:.3f},"
        f" consumer {result.consumer_cpu_s_per_gb:.3f}"
        + (")" if limit_cpu is None else f"; limit {limit_cpu:.3f})"),
    )
    if result.threads is not None:
        table.add_row("threads", str(result.threads))
    table.add_row("verify", result.verify)
    if result.streams is not None:
        table.add_row("tcp", f"{result.streams} streams, {result.congestion_control}")
    console.print(table)
