"""Arguments, signals and output of `kvd demo`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from kvd import config
from kvd.demo.client import DemoError
from kvd.demo.daemons import OWN_SETTINGS
from kvd.demo.engines import MODEL, Policy
from kvd.demo.narrator import Narrator
from kvd.demo.report import as_json, passed, show
from kvd.demo.results import Results, checks
from kvd.demo.run import measure
from kvd.demo.stack import Mode, Stack
from kvd.errors import ConfigError

EXIT_FAILED = 1
EXIT_CANNOT = 3
EXIT_CONFIG = 78
EXIT_INTERRUPTED = 130
WIDTH = 100

INTRO = """[bold]kvd demo[/]: one vLLM engine reads prompts (prefill), another one writes the \
answers (decode).
The KV cache moves between them through two kvd daemons. Every answer is compared, token by
token, with that of an engine which did everything alone."""


@dataclass(frozen=True, slots=True)
class Options:
    """`config` are settings for both daemons, by name."""

    config: dict[str, str] = field(default_factory=dict)
    policy: Policy = "fail"
    mode: Mode = "pull"
    json: bool = False
    keep: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything that `kvd demo` takes."""
    parser.add_argument(
        "--config",
        metavar="K=V",
        type=_setting,
        action="append",
        default=[],
        help="a setting for both daemons, transport=tcp for one; may be repeated",
    )
    parser.add_argument(
        "--keep", action="store_true", help="leave everything up afterwards, until Ctrl-C"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument(
        "--mode",
        choices=("pull", "stream", "mooncake"),
        default="pull",
        help="pull (default): decode is asked after prefill, by vllm-router; stream: both are "
        "asked at once, by vLLM's Mooncake proxy, and KV moves while prefill computes; mooncake: "
        "pull, by vllm-router with --kv-connector mooncake",
    )
    parser.add_argument(
        "--policy",
        choices=("fail", "recompute"),
        default="fail",
        help="vLLM's kv_load_failure_policy: with fail (default) a lost transfer cannot hide",
    )


def execute(args: argparse.Namespace) -> int:
    """Run the demo; returns the exit status."""
    err = Console(stderr=True, highlight=False)
    options = Options(dict(args.config), args.policy, args.mode, args.json, args.keep)
    try:
        for key in options.config:
            if key in OWN_SETTINGS:
                raise ConfigError(f"--config {key}: the demo chooses this itself")
        config.load(options.config)
    except ConfigError as error:
        err.print(f"kvd demo: {error.detail}", style="red", markup=False)
        return EXIT_CONFIG
    # What is told goes to stderr where the result is for a machine.
    console = Console(stderr=options.json, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    try:
        return asyncio.run(_with_signals(options, console))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    """`kvd demo` with these arguments."""
    parser = argparse.ArgumentParser(
        prog="kvd demo", description="Two real vLLM engines hand over KV through two daemons."
    )
    add_arguments(parser)
    return execute(parser.parse_args(argv))


async def _with_signals(options: Options, console: Console) -> int:
    """Ctrl-C (and SIGTERM, and a closed terminal) end the demo; a second one hurries."""
    stack = Stack(Narrator(console), options.config, options.policy, options.mode)
    task = asyncio.create_task(_demo(options, console, stack))
    asked = False

    def stop() -> None:
        nonlocal asked
        if asked:
            stack.children.hurry = True
            return
        asked = True
        task.cancel()
        with contextlib.suppress(OSError):  # the terminal may be gone
            console.print("\nStopping everything ...")

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop)
    try:
        return await task
    except asyncio.CancelledError:
        return EXIT_INTERRUPTED


async def _demo(options: Options, console: Console, stack: Stack) -> int:
    start = time.monotonic()
    console.print(INTRO)
    console.print()
    try:
        async with stack:
            try:
                return await _inside(options, console, stack, start)
            except (DemoError, OSError) as error:
                console.print(f"\nThe demo cannot go on: {error}", style="red", markup=False)
                if any(stack.folder.glob("*.log")):
                    stack.keep_folder = True
                    console.print(f"Logs are kept in {stack.folder}", markup=False)
                if options.json:
                    print(json.dumps({"ok": False, "error": str(error)}), flush=True)
                return EXIT_CANNOT
    except OSError as error:
        console.print(f"The demo cannot start: {error}", style="red", markup=False)
        return EXIT_CANNOT


async def _inside(options: Options, console: Console, stack: Stack, start: float) -> int:
    console.print("Starting two engines on this machine's CPU; that takes most of a minute.")
    await stack.start()
    results = await measure(stack)
    if options.keep:
        await stack.replace_decode_daemon(damaging=False)
    seconds = time.monotonic() - start
    ok = passed(checks(results))
    extra = {"keep": _handles(stack)} if options.keep else {}
    if not ok:
        stack.keep_folder = True
        extra["logs"] = {"folder": str(stack.folder)}
    _print(options, console, results, seconds, extra)
    if not ok:
        console.print(f"Logs are kept in {stack.folder}", markup=False)
    if options.keep:
        # Ctrl-C is how this is meant to end, so it does not change what was found.
        with contextlib.suppress(asyncio.CancelledError):
            await _keep(console, stack)
    return 0 if ok else EXIT_FAILED


def _print(
    options: Options, console: Console, results: Results, seconds: float, extra: dict[str, Any]
) -> None:
    if options.json:
        print(as_json(results, seconds, extra), flush=True)
    else:
        console.print()
        show(console, results, seconds)


def _handles(stack: Stack) -> dict[str, Any]:
    """What somebody needs to play with a stack that is kept up."""
    return {
        "url": stack.router_url,
        "model": MODEL,
        "folder": str(stack.folder),
        "curl": _curl(stack),
        "metrics": {
            **{f"{name} daemon": d.metrics_url for name, d in stack.daemons.items()},
            **{f"{name} engine": e.metrics_url for name, e in stack.engines.items()},
            **({"router": stack.router_metrics_url} if stack.router_metrics_url else {}),
        },
        "pids": {
            **{f"{name} daemon": d.child.pid for name, d in stack.daemons.items()},
            **{f"{name} engine": e.child.pid for name, e in stack.engines.items()},
            "router": stack.router.pid if stack.router else None,
        },
        "engines": {name: e.url for name, e in stack.engines.items()},
        "daemon_argv": {name: d.restart_argv for name, d in stack.daemons.items()},
        "logs": {c.name: str(c.log) for c in stack.children.all()},
    }


def _curl(stack: Stack) -> str:
    body = (
        f'{{"model": "{MODEL}", "prompt": "Once upon a time there was a cache, and it moved.", '
        '"max_tokens": 24, "temperature": 0}'
    )
    return (
        f"curl -s {stack.router_url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
    )


async def _keep(console: Console, stack: Stack) -> None:
    """Stay until the user has seen enough, and say so when a process ends meanwhile."""
    told: set[int] = set()

    def line(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    line("\nEverything stays up until Ctrl-C. Ask it something:\n")
    line(f"  {_curl(stack)}\n")
    line("Metrics:")
    for name, url in _handles(stack)["metrics"].items():
        line(f"  {name:<15} {url}")
    line("Processes (end a daemon with kill -9, and start it again with its line):")
    for name, pid in _handles(stack)["pids"].items():
        line(f"  {name:<15} {pid}")
    for daemon in stack.daemons.values():
        line(f"  {shlex.join(daemon.restart_argv)}")
    line(f"Logs: {stack.folder}/*.log")
    while True:
        await asyncio.sleep(0.5)
        for child in stack.children.ended():
            if child.pid not in told:
                told.add(child.pid)
                line(f"The {child.name} (pid {child.pid}) has ended: {child.exit_code()}.")


def _setting(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not K=V")
    return key.replace("-", "_"), value


if __name__ == "__main__":
    sys.exit(main())
