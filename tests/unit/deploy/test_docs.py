"""Documentation that is made from the code is current; what is written by hand is complete."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvd.cli import build_parser
from kvd.config import describe
from kvd.ops import reference
from kvd.protocol.codes import Code

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(
    ("name", "text"),
    [("configuration.md", reference.configuration()), ("metrics.md", reference.metrics())],
)
def test_references_are_current(name: str, text: str) -> None:
    assert (DOCS / name).read_text() == text, "run: python -m kvd.ops.reference docs"


def test_every_setting_is_in_the_reference() -> None:
    text = (DOCS / "configuration.md").read_text()
    assert [d.name for d in describe() if f"| `{d.name}` |" not in text] == []


def test_the_runbook_has_every_code() -> None:
    headings = re.findall(r"^### (\w+)$", (DOCS / "runbook.md").read_text(), re.MULTILINE)
    assert headings == [str(code) for code in Code]


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda p: p.name)
def test_settings_and_commands_in_the_docs_exist(path: Path) -> None:
    text = path.read_text()
    known = {d.env for d in describe()} | {"KVD_CONFIG"}
    assert set(re.findall(r"\bKVD_[A-Z_]+\b", text)) <= known
    parser = build_parser()
    commands = next(a.choices for a in parser._actions if a.choices and "serve" in a.choices)
    assert commands is not None
    for line in re.findall(
        r"`kvd ([^`]+)`|^    (?:sudo -u kvd )?(?:/opt/kvd/bin/)?kvd (.+)$", text, re.MULTILINE
    ):
        words = shlex.split((line[0] or line[1]).partition("#")[0].replace("...", "").split("&")[0])
        assert words[0] in commands, line


def test_links_lead_somewhere() -> None:
    for path in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([\w./-]+\.md)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
