"""The environment that the daemon is executed with."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvd.memory import tunables
from kvd.memory.tunables import TUNABLES, VARIABLE, reexec_env

BOTH = ":".join(f"{name}={value:#x}" for name, value in TUNABLES.items())


@pytest.fixture(autouse=True)
def on_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(tunables, "_glibc", lambda: True)


def test_both_settings_are_added_once() -> None:
    env = reexec_env({"A": "b"})
    assert env == {"A": "b", VARIABLE: BOTH}
    assert reexec_env(env) is None


def test_what_the_operator_chose_stays() -> None:
    chosen = "glibc.malloc.arena_max=1:glibc.cpu.x86_non_temporal_threshold=0x100000"
    env = reexec_env({VARIABLE: chosen})
    assert env is not None
    assert env[VARIABLE] == f"{chosen}:glibc.cpu.x86_rep_movsb_threshold=0x40000000"
    assert reexec_env(env) is None


def test_nothing_is_changed_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunables, "_glibc", lambda: False)
    assert reexec_env({}) is None
    monkeypatch.setattr(tunables, "_glibc", lambda: True)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert reexec_env({}) is None


def test_programs_start_with_it() -> None:
    env = reexec_env(dict(os.environ))
    done = subprocess.run(
        [sys.executable, "-c", "print('up')"],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("up\n", "")
