"""Fills the settings tree: flags over KVD_* environment over TOML file over defaults.

What is not known is refused by name, with the nearest name that is; what is known but wrong is
refused by name, with where it came from and what is allowed. All mistakes are told at once.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource, TomlConfigSettingsSource

from kvd.addresses import default_socket_path
from kvd.errors import ConfigError
from kvd.settings import Settings

__all__ = ["Loaded", "SettingDoc", "Settings", "describe", "load", "load_with_origins"]

ENV_PREFIX = "KVD_"
CONFIG_ENV = "KVD_CONFIG"
"""Names the configuration file where `--config` is not given."""

NOT_SETTINGS = frozenset({CONFIG_ENV, "KVD_DIE_WITH_PARENT", "KVD_REEXEC"})
"""Variables that other parts of kvd read; they are no settings, and no mistakes."""
TEST_PREFIX = "KVD_TEST_"
"""Variables of the test suite; an engine under test hands them on to a daemon that it starts."""

# Kubernetes tells each pod about a Service that is named "kvd" in variables like these.
_SERVICE_LINK = re.compile(
    r"KVD_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)"
    r"=.*|KVD_(\w+_)?PORT=(tcp|udp|sctp)://.*"
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, and for each one that is not a default where it came from."""

    settings: Settings
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SettingDoc:
    """One setting as the operator sees it."""

    name: str
    flag: str
    env: str
    group: str
    type: str
    unit: str
    default: str
    description: str
    choices: tuple[str, ...] = ()


