"""Fixtures that every part of the suite shares. The leak check is in `tests/plugins/leaks.py`."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How fast a machine is says nothing about the code.
settings.register_profile(
    "kvd", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("kvd")

pytest.register_assert_rewrite("tests.plugins.leaks", "tests.plugins.daemons")

from tests.plugins import leaks  # noqa: E402
from tests.plugins.waiting import wait_for, wait_for_async  # noqa: E402

__all__ = ["wait_for", "wait_for_async"]

pytest_plugins = ["tests.plugins.leaks", "tests.plugins.daemons"]

RUN_ROOT = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    # pytest's own tmp_path is too long for a Unix socket, whose path ends at 107 bytes.
    root = Path(tempfile.mkdtemp(prefix="kvdt-", dir="/tmp"))
    config.stash[RUN_ROOT] = root
    leaks.start(config, root)
    # A shell that starts the suite in the background has it, and all that it starts, ignore Ctrl-C.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A user's own settings must not reach the daemons under test.
    for name in [n for n in os.environ if n.startswith("KVD_") and n[4:8] != "TEST"]:
        del os.environ[name]


def pytest_unconfigure(config: pytest.Config) -> None:
    root = config.stash.get(RUN_ROOT, None)
    if root is not None:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def tmp_run_dir(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A private runtime folder (mode 0700) with a path short enough for sockets in it."""
    path = Path(tempfile.mkdtemp(prefix="", dir=request.config.stash[RUN_ROOT]))
    yield path
    shutil.rmtree(path, ignore_errors=True)
