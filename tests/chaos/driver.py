"""The fault suite: `python -m tests.chaos.driver --seconds 60 --seed 7 --transports shm,tcp`.

Runs transfers and faults at random for so long, and until enough of both has happened. Prints the
seed, what happened, and every oracle violation; ends with status 1 if there was one, or if too
little happened for the run to mean anything.
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.run import Run
from tests.chaos.site import Site

WARM_UP = 0.3
"""Part of the time after which the steady daemons' first sample is taken."""
UP_S = 60.0


@dataclass
class Least:
    """What must have happened, over all sites."""

    transfers: int
    faults: int
    hits: int

    def reached(self, totals: Counter[str]) -> bool:
        return (
            totals["transfers"] >= self.transfers
            and totals["process_faults"] >= self.faults
            and totals["transfers_hit"] >= self.hits
        )


def totals_of(runs: list[Run]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for run in runs:
        totals.update(run.counts)
    return totals


def drive(runs: list[Run], seconds: float, at_most_s: float, least: Least) -> float:
    """Until the time is over and enough has happened; returns how long it took."""
    began = time.monotonic()
    for run in runs:
        wait_up(run)
    warm = False
    started = time.monotonic()
    while True:
        for run in runs:
            run.step(0.01)
        passed = time.monotonic() - started
        if not warm and passed > WARM_UP * seconds:
            warm = True
            for run in runs:
                run.quiet()
        if any(len(run.violations) > 20 for run in runs):
            break
        if warm and passed > seconds and least.reached(totals_of(runs)):
            break
        if passed > at_most_s:
            break
    for run in runs:
        run.quiet()
        run.check_flat()
        run.check_loops()
    return time.monotonic() - began


def wait_up(run: Run) -> None:
    deadline = time.monotonic() + UP_S
    run.requests = run.faults = False
    while not all(engine.up for engine in run.site.engines.values()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"engines are not up: {run.site.logs()}")
        run.step(0.05)
    run.requests = run.faults = True


def summary(seed: int, runs: list[Run], took: float, least: Least) -> dict[str, Any]:
    totals = totals_of(runs)
    violations = [f"{run.site.transport}: {what}" for run in runs for what in run.violations]
    short = [] if least.reached(totals) else [f"too little happened; wanted {least}"]
    wanted = ("told ok", "over_1_mib", "streamed", "taken_back")
    short += [f"nothing was counted as {name!r}" for name in wanted if not totals[name]]
    if 5 * totals["over_1_mib"] < totals["transfers"]:
        short.append("less than one transfer in five was over 1 MiB")
    return {
        "seed": seed,
        "seconds": round(took, 1),
        "counts": {run.site.transport: dict(sorted(run.counts.items())) for run in runs},
        "transfers": totals["transfers"],
        "over_1_mib": totals["over_1_mib"],
        "bytes": totals["bytes"],
        "process_faults": totals["process_faults"],
        "transfers_hit": totals["transfers_hit"],
        "samples": {run.site.transport: run.samples for run in runs},
        "violations": violations,
        "short": short,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--at-most", type=float, help="gives up after this (twice the seconds)")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--transports", default="shm,tcp")
    parser.add_argument("--transfers", type=int, default=100, help="least number")
    parser.add_argument("--faults", type=int, default=5, help="least number, of processes")
    parser.add_argument("--hits", type=int, default=5, help="least number of transfers hit")
    parser.add_argument(
        "--namespaces", action="store_true", help="partitions between network namespaces (root)"
    )
    parser.add_argument("--logs", action="store_true", help="shows logs after a failure")
    args = parser.parse_args()
    seed = secrets.randbelow(2**31) if args.seed is None else args.seed
    least = Least(args.transfers, args.faults, args.hits)
    print(f"seed {seed}", flush=True)
    # So that whoever is ended ends what it started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="kvdc-", dir="/tmp") as folder:
        try:
            for index, transport in enumerate(args.transports.split(",")):
                place = Path(folder, transport)
                place.mkdir()
                site = Site(place, transport, 1 + 4 * index, namespaces=args.namespaces)
                runs.append(Run(site, seed))
            took = drive(runs, args.seconds, args.at_most or 2 * args.seconds + 60, least)
            result = summary(seed, runs, took, least)
            failed = bool(result["violations"] or result["short"])
            if failed and args.logs:
                for run in runs:
                    print(run.site.logs())
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # closing is bounded, and goes to its end
            for run in runs:
                run.site.close()
    print(json.dumps(result, indent=1))
    if failed:
        print(f"FAILED; `make chaos SEED={seed}` decides the same again")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