def load(
    argv_overrides: Mapping[str, object] | None = None,
    config_file: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Settings:
    """The effective settings. Raises ConfigError, which names every mistake, one a line.

    `argv_overrides` are by setting name, as text or typed. `env` is the process's own unless
    given; its KVD_CONFIG names the file unless `config_file` does.
    """
    return load_with_origins(argv_overrides, config_file, env).settings


def load_with_origins(
    argv_overrides: Mapping[str, object] | None = None,
    config_file: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Loaded:
    """As `load`, and says where each value came from."""
    environ = os.environ if env is None else env
    flags = dict(argv_overrides or {})
    path = config_file or environ.get(CONFIG_ENV) or None
    file_values = _read_toml(path) if path else {}

    problems = [_unknown(f"--{_dashes(k)}", k, _flag_names()) for k in flags if k not in _known()]
    problems += _unknown_env(environ)
    problems += [_unknown(f"{k} in {path}", k, _known()) for k in file_values if k not in _known()]

    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for source, label in (
        (file_values, lambda name: f"{name} in {path}"),
        (_from_env(environ), lambda name: ENV_PREFIX + name.upper()),
        (flags, lambda name: f"--{_dashes(name)}"),
    ):
        for name, value in source.items():
            if name in _known():
                values[name] = value
                origins[name] = label(name)
    if not values.get("socket"):
        values["socket"] = default_socket_path(environ)
    try:
        settings = Settings(**values)  # type: ignore[arg-type]
    except ValidationError as e:
        problems += [_explain(error, origins) for error in e.errors(include_url=False)]
    else:
        if not problems:
            return Loaded(settings, origins)
    raise ConfigError("\n".join(problems))


# --- sources --------------------------------------------------------------------------------


def _read_toml(path: str) -> dict[str, Any]:
    # The reader takes a missing file for an empty one; an operator who names a file means it.
    try:
        if not Path(path).is_file():
            raise ConfigError(f"--config: there is no file {path}")
        return dict(TomlConfigSettingsSource(Settings, toml_file=Path(path)).toml_data)
    except OSError as e:
        raise ConfigError(f"--config: cannot read {path}: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"--config: {path} is not TOML: {e}") from None


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    source = EnvSettingsSource(Settings, env_prefix=ENV_PREFIX)
    # An empty KVD_X="" is a value: it switches `metrics` off.
    source.env_vars = {name.lower(): value for name, value in env.items()}
    return source()


def _unknown_env(env: Mapping[str, str]) -> list[str]:
    known = {ENV_PREFIX + name.upper() for name in _known()}
    return [
        _unknown(name, name, known)
        for name in sorted(env)
        if name.startswith(ENV_PREFIX)
        and name not in known
        and name not in NOT_SETTINGS
        and not name.startswith(TEST_PREFIX)
        and not _SERVICE_LINK.fullmatch(f"{name}={env[name]}")
    ]


# --- words for mistakes ---------------------------------------------------------------------


def _known() -> Mapping[str, FieldInfo]:
    return Settings.model_fields


def _flag_names() -> list[str]:
    return [f"--{_dashes(name)}" for name in _known()]


def _dashes(name: str) -> str:
    return name.replace("_", "-")


def nearest(name: str, known: Iterable[str]) -> str:
    """A question in brackets that names the known name most like `name`, or nothing."""
    plain = {k.lower().replace("-", "_").lstrip("_"): k for k in known}
    wanted = name.lower().replace("-", "_").lstrip("_")
    close = difflib.get_close_matches(wanted, plain, n=1, cutoff=0.6)
    return f" (did you mean {plain[close[0]]}?)" if close else ""


def _unknown(shown: str, name: str, known: Iterable[str]) -> str:
    return f"{shown}: unknown setting{nearest(name, known)}"


def _explain(error: Any, origins: Mapping[str, str]) -> str:
    """One line from one of pydantic's errors: where it came from, what is allowed, what it got."""
    context = error.get("ctx", {})
    if not error["loc"]:
        # A check of several settings together; it says by itself which one is at fault.
        name, _, rest = str(context.get("error", error["msg"])).partition(": ")
        return f"{origins.get(name, name)}: {rest}" if name in _known() else str(error["msg"])
    name = str(error["loc"][0])
    shown = origins.get(name, name)
    got = error["input"]
    if isinstance(got, tuple):
        got = ",".join(map(str, got))
    match error["type"]:
        case "value_error":
            return f"{shown}: {got!r} {context['error']}"
        case "literal_error":
            allowed = _choices(name)
            hint = nearest(str(got), allowed)
            return f"{shown}: must be one of {', '.join(allowed)}, got {got!r}{hint}"
        case "string_pattern_mismatch":
            return f"{shown}: must match {context['pattern']}, got {got!r}"
        case "bool_parsing" | "bool_type":
            return f"{shown}: must be true or false, got {got!r}"
        case "int_parsing" | "int_type" | "int_from_float":
            return f"{shown}: must be a whole number{_bounds(name)}, got {got!r}"
        case "float_parsing" | "float_type" | "finite_number":
            return f"{shown}: must be a number{_bounds(name)}, got {got!r}"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            return f"{shown}: must be a number{_bounds(name)}, got {got!r}"
        case _:
            return f"{shown}: {str(error['msg'])[:1].lower()}{str(error['msg'])[1:]}, got {got!r}"


def _choices(name: str) -> tuple[str, ...]:
    annotation = _known()[name].annotation
    if get_origin(annotation) is not Literal:
        return ()
    return tuple(str(a) for a in get_args(annotation))


def _bounds(name: str) -> str:
    low = high = ""
    for bound in _known()[name].metadata:
        if (value := getattr(bound, "ge", None)) is not None:
            low = f" from {value:g}" if isinstance(value, float) else f" from {value}"
        if (value := getattr(bound, "gt", None)) is not None:
            low = f" above {value:g}"
        if (value := getattr(bound, "le", None)) is not None:
            high = f" to {value:g}" if isinstance(value, float) else f" to {value}"
    unit = _extra(_known()[name], "unit")
    return f"{low}{high}{f' ({unit})' if unit else ''}"


# --- what there is --------------------------------------------------------------------------


def _extra(info: FieldInfo, key: str) -> str:
    extra = info.json_schema_extra
    return str(extra.get(key, "")) if isinstance(extra, dict) else ""


def _default_text(info: FieldInfo) -> str:
    if shown := _extra(info, "shown"):
        return shown
    value = info.default
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, float):
        return f"{value:g}"
    return '""' if value == "" else str(value)


def _type_name(annotation: object) -> str:
    names = {bool: "flag", int: "integer", float: "number", str: "text"}
    if get_origin(annotation) is Literal:
        return "text"
    return next((text for kind, text in names.items() if annotation is kind), "list")


def describe() -> list[SettingDoc]:
    """All settings in the order of the tree, for flags, help and documentation."""
    docs = []
    for name, info in _known().items():
        docs.append(
            SettingDoc(
                name=name,
                flag=f"--{_dashes(name)}",
                env=ENV_PREFIX + name.upper(),
                group=_extra(info, "group"),
                type=_type_name(info.annotation),
                unit=_extra(info, "unit"),
                default=_default_text(info),
                description=info.description or "",
                choices=_choices(name),
            )
        )
    return docs
