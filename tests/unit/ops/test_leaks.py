"""The leak check fails a run for each kind of thing that it leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.plugins.processes import runs

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 120

CONFTEST = """
import pytest
from pathlib import Path
pytest_plugins = ["tests.plugins.leaks"]

def pytest_configure(config):
    from tests.plugins import leaks
    leaks.start(config, Path(__file__).parent / "run")
"""

LEFT = """
subprocess.Popen(["sleep", "300"])
subprocess.run(["setsid", "sh", "-c", "sleep 301 >/dev/null 2>&1 &"])
threading.Thread(target=EVENT.wait, args=(300,), daemon=True, name="stray").start()
KEEP.append(socket.create_server(("127.0.0.1", 0)))
bound = socket.socket(socket.AF_UNIX)
bound.bind(str(RUN / "kvd.sock"))
KEEP.append(bound)
KEEP.append(open(f"/dev/shm/torch_{os.getpid()}_kvdtest", "w"))
KEEP.extend(open("/dev/null") for _ in range(40))
"""


def run(tmp_path: Path, body: str) -> tuple[int, str]:
    """(exit status, output) of a run of one test with that body."""
    (tmp_path / "run").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(
        "import os, socket, subprocess, threading\nfrom pathlib import Path\n"
        "KEEP, EVENT, RUN = [], threading.Event(), Path(__file__).parent / 'run'\n"
        f"def test_it():\n{textwrap.indent(body, '    ')}\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "KVDTEST_SETTLE_S": "0.2",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_what_is_left_behind_fails_the_run(tmp_path: Path) -> None:
    status, output = run(tmp_path, LEFT)
    for path in Path("/dev/shm").glob("torch_*_kvdtest"):
        path.unlink()
    assert status == 1, output
    for says in (
        "sleep 300",
        "sleep 301",
        "thread: stray (daemon)",
        "listening port of the test process: ",
        f"bound socket: {tmp_path / 'run' / 'kvd.sock'}",
        "/dev/shm/torch_",
        "more open files after this test than before it",
    ):
        assert says in output, output
    # The processes among it are ended.
    for line in output.splitlines():
        if line.startswith("process: pid "):
            pid = int(line.split()[2])
            assert not (psutil.pid_exists(pid) and runs(psutil.Process(pid)))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("subprocess.run(['setsid', 'sh', '-c', 'sleep 300 >/dev/null 2>&1 &'])", "process: pid"),
        ("KEEP.extend(open('/dev/null') for _ in range(40))", "40 more open files"),
    ],
)
def test_one_thing_is_enough(tmp_path: Path, body: str, says: str) -> None:
    status, output = run(tmp_path, body)
    assert status == 1, output
    assert says in output


def test_a_clean_run_passes(tmp_path: Path) -> None:
    status, output = run(
        tmp_path,
        "subprocess.run(['true'])\nKEEP.append(open('/dev/null'))",
    )
    assert status == 0, output
    assert "1 passed" in output
    assert "process:" not in output
