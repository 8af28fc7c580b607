"""The instrument that all of these daemons run under finds what it is there for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.daemon.harness import ROOT

PLANTS = {
    "a timer burns 60 ms": ("loop.call_later(0.01, burn, 0.06)", "cpu", "burn"),
    "a task's step burns 60 ms": ("loop.create_task(step())", "cpu", "step"),
    "a reader burns 60 ms": ("loop.add_reader(r, read, r); os.write(w, b'x')", "cpu", "read"),
    "a thread hands over 60 ms": (
        "loop.run_in_executor(None, loop.call_soon_threadsafe, burn, 0.06)", "cpu", "burn",
    ),
    "a callback sleeps": ("loop.call_soon(time.sleep, 0.5)", "blocked", "sleep"),
    "a callback reads a pipe": (
        "threading.Timer(0.5, os.write, (w, b'x')).start(); loop.call_soon(os.read, r, 1)",
        "blocked", "read",
    ),
    "nothing bad": ("loop.call_soon(burn, 0.005)", "", ""),
    "many short ones": ("[loop.call_soon(burn, 0.005) for _ in range(40)]", "", ""),
    "a wait that is the loop's": ("loop.create_task(asyncio.sleep(0.3))", "", ""),
}  # fmt: skip
PROGRAM = """
import asyncio, os, sys, threading, time
from pathlib import Path
import uvloop
from tests.integration.daemon.watched import install
install(Path(sys.argv[1]))
def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end: pass
def read(fd):
    os.read(fd, 1)
    burn(0.06)
async def step():
    burn(0.06)
async def main():
    loop = asyncio.get_running_loop()
    r, w = os.pipe()
    {plant}
    await asyncio.sleep(0.7)
    loop.remove_reader(r)
with asyncio.Runner(loop_factory=lambda: uvloop.new_event_loop()) as runner:
    runner.run(main())
"""


@pytest.mark.parametrize("name", PLANTS)
def test_what_is_planted_is_found_and_nothing_else(tmp_path: Path, name: str) -> None:
    plant, what, where = PLANTS[name]
    report = tmp_path / "report"
    report.touch()
    subprocess.run(
        [sys.executable, "-c", PROGRAM.format(plant=plant), str(report)],
        cwd=ROOT, timeout=60, check=True,
    )  # fmt: skip
    found = [json.loads(line) for line in report.read_text().splitlines()]
    assert len(found) == (1 if what else 0), found
    for one in found:
        assert one["what"].startswith(what)
        assert where in one["callback"]
