"""README and ARCHITECTURE say what the code says."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from connector_shim.settings import ShimSettings
from kvd.config import describe
from kvd.core.diagram import mermaid
from kvd.metrics import Metrics

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()


def rows(text: str, heading: str) -> list[str]:
    """First cells of the table under a heading."""
    part = text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [line.split("|")[1].strip() for line in part.splitlines() if line.startswith("| `")]


def test_the_state_diagram_is_the_one_that_runs() -> None:
    block = ARCHITECTURE.split("```mermaid\n", 1)[1].split("\n```", 1)[0]
    assert block == mermaid().strip()


def test_every_module_is_in_the_tour() -> None:
    listed: set[str] = set()
    folder = ""
    for line in ARCHITECTURE.split("## Where things are", 1)[1].splitlines():
        if heading := re.fullmatch(r"\*\*(\S+)/\*\*", line):
            folder = heading[1]
        elif row := re.match(r"\| `(\S+\.py)` \|", line):
            listed.add(f"{folder}/{row[1]}")
    found = {
        str(path.relative_to(ROOT))
        for package in ("kvd", "connector_shim")
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert listed == found


def test_the_example_in_the_readme_is_the_file() -> None:
    shown = README.split("```python\n", 1)[1].split("\n```", 1)[0]
    source = (ROOT / "docs/examples/move_bytes.py").read_text()
    assert shown.strip() == source.split('"""', 2)[2].strip()


def test_settings_in_the_readme_exist() -> None:
    daemon = {doc.name for doc in describe()}
    named = {
        name
        for cell in rows(README, "Settings of the daemon")
        for name in re.findall(r"`(\w+)`", cell)
    }
    assert named
    assert named <= daemon
    shim = {
        name
        for cell in rows(README, "Settings of the connector")
        for name in re.findall(r"`(\w+)`", cell)
    }
    assert shim
    assert shim <= set(ShimSettings.__dataclass_fields__)


def test_metrics_in_the_readme_exist() -> None:
    text = Metrics().render("")[0].decode()
    exposed = set(re.findall(r"^# HELP (kvd_\w+)", text, re.MULTILINE))
    named = {
        name
        for cell in rows(README, "What it tells you")
        for name in re.findall(r"`(kvd_\w+)", cell)
    }
    assert named
    assert named <= exposed


def test_make_targets_in_the_readme_exist() -> None:
    targets = set(re.findall(r"\bmake (\w+)", README))
    assert {"demo", "test"} <= targets
    known = subprocess.run(
        ["make", "-pRrq", "-f", "Makefile", ":"], cwd=ROOT, capture_output=True, text=True,
        timeout=30, check=False,
    ).stdout  # fmt: skip
    for target in targets:
        assert re.search(rf"^{target}:", known, re.MULTILINE), target
