"""`kvd bench` itself: it measures what it says, fails on wrong bytes, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvd import config
from kvd.bench import limit, oracle
from kvd.bench.memory import Shape, allocate, map_pools, pool_blocks
from kvd.bench.presets import PRESETS
from kvd.bench.report import Result
from kvd.bench.run import Options, run
from tests.conftest import wait_for
from tests.plugins.processes import runs

TIMEOUT_S = 150.0
SHAPE = Shape(layers=3, blocks=8, piece=4096)

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, limit.COMPILERS)), reason="no C compiler here"
)


def bench(folder: Path, *arguments: str, path: str | None = None) -> tuple[int, Any, str]:
    """Runs `kvd bench --preset smoke --json`; returns its status, its JSON, and its stderr."""
    env = {**os.environ, "TMPDIR": str(folder)}
    if path is not None:
        env["PATH"] = path
    done = subprocess.run(
        [sys.executable, "-m", "kvd", "bench", "--preset", "smoke", "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=env,
        check=False,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


# --- the whole bench ------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(("transport", "concurrency"), [("shm", 1), ("tcp", 3)])
def test_every_number_is_there_and_the_bytes_are_right(
    tmp_run_dir: Path, transport: str, concurrency: int
) -> None:
    code, result, err = bench(
        tmp_run_dir,
        *("--transport", transport, "--requests", "6", "--concurrency", str(concurrency)),
    )
    assert code == 0, err
    assert set(result) == {field.name for field in dataclasses.fields(Result)}
    preset = PRESETS["smoke"]
    assert result["verified"] is True
    assert result["transport"] == transport
    assert (result["requests"], result["concurrency"]) == (6, concurrency)
    assert result["request_bytes"] == preset.nbytes == preset.pieces * preset.piece
    for key in ("gbs", "limit_gbs", "p50_ms", "p99_ms", "cpu_s_per_gb", "limit_cpu_s_per_gb"):
        assert result[key] > 0, key
    assert result["ratio"] == pytest.approx(result["gbs"] / result["limit_gbs"])
    assert result["p50_ms"] <= result["p99_ms"]
    assert result["limit_samples"] == 6 // concurrency + 1
    if transport == "tcp":
        assert result["congestion_control"]
        assert (result["threads"], result["streams"]) == (None, 2)
    else:
        assert result["congestion_control"] is None
        assert (result["threads"], result["streams"]) == (2, None)
        assert "memcpy" in result["limit_methods"]
    assert list(tmp_run_dir.iterdir()) == []


def test_without_a_compiler_the_ratio_is_null(tmp_run_dir: Path) -> None:
    code, result, err = bench(tmp_run_dir, "--config", "shm_threads=1", path=str(tmp_run_dir))
    assert code == 0, err
    assert result["verified"] is True
    assert result["gbs"] > 0
    assert result["limit_gbs"] is None
    assert result["ratio"] is None
    assert result["limit_cpu_s_per_gb"] is None
    assert "no C compiler" in result["limit_note"]
    assert (result["threads"], result["settings"]) == (1, {"shm_threads": "1"})
    assert result["verify"] == "off"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_cost_of_verify_can_be_measured(tmp_run_dir: Path, transport: str) -> None:
    code, result, err = bench(
        tmp_run_dir, "--transport", transport, "--requests", "2", "--config", "verify=crc"
    )
    assert code == 0, err
    assert (result["verified"], result["verify"]) == (True, "crc")


@pytest.mark.parametrize(("transport", "damage"), [("shm", "flip"), ("tcp", "stray")])
def test_a_damaged_destination_fails_the_bench(
    tmp_run_dir: Path, transport: str, damage: str
) -> None:
    code, result, err = bench(tmp_run_dir, "--transport", transport, "--damage", damage)
    assert code == 1, err
    assert result["verified"] is False
    assert "1 words of 8 bytes are wrong" in result["error"]
    assert result["error"] in err
    assert list(tmp_run_dir.iterdir()) == []


def test_settings_that_do_not_exist_are_named(tmp_run_dir: Path) -> None:
    code, result, err = bench(tmp_run_dir, "--config", "shm_thread=1")
    assert code == 78
    assert result is None
    assert "shm-thread" in err
    assert "shm-threads" in err, "what was meant is named"


@pytest.mark.parametrize("children", [1, 5])
def test_an_interrupt_leaves_nothing_behind(tmp_run_dir: Path, children: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvd", "bench", "--preset", "smoke", "--requests", "1000000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_run_dir)},
        start_new_session=True,
    )
    try:
        me = psutil.Process(process.pid)
        started = wait_for(
            lambda: found if len(found := me.children(recursive=True)) >= children else None,
            timeout=30.0,
            what=f"{children} processes of the bench",
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(30.0) == 130
        # A compiler's own children need a moment to be gone, and nobody to wait for them.
        wait_for(lambda: not any(map(runs, started)), timeout=10.0, what="all of them have ended")
        assert list(tmp_run_dir.iterdir()) == []
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@needs_compiler
@pytest.mark.parametrize("last", range(1, 7), ids=lambda last: f"process-{last}")
def test_an_interrupt_while_a_process_starts(
    tmp_run_dir: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """It comes when the process is there, and nobody holds it yet: it ends all the same."""
    started: list[subprocess.Popen[Any]] = []

    class Interrupted(subprocess.Popen[Any]):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)
            if len(started) == last:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_run_dir))
    smoke = Options("shm", PRESETS["smoke"], 1, 1, config.load({}), {})
    with pytest.raises(KeyboardInterrupt):
        run(smoke, lambda done, rounds, gbs: None)
    assert len(started) == last
    assert [each.args for each in started if each.returncode is None] == []
    assert list(tmp_run_dir.iterdir()) == []


# --- its parts ------------------------------------------------------------------------------


@pytest.fixture
def fds() -> Iterator[tuple[list[int], list[int]]]:
    """Memory for source and destination, both of SHAPE."""
    with ExitStack() as stack:
        sides = [allocate(SHAPE) for _ in range(2)]
        for fd in sides[0] + sides[1]:
            stack.callback(os.close, fd)
        yield sides[0], sides[1]


def start_limit(
    folder: Path, transport: str, fds: tuple[list[int], list[int]], congestion: str = ""
) -> limit.Limit:
    return limit.Limit(
        limit.build(folder),
        transport,
        src_fds=fds[0],
        dst_fds=fds[1],
        layers=SHAPE.layers,
        src_blocks=SHAPE.blocks,
        dst_blocks=SHAPE.blocks,
        piece=SHAPE.piece,
        threads=2,
        congestion=congestion,
    )


@needs_compiler
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_limit_moves_the_same_blocks(
    tmp_run_dir: Path, fds: tuple[list[int], list[int]], transport: str
) -> None:
    src, dst = (map_pools(side, SHAPE) for side in fds)
    oracle.fill(src)
    with start_limit(tmp_run_dir, transport, fds) as program:
        program.measure([5, 0, 7], [1, 6, 2])
        assert oracle.wrong_words(dst, {1: 5, 6: 0, 2: 7}) == 0
        program.measure([3], [4])
        assert oracle.wrong_words(dst, {4: 3}) == 0
        summary = program.summary()
    assert summary.samples == 2
    assert summary.gbs == max(summary.by_method.values())
    assert summary.by_method[summary.method] == summary.gbs


@needs_compiler
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_the_limit_checks_its_own_bytes(
    tmp_run_dir: Path, fds: tuple[list[int], list[int]], transport: str
) -> None:
    src = map_pools(fds[0], SHAPE)
    oracle.fill(src)
    src[2][5, -1] += 1
    with start_limit(tmp_run_dir, transport, fds) as program:
        program.measure([4], [0])
        with pytest.raises(limit.LimitFailed, match="1 wrong words"):
            program.measure([5], [0])


@needs_compiler
def test_the_limit_names_a_congestion_control_that_cannot_be_had(
    tmp_run_dir: Path, fds: tuple[list[int], list[int]]
) -> None:
    oracle.fill(map_pools(fds[0], SHAPE))
    with (
        start_limit(tmp_run_dir, "tcp", fds, congestion="nosuch") as program,
        pytest.raises(limit.LimitFailed, match="congestion control nosuch"),
    ):
        program.measure([0], [0])


def test_the_oracle_sees_wrong_misplaced_missing_and_stray_words(
    fds: tuple[list[int], list[int]],
) -> None:
    src, dst = (map_pools(side, SHAPE) for side in fds)
    oracle.fill(src)

    def copied() -> dict[int, int]:
        oracle.wipe(dst)
        for layer in range(SHAPE.layers):
            dst[layer][[2, 3]] = src[layer][[6, 1]]
        return {2: 6, 3: 1}

    words = SHAPE.piece // 8
    assert oracle.wrong_words(dst, copied()) == 0
    origin = copied()
    dst[1][3, 7] += 1
    assert oracle.wrong_words(dst, origin) == 1
    origin = copied()
    dst[0][[2, 3]] = dst[0][[3, 2]]
    assert oracle.wrong_words(dst, origin) == 2 * words
    origin = copied()
    dst[0][2], dst[1][2] = dst[1][2].copy(), dst[0][2].copy()
    assert oracle.wrong_words(dst, origin) == 2 * words
    origin = copied()
    dst[2][2].fill(oracle.WIPED)
    assert oracle.wrong_words(dst, origin) == words
    origin = copied()
    dst[2][0, 0] = 0
    assert oracle.wrong_words(dst, origin) == 1


def test_pools_have_free_blocks_and_end_on_a_page() -> None:
    for preset in PRESETS.values():
        for concurrency in (1, 3):
            wanted = preset.blocks * concurrency
            blocks = pool_blocks(wanted, preset.piece)
            assert blocks > wanted
            assert blocks * preset.piece % os.sysconf("SC_PAGESIZE") == 0
            assert blocks < oracle.MAX_BLOCKS
        assert preset.layers < oracle.MAX_LAYERS
        assert preset.piece < oracle.MAX_PIECE


def test_presets_are_what_they_are_named() -> None:
    sizes = {name: (p.pieces, p.piece, p.nbytes) for name, p in PRESETS.items()}
    assert sizes["llama3-8b-4k"] == (8192, 64 * 1024, 512 * 2**20)
    assert sizes["llama3-8b-128"] == (256, 64 * 1024, 16 * 2**20)
    assert sizes["mla-4k"][1] == 18 * 1024
