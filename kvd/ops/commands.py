"""`kvd status`, `transfers`, `healthcheck`, `drain` and `release`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from kvd.errors import ConfigError, KvdError
from kvd.ops.api import Target, Unanswered, quoted, targets

WATCH_S = 1.0
ANSWER_S = 300.0
DRAIN_WAIT_S = 5.0
"""One request's part of the waiting; the daemon cuts it at ten seconds."""

Adder = Callable[[str, str, Callable[[argparse.Namespace], int]], argparse.ArgumentParser]


def add_to(add: Adder) -> None:
    """Adds the commands; `add` takes name, help text and what to run."""
    status = add("status", "what daemons do now", _status)
    _where(status, several=True)
    status.add_argument("--json", action="store_true", help="as JSON")
    status.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")
    status.add_argument(
        "--interval", type=float, default=WATCH_S, metavar="SECONDS", help="between looks"
    )

    transfers = add("transfers", "the last transfers, with the times of their stages", _transfers)
    _where(transfers)
    transfers.add_argument("--last", type=int, default=20, metavar="N", help="how many")
    transfers.add_argument("--json", action="store_true", help="as JSON")

    health = add("healthcheck", "exit status 0 when the daemon is well, else 1", _healthcheck)
    _where(health)
    health.add_argument("--ready", action="store_true", help="also that it takes work")
    health.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="for it all")

    drain = add("drain", "take nothing new; return when nothing is in flight", _drain)
    _where(drain)
    drain.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="for it all")

    release = add("release", "end the offers of a transfer, and free their blocks", _release)
    _where(release)
    release.add_argument("transfer_id", metavar="TRANSFER")
    release.add_argument("--engine", metavar="ID", help="only this engine's")
    release.add_argument("--force", action="store_true", help="even while a peer reads from it")


