"""What only a GPU can show, as a table. Started by run.sh, which says more."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvd.errors import ConfigError
from kvd.memory.cuda.device import open_gpu
from kvd.memory.cuda.driver import CudaError, DeviceInfo, Driver, load_driver
from tests.gpu.engine import FAKES, install_fakes_if_asked
from tests.integration.daemon.harness import ROOT, Daemon, EngineProcess

SKIPPED = 77
MODULE = "tests.cuda.daemon" if os.environ.get(FAKES) else "kvd"
LAYERS, BLOCKS, BLOCK_BYTES = 16, 512, 64 * 1024 if FAKES not in os.environ else 1024
BIG = list(range(0, BLOCKS, 2))
PAIRS = {7: 5, 8: 9, 60: 2, 0: 40}


class NotRun(Exception):
    """A row that this machine cannot show, and why."""


class GpuEngineProcess(EngineProcess):
    module = "tests.gpu.engine"


@dataclass
class Row:
    name: str
    outcome: str
    said: str


class Bench:
    def __init__(self, folder: Path, driver: Driver, devices: list[DeviceInfo]) -> None:
        self.folder = folder
        self.driver = driver
        self.devices = devices
        self.processes: list[Any] = []
        self._number = 0

    def pair(
        self, gpus: tuple[int, int], kind: str, seed: int, **settings: Any
    ) -> tuple[Daemon, Daemon, GpuEngineProcess, GpuEngineProcess, dict[str, Any]]:
        """Two daemons and two engines, registered, and where the producer's daemon is."""
        self._number += 1
        made: list[Any] = []
        for who, gpu in zip("pd", gpus, strict=True):
            name = f"{who}{self._number}"
            daemon = Daemon(name, self.folder, module=MODULE, device=f"cuda:{gpu}", **settings)
            self.processes.append(daemon)
            os.environ["KVD_TEST_ENGINE_ON"] = str(gpu)
            engine = GpuEngineProcess(
                f"e{name}", self.folder, daemon.ready().socket, who, gpu=gpu, kind=kind,
                seed=seed if who == "p" else 0, num_layers=LAYERS, num_blocks=BLOCKS,
                block_bytes=BLOCK_BYTES,
            )  # fmt: skip
            self.processes.append(engine)
            made += [daemon, engine]
        up = made[1].up()
        made[3].up()
        at = {"host": up["host"], "port": up["port"], "engine_id": "p"}
        return made[0], made[2], made[1], made[3], at

    def stop(self) -> None:
        while self.processes:
            self.processes.pop().stop()


def expect(good: bool, what: object) -> None:
    if not good:
        raise AssertionError(str(what))


