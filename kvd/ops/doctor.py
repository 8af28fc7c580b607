"""`kvd doctor`: looks at everything that a daemon needs, and says what to change."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from kvd.addresses import CONTROL_SUFFIX, parse_host_port
from kvd.config import load
from kvd.errors import ConfigError, KvdError
from kvd.ops import checks_daemon, checks_gpu, checks_host, checks_peer
from kvd.ops.api import Target, Unanswered
from kvd.ops.findings import LEVELS, Finding, Surroundings, error, worst
from kvd.protocol.types import PeerAddr

Check = Callable[[Surroundings], list[Finding]]

CHECKS: tuple[Check, ...] = (
    checks_host.check_socket_path,
    checks_host.check_user,
    checks_daemon.check_daemon,
    checks_daemon.check_version,
    checks_daemon.check_pid_namespace,
    checks_host.check_shm,
    checks_daemon.check_leftovers,
    checks_host.check_limits,
    checks_host.check_cpus,
    checks_host.check_clock,
    checks_host.check_ports,
    checks_host.check_advertise,
    checks_daemon.check_allow_peers,
    checks_daemon.check_keys,
    checks_daemon.check_token,
    checks_daemon.check_peers,
    checks_host.check_congestion,
    checks_host.check_libraries,
    checks_host.check_tls,
    checks_gpu.check_gpu,
    checks_gpu.check_nccl,
    checks_host.check_vllm,
)
PEER_CHECKS: tuple[Check, ...] = (
    checks_peer.check_route,
    checks_peer.check_hello,
    checks_peer.check_transfer,
)


def examine(at: Surroundings) -> list[Finding]:
    """Runs every check; one that breaks is itself a finding."""
    found: list[Finding] = []
    for check in CHECKS + (PEER_CHECKS if at.peer is not None else ()):
        try:
            found += check(at)
        except Exception as e:
            name = check.__name__.removeprefix("check_")
            found.append(
                error(name, f"the check failed: {e!r}", why="a mistake in kvd", fix="report it")
            )
    return found


def look(overrides: dict[str, object], config: str | None, peer: str = "") -> Surroundings:
    """Reads settings and asks the daemon. Raises ConfigError."""
    settings = load(overrides, config)
    address = None
    if peer:
        try:
            host, port = parse_host_port(peer)
            if not port:
                raise ValueError("has the port 0")
        except ValueError as e:
            raise ConfigError(f"--peer: {peer!r} {e}") from None
        address = PeerAddr(host, port)
    target = Target(path=settings.socket + CONTROL_SUFFIX)
    try:
        code, body = target.get("/v1/status")
        status = body if code == 200 and "daemon" in body else None
        problem = "" if status else f"{target} answers, but not as kvd does"
    except Unanswered as e:
        status, problem = None, e.detail
    return Surroundings(settings, target=target, status=status, problem=problem, peer=address)


def run(args: argparse.Namespace, overrides: dict[str, object]) -> int:
    """Exit status: 0 (all is well), 1 (warnings), 2 (errors), 78 (the settings are wrong)."""
    if args.answer is not None:
        return _answer(args, overrides)
    try:
        at = look(overrides, args.config, args.peer)
    except ConfigError as e:
        if not args.json:
            raise
        fix = "kvd config check shows what is in force; kvd serve --help what there is"
        mistakes = [
            error("config", line, why="the daemon does not start so", fix=fix)
            for line in e.detail.splitlines()
        ]
        _print_json(mistakes)
        return 78
    found = examine(at)
    if args.json:
        _print_json(found)
    else:
        _print(found, quiet=args.quiet)
    return LEVELS.index(worst(found))


def _answer(args: argparse.Namespace, overrides: dict[str, object]) -> int:
    from connector_shim.errors import ClientError

    settings = load(overrides, args.config)
    print(f"offering blocks through {settings.socket} for {args.answer:g} s; Ctrl-C ends it")
    try:
        checks_peer.answer(settings.socket, args.answer)
    except (ClientError, TimeoutError) as e:
        raise KvdError(str(e)) from None
    return 0


def _print_json(found: Sequence[Finding]) -> None:
    level = worst(list(found))
    print(json.dumps({"worst": level, "findings": [asdict(f) for f in found]}, indent=2))


def _print(found: Sequence[Finding], *, quiet: bool) -> None:
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    console = Console(highlight=False)
    styles = {"ok": "green", "warning": "yellow", "error": "bold red"}
    for f in found:
        if quiet and f.level == "ok":
            continue
        head = Text.assemble((f"{f.level:8}", styles[f.level]), (f"{f.check}: ", "bold"), f.what)
        console.print(head)
        for label, text in (("why", f.why), ("fix", f.fix)):
            if text:
                console.print(Padding(Text(f"{label}: {text}"), (0, 0, 0, 8)))
    counts = ", ".join(f"{sum(f.level == level for f in found)} {level}" for level in LEVELS)
    console.print(Text(counts, "dim"))
