"""The example of the README, run as it is written, against real daemons."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from connector_shim.spawn import SpawnedDaemon, spawn_daemon
from tests.conftest import wait_for

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "move_bytes.py"
START_S = 120.0


def listens(daemon: SpawnedDaemon) -> bool:
    assert daemon.exit_code() is None
    return os.path.exists(daemon.socket_path)


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def sockets(tmp_run_dir: Path, transport: str) -> Iterator[list[str]]:
    """Of two daemons that use this transport and no other."""
    paths = [str(tmp_run_dir / name) for name in ("a.sock", "b.sock")]
    with ExitStack() as stack:
        daemons: list[SpawnedDaemon] = []
        for path in paths:
            daemons.append(spawn_daemon(path, settings={"transport": transport}))
            stack.callback(daemons[-1].stop)
        for daemon in daemons:
            wait_for(partial(listens, daemon), START_S, what="the daemon listens")
        yield paths
        assert [daemon.stop(grace_s=30.0) for daemon in daemons] == [0, 0]


def test_the_example_moves_bytes(sockets: list[str], transport: str) -> None:
    result = subprocess.run(
        [sys.executable, str(EXAMPLE), *sockets],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"ok: {4 * 3 * 4096} bytes by {transport}\n"


def test_the_example_is_as_short_as_promised() -> None:
    code = EXAMPLE.read_text(encoding="utf-8").split('"""')[2]
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 32