def moved(bench: Bench, gpus: tuple[int, int], kind: str, transport: str) -> str:
    """Bytes arrive where they should; nothing else changes; and how fast, against one plain copy
    of as many bytes on the device."""
    _, _, producer, consumer, at = bench.pair(gpus, kind, 3, transport=transport)
    producer.ask("offer", transfer_id="t", blocks=list(PAIRS.values()))
    done = consumer.ask("fetch", transfer_id="t", blocks=list(PAIRS), **at)
    expect(done["code"] == "ok" and done["transport"] == transport, done)
    wrong = consumer.ask("wrong", seed=3, pairs=PAIRS)["wrong"]
    expect(wrong == 0, f"{wrong} words are wrong")
    best = 0.0
    for turn in range(3):
        producer.ask("offer", transfer_id=f"big{turn}", blocks=BIG)
        done = consumer.ask("timed_fetch", transfer_id=f"big{turn}", blocks=BIG, **at)
        expect(done["code"] == "ok", done)
        best = max(best, done["nbytes"] / done["seconds"])
    wrong = consumer.ask("wrong", seed=3, pairs={b: b for b in BIG})["wrong"]
    # What the first fetch wrote is still there, where the later ones did not write.
    expect(wrong <= LAYERS * len(PAIRS) * BLOCK_BYTES // 8, f"{wrong} words are wrong")
    plain = consumer.ask("plain_copy", nbytes=done["nbytes"], times=5)["seconds"]
    return f"{best / 1e9:.1f} GB/s; plain copy {done['nbytes'] / plain / 1e9:.1f} GB/s"


def ranks(bench: Bench) -> str:
    """NCCL between two processes: on two GPUs, or on one that both ranks share."""
    two = len(bench.devices) > 1
    nbytes = 256 * 2**20 if not os.environ.get(FAKES) else 2**20
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    if not two:
        env["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.rank", str(rank), str(rank if two else 0),
             str(nbytes), "5"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        first, second = children
        assert first.stdout is not None
        assert second.stdin is not None
        second.stdin.write(first.stdout.readline())
        second.stdin.flush()
        outs = [child.communicate(timeout=120)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    found = [json.loads(out.splitlines()[-1]) for out in outs]
    expect(all(not one["lost"] for one in found), found)
    expect(found[0]["wrong"] == 0, f"{found[0]['wrong']} bytes are wrong")
    where = "two GPUs" if two else "two ranks on one GPU"
    rate = nbytes / found[0]["seconds"] / 1e9
    return f"{rate:.1f} GB/s; up in {found[0]['up_s']:.1f} s; {where}"


def needs_torch() -> None:
    if os.environ.get(FAKES):
        raise NotRun("needs kernels")
    import torch

    if not torch.cuda.is_available():
        raise NotRun("this torch has no CUDA")


def fences(bench: Bench) -> str:
    """Blocks are computed on a busy stream and rewritten while they are fetched: what arrives is
    whole, or the fetch fails."""
    needs_torch()
    _, _, producer, consumer, at = bench.pair((0, 0), "cuda_ipc", 1, transport="cuda_ipc")
    seen = {"whole": 0, "refused": 0, "busy": 0}
    for turn in range(30):
        seed = turn + 10
        busy = producer.ask("fenced_offer", transfer_id=f"t{turn}", blocks=BIG, seed=seed, load=20)
        seen["busy"] += bool(busy["was_busy"])
        consumer.tell("fetch", transfer_id=f"t{turn}", blocks=BIG, **at)
        if turn % 2:
            time.sleep(0.002 * (turn % 7))
            producer.ask("fenced_rewrite", transfer_id=f"t{turn}", load=5)
        done = consumer.answer("fetch")
        if done["code"] == "ok":
            wrong = consumer.ask("wrong", seed=seed, pairs={b: b for b in BIG})["wrong"]
            expect(wrong == 0, f"turn {turn}: {wrong} words are wrong")
            seen["whole"] += 1
        else:
            seen["refused"] += 1
    expect(seen["busy"] > 0 and seen["whole"] > 0, seen)
    return ", ".join(f"{name} {count}" for name, count in seen.items())


def slowdown(bench: Bench) -> str:
    """A matrix-multiply loop alone, and while transfers run."""
    needs_torch()
    _, _, producer, consumer, at = bench.pair((0, 0), "cuda_ipc", 1, transport="cuda_ipc")
    consumer.ask("matmul", seconds=4.0)
    alone = consumer.ask("matmul_rate")["rate"]
    consumer.ask("matmul", seconds=6.0)
    moved_bytes, end = 0, time.monotonic() + 4
    while time.monotonic() < end:
        producer.ask("offer", transfer_id=f"s{moved_bytes}", blocks=BIG)
        done = consumer.ask("fetch", transfer_id=f"s{moved_bytes}", blocks=BIG, **at)
        moved_bytes += done["nbytes"]
    beside = consumer.ask("matmul_rate")["rate"]
    return f"{100 * (1 - beside / alone):.1f} % slower while {moved_bytes / 1e9:.1f} GB moved"


def killed(bench: Bench) -> str:
    """The producer's daemon is killed in mid-transfer: the fetch fails, the other daemon lives."""
    p, d, producer, consumer, at = bench.pair((0, 0), "cuda_ipc", 1, transport="cuda_ipc")
    ends = []
    producer.ask("offer", transfer_id="k", blocks=BIG)
    consumer.tell("fetch", transfer_id="k", blocks=BIG, **at)
    time.sleep(0.003)
    p.kill(signal.SIGKILL)
    p.wait()
    ends.append(consumer.answer("fetch")["code"])
    d.get("/readyz")
    expect(ends[0] in ("ok", "peer_lost", "peer_unreachable"), ends)
    return f"the fetch ended with {ends[0]}; its daemon serves on"


def rows(bench: Bench) -> list[tuple[str, Callable[[], str]]]:
    found: list[tuple[str, Callable[[], str]]] = [
        ("cuda_ipc, one GPU, IPC handles", lambda: moved(bench, (0, 0), "cuda_ipc", "cuda_ipc")),
        ("cuda_ipc, one GPU, VMM", lambda: moved(bench, (0, 0), "vmm", "cuda_ipc")),
        ("tcp, through pinned memory", lambda: moved(bench, (0, 0), "cuda_ipc", "tcp")),
        ("NCCL, two ranks", lambda: ranks(bench)),
    ]
    if len(bench.devices) > 1:
        found += [
            ("nccl, two GPUs, daemons", lambda: moved(bench, (0, 1), "cuda_ipc", "nccl")),
            ("cuda_ipc, two GPUs", lambda: moved(bench, (0, 1), "cuda_ipc", "cuda_ipc")),
        ]
    return [
        *found,
        ("fences, busy stream", lambda: fences(bench)),
        ("matrix multiply beside", lambda: slowdown(bench)),
        ("peer killed in mid-transfer", lambda: killed(bench)),
    ]


def main(wanted: str) -> int:
    """Runs the rows whose name has `wanted` in it."""
    install_fakes_if_asked()
    try:
        driver = load_driver()
        devices = driver.devices()
        if devices:
            open_gpu("cuda:0", driver).close()
    except (CudaError, ConfigError) as exc:
        print(f"skipped: no GPU here ({exc.detail})", file=sys.stderr)
        return SKIPPED
    if not devices:
        print("skipped: no GPU here (the driver finds none)", file=sys.stderr)
        return SKIPPED
    names = ", ".join(f"{one.name} {one.uuid}" for one in devices)
    print(f"{time.strftime('%Y-%m-%d')}  {names}  driver {driver.version}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="kvdg-"))
    bench = Bench(folder, driver, devices)
    found = []
    for name, run in rows(bench):
        if wanted not in name:
            continue
        began = time.monotonic()
        try:
            row = Row(name, "good", run())
        except NotRun as exc:
            row = Row(name, "not run", str(exc))
        except Exception as exc:
            row = Row(name, "BAD", f"{type(exc).__name__}: {exc}")
        finally:
            bench.stop()
        found.append(row)
        took = time.monotonic() - began
        print(f"{row.name:32} {row.outcome:8} {took:5.1f} s  {row.said}", flush=True)
    shutil.rmtree(folder)
    good = sum(row.outcome == "good" for row in found)
    print(f"result: {good} of {len(found)} rows are good")
    return 0 if good == len(found) else 1


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
