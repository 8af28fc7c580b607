"""`make mutate-safety` is too slow for each run; that its patches still fit is not."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from tests.chaos.mutants.__main__ import ROOT, judge
from tests.chaos.mutants.catalogue import MUTANTS
from tests.chaos.mutants.mutant import DoesNotApplyError, Hunk, Mutant


def test_each_safety_rule_has_a_mutant() -> None:
    assert {mutant.rule for mutant in MUTANTS} == set(range(1, 12))
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_each_patch_applies_and_its_test_exists(mutant: Mutant, tmp_path: Path) -> None:
    assert mutant.hunks
    for path in {hunk.path for hunk in mutant.hunks}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    for hunk in mutant.hunks:
        hunk.apply(tmp_path)
        ast.parse((tmp_path / hunk.path).read_text())
    file, _, test = mutant.test.partition("::")
    assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text()


def test_a_patch_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("twice\ntwice\n")
    for old in ("twice", "never"):
        with pytest.raises(DoesNotApplyError):
            Hunk("file.py", old, "once").apply(tmp_path)
    assert (tmp_path / "file.py").read_text() == "twice\ntwice\n"


@pytest.mark.parametrize(
    ("outcome", "text", "killed"),
    [
        ("failed", "AssertionError: assert 'ok' == 'fenced'", True),
        ("failed", "assert 3 == 0", True),
        ("failed", "Failed: DID NOT RAISE <class 'TransportError'>", True),
        ("failed", "Failed: Timeout (>180.0s) from pytest-timeout.", False),
        ("failed", "Failed: not within 10 s: late bytes (last value False)", False),
        ("failed", "KeyError: 3", False),
        ("failed", "assert 1 == 0\ntests/a.py:1: in t\nkvd/b.py:2: in f\n", False),
        ("failed", "assert 1 == 0\nkvd/b.py:2: in f\ntests/a.py:1: in t\n", True),
        ("error", "it did not end", False),
        ("passed", "", False),
    ],
)
def test_only_an_oracle_kills_a_mutant(outcome: str, text: str, killed: bool) -> None:
    assert (judge(MUTANTS[-1], outcome, text) == "") is killed
