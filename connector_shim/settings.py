"""kv_connector_extra_config: the operator's settings of the shim.

A key that is not known, or a value out of its range, is a mistake in the operator's command line
and stops the engine at its start, by name. Everything that can go wrong later only degrades.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class ShimSettings:
    """Seconds for `_s`, a part of the whole for `_fraction`."""

    socket: str = ""
    """The daemon's Unix socket. `{local_rank}` is filled in; "" looks at KVD_SOCKET, then
    /run/kvd, then the user's runtime folder."""
    daemon: str = "connect"
    """"connect" to a running daemon, or "spawn" one as a child of each worker."""
    spawn: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a spawned daemon, by their names."""
    send_type: str = "put_async"
    """When prefill's KV may go: "get" after prefill has ended, "put_async" while it computes,
    "put" likewise, and each prefill step waits until its part has reached who fetches it."""
    put_wait_s: float = 1.0
    """With "put", how long a step waits; after that, this request's later steps do not wait."""
    stream_unit: str = "chunk"
    """What goes at once: a "chunk", after each prefill step, or a "layer", which hooks into the
    forward pass and so rules out full CUDA graphs."""
    lease_s: float = 30.0
    """How long the producer holds blocks that nobody fetches."""
    fetch_deadline_s: float = 30.0
    park_s: float = 2.0
    """How long a consumer waits for a transfer that the producer does not know (yet)."""
    max_held_fraction: float = 0.5
    """Above this part of the KV blocks held for consumers, the producer offers nothing."""
    daemon_hang_s: float = 10.0
    connect_timeout_s: float = 5.0
    spawn_wait_s: float = 30.0
    """How long the engine's start waits for a daemon that it spawned."""
    recheck_s: float = 0.5
    """News of the daemons older than this are refreshed before a request relies on them."""
    daemon_wait_s: float = 2.0
    """How long a request may wait for a daemon that is just registering the engine."""
    model_name: str = ""
    """What both engines call the model, where they load it from different paths."""
    log_level: str = "info"

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> ShimSettings:
        """Raises ValueError that names the key and, for an unknown one, all known ones."""
        known = {f.name for f in fields(cls)}
        for key in extra:
            if key not in known:
                raise ValueError(
                    f"kv_connector_extra_config has the unknown key {key!r}; "
                    f"KvdConnector knows: {', '.join(sorted(known))}"
                )
        values = dict(extra)
        if isinstance(values.get("send_type"), str):
            values["send_type"] = values["send_type"].lower()  # PUT_ASYNC, as P2pNccl spelt it
        for key, value in values.items():
            problem = _CHECKS[key](value)
            if problem:
                raise ValueError(f"kv_connector_extra_config: {key} {problem}, got {value!r}")
            if isinstance(value, int) and key.endswith(("_s", "_fraction")):
                values[key] = float(value)
        return cls(**values)


def _text(value: object) -> str:
    return "" if isinstance(value, str) else "must be a string"


def _seconds(least: float, most: float) -> Callable[[object], str]:
    def check(value: object) -> str:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and least <= float(value) <= most:  # type: ignore[arg-type]
            return ""
        return f"must be a number from {least:g} to {most:g}"

    return check


def _one_of(*choices: str) -> Callable[[object], str]:
    def check(value: object) -> str:
        return "" if value in choices else f"must be one of {', '.join(choices)}"

    return check


def _mapping(value: object) -> str:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return ""
    return "must be an object of settings by name"


_CHECKS: dict[str, Callable[[object], str]] = {
    "socket": _text,
    "daemon": _one_of("connect", "spawn"),
    "send_type": _one_of("get", "put_async", "put"),
    "put_wait_s": _seconds(0, 60),
    "stream_unit": _one_of("chunk", "layer"),
    "spawn": _mapping,
    "lease_s": _seconds(0.1, 86_400),
    "fetch_deadline_s": _seconds(0.1, 86_400),
    "park_s": _seconds(0, 86_400),
    "max_held_fraction": _seconds(0, 1),
    "daemon_hang_s": _seconds(1, 3600),
    "connect_timeout_s": _seconds(0, 60),
    "spawn_wait_s": _seconds(0, 600),
    "recheck_s": _seconds(0, 3600),
    "daemon_wait_s": _seconds(0, 60),
    "model_name": _text,
    "log_level": _one_of("debug", "info", "warning", "error"),
}


def hooks_layers(extra: Mapping[str, Any]) -> bool:
    """Whether these settings hook into the forward pass at each attention layer."""
    send_type = str(extra.get("send_type", "put_async")).lower()
    return extra.get("stream_unit") == "layer" and send_type != "get"
