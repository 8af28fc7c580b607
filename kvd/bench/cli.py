"""Arguments and output of `kvd bench`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from kvd import config
from kvd.bench.limit import LimitFailed
from kvd.bench.presets import HIDDEN, PRESETS
from kvd.bench.processes import ProcessFailed
from kvd.bench.report import Result, print_table
from kvd.bench.run import BenchFailed, Options, run
from kvd.errors import ConfigError

EXIT_FAILED = 1
EXIT_CONFIG = 78
EXIT_INTERRUPTED = 130
MAX_CONCURRENCY = 64


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _concurrency(text: str) -> int:
    value = _positive(text)
    if value > MAX_CONCURRENCY:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_CONCURRENCY}")
    return value


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not K=V")
    return key.replace("-", "_"), value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything that `kvd bench` takes."""
    shown = [name for name in PRESETS if name not in HIDDEN]
    parser.add_argument(
        "--transport", choices=("shm", "tcp"), default="shm", help="how KV moves (default shm)"
    )
    parser.add_argument(
        "--preset",
        choices=tuple(PRESETS),
        metavar="{" + ",".join(shown) + "}",
        default=shown[0],
        help="; ".join(f"{name}: {PRESETS[name].what}" for name in shown),
    )
    parser.add_argument(
        "--requests",
        type=_positive,
        metavar="N",
        help="measured requests (default 20, and 200 of small ones)",
    )
    parser.add_argument(
        "--concurrency",
        type=_concurrency,
        metavar="N",
        default=1,
        help="requests at once (default 1); each needs memory of its own on both sides",
    )
    parser.add_argument(
        "--config",
        type=_setting,
        metavar="K=V",
        action="append",
        default=[],
        help="a setting of both daemons, such as shm_threads=1 or verify=crc",
    )
    parser.add_argument("--seed", type=int, help="makes the random block lists repeatable")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    # Spoils the destination before it is checked, to prove that the check works.
    parser.add_argument("--damage", choices=("flip", "swap", "stray"), help=argparse.SUPPRESS)


def options(args: argparse.Namespace) -> Options:
    """What these arguments ask for. Raises ConfigError."""
    overrides = dict(args.config)
    overrides.pop("transport", None)
    preset = PRESETS[args.preset]
    return Options(
        transport=args.transport,
        preset=preset,
        requests=args.requests or preset.requests,
        concurrency=args.concurrency,
        settings=config.load({"transport": args.transport, **overrides}),
        overrides=overrides,
        damage=args.damage,
        seed=args.seed,
    )


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _measure(wanted: Options, err: Console) -> Result:
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
        # A thread that draws would take its time from what is measured.
        auto_refresh=False,
        disable=not err.is_terminal,
    )
    with progress:
        task = progress.add_task("starting two daemons and two clients", total=None)
        progress.refresh()

        def on_round(done: int, rounds: int, gbs: float) -> None:
            progress.update(task, completed=done, total=rounds, description=f"{gbs:.2f} GB/s")
            progress.refresh()

        return run(wanted, on_round)


def _complain(err: Console, detail: str) -> None:
    text = f"kvd bench: {detail}"
    err.print(text, style="red", markup=False, highlight=False, soft_wrap=True)


def execute(args: argparse.Namespace) -> int:
    """Run the bench; returns the exit status."""
    err = Console(stderr=True)
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        result = _measure(options(args), err)
    except ConfigError as error:
        _complain(err, error.detail)
        return EXIT_CONFIG
    except (BenchFailed, LimitFailed, ProcessFailed, OSError) as error:
        if args.json:
            print(json.dumps({"verified": False, "error": str(error)}))
        _complain(err, str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        _complain(err, "interrupted")
        return EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    if args.json:
        print(result.as_json())
    else:
        print_table(result, Console())
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """`kvd bench` with these arguments."""
    parser = argparse.ArgumentParser(
        prog="kvd bench", description="Measure kvd against the machine's own speed."
    )
    add_arguments(parser)
    return execute(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