def _where(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    group = parser.add_argument_group("which daemon (default: that of KVD_SOCKET)")
    group.add_argument("--socket", action="append", default=[], metavar="PATH", help="its socket")
    group.add_argument(
        "--at", action="append", default=[], metavar="HOST:PORT", help="its metrics address"
    )
    group.add_argument(
        "--discovery", action="append", default=[], metavar="FILE", help="its discovery file"
    )
    if several:
        group.add_argument("--all", action="store_true", help="all of this host's run folder")
    group.add_argument("--token-file", default="", metavar="FILE", help="for --at: its token")


def _targets(args: argparse.Namespace) -> list[Target]:
    return targets(
        sockets=args.socket,
        at=args.at,
        discovery=args.discovery,
        every=getattr(args, "all", False),
        token_file=args.token_file,
    )


def _one(args: argparse.Namespace) -> Target:
    found = _targets(args)
    if len(found) > 1:
        names = ", ".join(map(str, found[:8]))
        raise ConfigError(f"several daemons are here ({names}); name one with --socket")
    return found[0]


def doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `kvd doctor`; those of the settings are added beside them."""
    parser.epilog = "Exit status: 0 all well, 1 warnings, 2 errors."
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--quiet", action="store_true", help="only what is wrong")
    parser.add_argument(
        "--peer", default="", metavar="HOST:PORT", help="also try this daemon, with a transfer"
    )
    parser.add_argument(
        "--answer",
        nargs="?",
        type=float,
        const=ANSWER_S,
        metavar="SECONDS",
        help="offer blocks for another host's --peer, through the daemon here",
    )


# --- status ---------------------------------------------------------------------------------


def _ask(target: Target) -> dict[str, Any]:
    try:
        status, body = target.get("/v1/status")
    except Unanswered as e:
        return {"error": e.detail}
    if status != 200 or "daemon" not in body:
        return {"error": f"{target} answers, but not as kvd does ({status})"}
    return body


def _status(args: argparse.Namespace) -> int:
    found = _targets(args)
    if not 0.1 <= args.interval <= 3600:
        raise ConfigError("--interval must be a number of seconds from 0.1 to 3600")
    if args.json:
        if args.watch:
            while True:
                print(json.dumps({str(t): _ask(t) for t in found}), flush=True)
                time.sleep(args.interval)
        answers = {str(t): _ask(t) for t in found}
        print(json.dumps(answers, indent=2))
        return _verdict(answers)
    from rich.console import Console

    console = Console(highlight=False)
    if args.watch:
        return _watch(found, args.interval)
    answers = {str(t): _ask(t) for t in found}
    console.print(_view(answers))
    return _verdict(answers)


def _verdict(answers: dict[str, dict[str, Any]]) -> int:
    return int(any("error" in answer for answer in answers.values()))


def _view(answers: dict[str, dict[str, Any]]) -> Any:
    from rich.console import Group
    from rich.text import Text

    from kvd.ops.tables import daemon_view

    parts: list[Any] = []
    for where, answer in answers.items():
        if parts:
            parts.append(Text())
        if "error" in answer:
            parts.append(Text(answer["error"], style="red"))
        else:
            parts.append(daemon_view(where, answer))
    return Group(*parts)


def _watch(found: list[Target], interval: float) -> int:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False)

    def look() -> Any:
        stamp = Text(f"{time.strftime('%H:%M:%S')}  every {interval:g} s, Ctrl-C ends", "dim")
        return Group(stamp, _view({str(t): _ask(t) for t in found}))

    if not console.is_terminal:
        # Into a file or a pipe: one view after the other.
        while True:
            console.print(look())
            sys.stdout.flush()
            time.sleep(interval)
    with Live(look(), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            live.update(look(), refresh=True)


# --- the others -----------------------------------------------------------------------------


def _transfers(args: argparse.Namespace) -> int:
    if not 1 <= args.last <= 512:
        raise ConfigError("--last must be a whole number from 1 to 512")
    _, body = _one(args).get(f"/v1/transfers?last={args.last}")
    rows = body.get("transfers", [])
    if args.json:
        print(json.dumps(rows, indent=2))
        return 0
    from rich.console import Console

    from kvd.ops.tables import transfers_view

    if rows:
        Console(highlight=False).print(transfers_view(rows))
    else:
        print("no transfer has ended yet")
    return 0


def _healthcheck(args: argparse.Namespace) -> int:
    try:
        status, body = _one(args).get("/readyz" if args.ready else "/healthz", args.timeout)
    except KvdError as e:
        print(f"kvd: {e.detail}", file=sys.stderr)
        return 1
    if status == 200:
        return 0
    print(f"kvd: {json.dumps(body.get('reasons', body))}", file=sys.stderr)
    return 1


def _drain(args: argparse.Namespace) -> int:
    target, give_up = _one(args), time.monotonic() + args.timeout
    while True:
        left = max(0.0, give_up - time.monotonic())
        wait_s = min(left, DRAIN_WAIT_S)
        status, body = target.post(f"/v1/drain?wait_s={wait_s:.1f}", wait_s + 5.0)
        if status == 200:
            print("drained: nothing is in flight, nothing new is taken")
            return 0
        if status != 202:
            raise KvdError(f"{target}: {body.get('error', status)}")
        if left <= 0:
            rest = ", ".join(f"{n} {name}" for name, n in body["in_flight"].items() if n)
            print(f"kvd: still in flight after {args.timeout:g} s: {rest}", file=sys.stderr)
            return 1


def _release(args: argparse.Namespace) -> int:
    query = f"?force={str(args.force).lower()}"
    if args.engine:
        query += f"&engine_id={quoted(args.engine)}"
    target = _one(args)
    status, body = target.post(f"/v1/transfers/{quoted(args.transfer_id)}/release{query}")
    if status != 200:
        raise KvdError(f"{target}: {body.get('error', status)}")
    print(f"released at {', '.join(body['released'])}")
    return 0
