"""`make mutate-safety`: takes each guard away in a copy of the code, and runs its test there.

A mutant is killed only if its test passes on the unchanged copy and, on the changed one, fails by
an assertion of the test, or because a refusal did not come. Timeouts and other exceptions do not
count: they show that something broke, not that somebody looked. Ends with status 1 if a mutant
survives or does not apply.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

from tests.chaos.mutants.catalogue import MUTANTS
from tests.chaos.mutants.mutant import DoesNotApplyError, Mutant

ROOT = Path(__file__).parents[3]
COPIED = ("kvd", "connector_shim", "tests", "pyproject.toml")
TEST_TIMEOUT_S = 240.0
_ORACLE = re.compile(r"^(AssertionError|assert |Failed: DID NOT RAISE)")
_PLACE = re.compile(r"^(\S+\.py):\d+: ", re.MULTILINE)
_DEADLINE = re.compile(r"Timeout|not within|TimeoutError")


def copy_to(folder: Path) -> None:
    """The shipped code and its tests."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, ignore=ignore)
        else:
            shutil.copy(source, folder / name)


def run(folder: Path, tests: list[str], timeout: float) -> tuple[str, str]:
    """(passed | failed | error, what the first failure says) of these tests there."""
    report = folder / "report.xml"
    command = [
        sys.executable, "-B", "-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider",
        f"--junitxml={report}", *tests,
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**_environ(), "PYTHONPATH": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "error", "it did not end"
    if not report.exists():
        return "error", done.stdout[-2000:]
    root = ElementTree.parse(report).getroot()  # noqa: S314 - pytest has just written it
    report.unlink()
    failures = [*root.iter("failure")]
    if failures:
        return "failed", failures[0].get("message", "") + "\n" + (failures[0].text or "")
    if [*root.iter("error")] or done.returncode:
        return "error", done.stdout[-2000:]
    return "passed", ""


def _environ() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVD_")}
    # The fault suite is to find what is missing within a minute.
    return {**kept, "KVDTEST_CHAOS_SECONDS": "45"}


def judge(mutant: Mutant, outcome: str, text: str) -> str:
    """Why the mutant was not killed by an oracle; empty if it was."""
    if outcome == "passed":
        return "survived: its test passes"
    if outcome == "error":
        return f"no verdict: {text.strip()[-1500:]}"
    if not _ORACLE.match(text):
        return f"failed by an exception: {text.strip()[:800]}"
    places = _PLACE.findall(text)
    if places and not places[-1].startswith("tests/"):
        return f"failed by an assertion of the code itself: {text.strip()[:800]}"
    if _DEADLINE.search(text.split("\n", 1)[0]):
        return f"failed by a deadline: {text.strip()[:800]}"
    if mutant.says not in text:
        return f"failed, but does not say {mutant.says!r}: {text.strip()[:800]}"
    return ""


def check(folder: Path, mutant: Mutant) -> str:
    """Why its test does not see that the guard is gone; empty if it does."""
    files = {folder / hunk.path for hunk in mutant.hunks}
    before = {file: file.read_text() for file in files}
    try:
        for hunk in mutant.hunks:
            hunk.apply(folder)
        outcome, text = run(folder, [mutant.test], TEST_TIMEOUT_S)
    except DoesNotApplyError as exc:
        return f"does not apply: {exc}"
    finally:
        for file, content in before.items():
            file.write_text(content)
    why = judge(mutant, outcome, text)
    if not why:
        shown = next((line for line in text.splitlines() if mutant.says in line), text)
        print("    " + shown.strip()[:200])
    return why


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="only mutants with this in their name")
    parser.add_argument("--rule", type=int, help="only mutants of this rule")
    parser.add_argument("--test", default="", help="only mutants with this in their test's name")
    parser.add_argument(
        "--no-baseline", action="store_true", help="does not run the tests on unchanged code first"
    )
    args = parser.parse_args()
    chosen = [
        mutant
        for mutant in MUTANTS
        if args.k in mutant.name and args.rule in (None, mutant.rule) and args.test in mutant.test
    ]
    alive = 0
    with tempfile.TemporaryDirectory(prefix="kvdm-", dir="/tmp") as name:
        folder = Path(name)
        copy_to(folder)
        tests = sorted({mutant.test for mutant in chosen})
        if not args.no_baseline:
            outcome, text = run(folder, tests, TEST_TIMEOUT_S + 30.0 * len(tests))
            if outcome != "passed":
                print(f"a test fails on unchanged code: {text.strip()[:2000]}")
                return 1
            print(f"{len(tests)} tests pass on unchanged code", flush=True)
        for mutant in chosen:
            print(f"\n=== rule {mutant.rule}: {mutant.name}")
            for hunk in mutant.hunks:
                print(hunk)
            print(f"    {mutant.test}", flush=True)
            began = time.monotonic()
            why = check(folder, mutant)
            took = time.monotonic() - began
            alive += bool(why)
            print(f"    {'ALIVE: ' + why if why else 'killed'} ({took:.0f} s)", flush=True)
    print(f"\n{len(chosen) - alive} of {len(chosen)} mutants killed")
    return int(alive > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main())
