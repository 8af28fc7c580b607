"""The units, as systemd itself judges them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvd.addresses import MAX_SOCKET_PATH
from kvd.config import describe
from kvd.lifecycle import EX_CONFIG

ROOT = Path(__file__).parents[3]
UNITS = ROOT / "systemd"
TIMEOUT_S = 120

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with our units, and what they refer to."""
    here = tmp_path / "root"
    shutil.copytree(UNITS, here / "etc/systemd/system")
    binary = here / "opt/kvd/bin/kvd"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    system = next(
        p for p in (Path("/usr/lib/systemd/system"), Path("/lib/systemd/system")) if p.is_dir()
    )
    for name in ("sysinit.target", "basic.target", "shutdown.target", "sockets.target",
                 "network-online.target", "multi-user.target", "paths.target",
                 "timers.target", "slices.target", "system.slice", "-.slice",
                 "network.target"):  # fmt: skip
        if (system / name).exists():
            there = here / "usr/lib/systemd/system" / name
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(system / name, there)
    return here


def analyze(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", *map(str, args)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
        check=False,
    )


@needs_systemd
@pytest.mark.parametrize("unit", ["kvd@0.service", "kvd@0.socket", "kvd.target"])
def test_verify_has_nothing_to_say(root: Path, unit: str) -> None:
    ended = analyze("verify", "--man=no", f"--root={root}", unit)
    ours = [line for line in ended.stderr.splitlines() if "kvd" in line]
    assert (ended.returncode, ours) == (0, []), ended.stderr


@needs_systemd
def test_verify_would_have_something_to_say(root: Path) -> None:
    unit = root / "etc/systemd/system/kvd@.service"
    unit.write_text(unit.read_text().replace("[Service]", "[Service]\nNoSuchSetting=1"))
    ended = analyze("verify", "--man=no", f"--root={root}", "kvd@0.service")
    assert "NoSuchSetting" in ended.stderr


@needs_systemd
def test_the_service_is_little_exposed(root: Path) -> None:
    ended = analyze(
        "security", "--offline=true", "--threshold=25", f"--root={root}", "kvd@0.service"
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    score = re.search(r"Overall exposure level for kvd@0\.service: ([\d.]+)", ended.stdout)
    assert score is not None
    assert float(score[1]) <= 2.5
    stricter = analyze(
        "security", "--offline=true", "--threshold=1", f"--root={root}", "kvd@0.service"
    )
    assert stricter.returncode != 0, "the threshold is not looked at"


def lines(name: str) -> list[str]:
    return (UNITS / name).read_text().splitlines()


def test_a_configuration_that_is_wrong_is_not_tried_again() -> None:
    assert f"RestartPreventExitStatus={EX_CONFIG}" in lines("kvd@.service")


def test_variables_of_units_and_examples_are_settings() -> None:
    known = {doc.env for doc in describe()}
    for path in UNITS.iterdir():
        assert set(re.findall(r"\b(KVD_[A-Z_]+)=", path.read_text())) <= known, path.name


def test_socket_and_service_agree_on_the_path_and_it_fits() -> None:
    [listened] = [
        v for line in lines("kvd@.socket") for k, _, v in [line.partition("=")]
        if k == "ListenSequentialPacket"
    ]  # fmt: skip
    assert f"KVD_SOCKET={listened}" in (UNITS / "kvd@.service").read_text()
    uuid = "GPU-3b8b4e2c-0a3a-4e2e-9d3f-5c3f6b7f8a90"
    assert len(listened.replace("%i", uuid)) <= MAX_SOCKET_PATH


def test_the_drain_fits_into_the_time_to_stop() -> None:
    text = (UNITS / "kvd@.service").read_text()
    stop = int(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0])
    drain = next(float(doc.default) for doc in describe() if doc.name == "drain_timeout_s")
    assert stop > drain + 5
