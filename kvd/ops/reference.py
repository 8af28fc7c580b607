"""Writes docs/configuration.md and docs/metrics.md: `python -m kvd.ops.reference FOLDER`.

A test compares what is written with what lies there, so that neither can grow old.
"""

from __future__ import annotations

import sys
from pathlib import Path

from prometheus_client.metrics_core import Metric

from kvd.config import CONFIG_ENV, describe
from kvd.metrics import Metrics

_MADE = "<!-- Made by `python -m kvd.ops.reference docs`; change the code instead. -->\n"


def configuration() -> str:
    """Every setting of the daemon."""
    lines = [
        "# Settings of the daemon",
        "",
        _MADE,
        "Each is a flag of `kvd serve`, a variable, or a key of a TOML file (`--config FILE` or",
        f"`{CONFIG_ENV}`); flags win over the environment, the environment over the file. An",
        "unknown name or a bad value is refused by name, exit status 78. `kvd config check`",
        "prints what is in force and where it came from.",
    ]
    group = ""
    for doc in describe():
        if doc.group != group:
            group = doc.group
            lines += ["", f"## {group}", "", "| setting | variable | default | what |"]
            lines.append("|---|---|---|---|")
        unit = f" {doc.unit}" if doc.unit and doc.default[:1].isdigit() else ""
        what = doc.description + (f" ({', '.join(doc.choices)})" if doc.choices else "")
        cells = (f"`{doc.name}`", f"`{doc.env}`", f"`{doc.default}`{unit}", what)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Every series of the daemon, with its labels and their values."""
    lines = [
        "# Metrics of the daemon",
        "",
        _MADE,
        "At `/metrics` of the `metrics` address, for Prometheus. Units are seconds and bytes; all",
        "series are there at 0 from the start, and no label holds an id. A dashboard and alert",
        "rules are in `deploy/`.",
        "",
        "| metric | type | labels | what |",
        "|---|---|---|---|",
    ]
    families = sorted(Metrics().registry.collect(), key=lambda family: family.name)
    for family in (f for f in families if f.name.startswith("kvd_")):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        cells = (f"`{name}`", family.type, _labels(family), family.documentation)
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Besides, the process's own: `process_cpu_seconds_total`,"]
    lines += ["`process_resident_memory_bytes`, `process_open_fds` and the like.", ""]
    lines += ["## Codes", "", "Values of `code` and of `reason` of `kvd_offers_total`; the"]
    lines += ["[runbook](runbook.md) says what each means.", "", _codes()]
    return "\n".join(lines) + "\n"


def _labels(family: Metric) -> str:
    values: dict[str, set[str]] = {}
    for sample in family.samples:
        for key, value in sample.labels.items():
            if key != "le":
                values.setdefault(key, set()).add(value)
    shown = []
    for key, found in values.items():
        listed = ", ".join(sorted(found))
        many = key in ("code", "version", "protocol", "python") or len(listed) > 100
        shown.append(f"`{key}`" if many else f"`{key}`: {listed}")
    return "; ".join(shown) or "-"


def _codes() -> str:
    from kvd.protocol.codes import RETRYABLE, Code

    rows = [f"`{code}`" + (" (may be tried again)" if code in RETRYABLE else "") for code in Code]
    return ", ".join(rows) + "."


def main(folder: str) -> None:
    Path(folder, "configuration.md").write_text(configuration())
    Path(folder, "metrics.md").write_text(metrics())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "docs")
