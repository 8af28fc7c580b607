"""kv_transfer_params: NIXL's schema in both directions, with one nested key of ours, and
Mooncake's, in which both engines are asked at once and know the transfer by a common name.

Whatever a client or a router puts there may be missing, of the wrong type, huge or hostile.
Nothing here trusts it: a bad value is a `ParamsError` with a kind, never another exception.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from connector_shim.jobs import Address, RankId, RankTable, ReleaseJob

PARAMS_VERSION = 1
OUR_KEY = "kvd"
MAX_ID = 512
MAX_HOST = 255
MAX_RANKS = 4096
MAX_LEASE = 86_400
MAX_U63 = 2**63 - 1


class ParamsError(ValueError):
    """Params that cannot be used; `kind` is one of a fixed set (a metric label, a log key)."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


_Notice = TypeVar("_Notice", bound=ReleaseJob)


@dataclass(frozen=True, slots=True)
class RemotePrefill:
    """Where a prompt's KV lies, as far as the params tell.

    `num_tokens`: how many tokens the producer holds, None if it did not say. `generation`: None
    takes whatever the producer offers.
    """

    transfer_id: str
    generation: int | None
    engine_id: str
    ranks: RankTable
    num_tokens: int | None
    bootstrap: Address | None = None
    """Where every rank asks for its producer's address, where the params do not name them."""
    lease_s: float | None = None
    """How long the producer holds it for whom it does not hear of, if it said so."""

    def notice(self, kind: type[_Notice]) -> _Notice:
        """What to tell the producer of it."""
        return kind(self.transfer_id, self.generation, self.engine_id, self.ranks, self.bootstrap)


def wants(params: object, key: str) -> bool:
    """Whether a flag of the params is set; only a true boolean counts.

    Raises ParamsError for params or a flag of another type.
    """
    if params is None:
        return False
    if not isinstance(params, Mapping):
        raise ParamsError("not_a_mapping", type(params).__name__)
    flag = params.get(key)
    if flag is None or isinstance(flag, bool):
        return bool(flag)
    raise ParamsError("bad_flag", f"{key} is {_show(flag)}, not a boolean")


def parse_remote_prefill(params: Mapping[str, Any]) -> RemotePrefill:
    """Read what a consumer needs. Raises ParamsError."""
    ours = params.get(OUR_KEY)
    generation: int | None = None
    transfer_id: str | None = None
    ranks: RankTable = ()
    lease_s: float | None = None
    if ours is not None:
        if not isinstance(ours, Mapping):
            raise ParamsError("bad_extension", f"{OUR_KEY} is {_show(ours)}, not an object")
        version = ours.get("v")
        if version != PARAMS_VERSION or isinstance(version, bool):
            raise ParamsError("bad_version", f"{OUR_KEY}.v is {_show(version)}")
        transfer_id = _need_text(ours, "transfer_id", MAX_ID)
        generation = _whole(ours, "generation", 0, MAX_U63)
        ranks = _ranks(ours.get("ranks"))
        lease_s = _lease(ours)
    if transfer_id is None:
        transfer_id = _text(params, "transfer_id", MAX_ID) or _text(
            params, "remote_request_id", MAX_ID
        )
    if not transfer_id:
        raise ParamsError("no_transfer_id", "neither transfer_id nor remote_request_id is given")
    engine_id = _need_text(params, "remote_engine_id", MAX_ID)
    bootstrap = None
    if not ranks and params.get("remote_host") is None:
        bootstrap = _bootstrap(params)
    if not ranks and bootstrap is None:
        ranks = (((0, 0), _address(params, "remote_host", "remote_port")),)
    return RemotePrefill(
        transfer_id=transfer_id,
        generation=generation,
        engine_id=engine_id,
        ranks=ranks,
        num_tokens=_whole(params, "remote_num_tokens", 0, MAX_U63),
        bootstrap=bootstrap,
        lease_s=lease_s,
    )


def _bootstrap(params: Mapping[str, Any]) -> Address | None:
    """Mooncake's schema: an HTTP address that both legs were given, http://host:port."""
    text = _text(params, "remote_bootstrap_addr", MAX_HOST + 16)
    if text is None:
        return None
    scheme, host, port = "", None, None
    with contextlib.suppress(ValueError):
        url = urlsplit(text if "//" in text else f"//{text}")
        scheme, host, port = url.scheme, url.hostname, url.port
    if not host or not port or scheme not in ("", "http") or len(host) > MAX_HOST:
        raise ParamsError("bad_value", f"remote_bootstrap_addr is {_show(text)}")
    return host, port


def wanted_transfer_id(params: Mapping[str, Any], default: str) -> str:
    """The producer's choice of a name: the one that the router gave, else `default`."""
    try:
        return _text(params, "transfer_id", MAX_ID) or default[:MAX_ID]
    except ParamsError:
        return default[:MAX_ID]


def offer_params(
    *,
    transfer_id: str,
    generation: int,
    request_id: str,
    engine_id: str,
    tokens: int,
    block_ids: Sequence[Sequence[int]],
    ranks: Mapping[RankId, Address],
    tp_size: int,
    lease_s: float,
) -> dict[str, Any]:
    """What the producer's response carries, for the router to hand to decode verbatim.

    `block_ids` are for readers of NIXL's schema; a kvd consumer never uses them.
    """
    host, port = ranks[min(ranks)]
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(group) for group in block_ids],
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": tp_size,
        "remote_num_tokens": tokens,
        "transfer_id": transfer_id,
        OUR_KEY: {
            "v": PARAMS_VERSION,
            "transfer_id": transfer_id,
            "generation": generation,
            "lease_s": lease_s,
            "ranks": [[pp, tp, *ranks[pp, tp]] for pp, tp in sorted(ranks)],
        },
    }


def _ranks(value: object) -> RankTable:
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_RANKS:
        raise ParamsError("bad_ranks", f"{OUR_KEY}.ranks is {_show(value)}")
    table: dict[RankId, Address] = {}
    for row in value:
        if not isinstance(row, list | tuple) or len(row) != 4:
            raise ParamsError("bad_ranks", f"a row of {OUR_KEY}.ranks is {_show(row)}")
        named = dict(zip(("pp_rank", "tp_rank", "host", "port"), row, strict=True))
        rank = (
            _need_whole(named, "pp_rank", 0, MAX_RANKS),
            _need_whole(named, "tp_rank", 0, MAX_RANKS),
        )
        if rank in table:
            raise ParamsError("bad_ranks", f"rank pp={rank[0]} tp={rank[1]} is named twice")
        table[rank] = _address(named, "host", "port")
    return tuple(sorted(table.items()))


def _address(params: Mapping[str, Any], host_key: str, port_key: str) -> Address:
    return _need_text(params, host_key, MAX_HOST), _need_whole(params, port_key, 1, 65535)


def _lease(params: Mapping[str, Any]) -> float | None:
    value = params.get("lease_s")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_LEASE:
        raise ParamsError("bad_value", f"lease_s is {_show(value)}")
    return float(value)


def _need_text(params: Mapping[str, Any], key: str, longest: int) -> str:
    value = _text(params, key, longest)
    if value is None:
        raise ParamsError("missing_key", key)
    return value


def _need_whole(params: Mapping[str, Any], key: str, least: int, most: int) -> int:
    value = _whole(params, key, least, most)
    if value is None:
        raise ParamsError("missing_key", key)
    return value


def _text(params: Mapping[str, Any], key: str, longest: int) -> str | None:
    value = params.get(key)
    if value is None or value == "":
        return None
    if not isinstance(value, str) or len(value) > longest:
        raise ParamsError("bad_value", f"{key} is {_show(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ParamsError("bad_value", f"{key} is not valid text") from None
    return value


def _whole(params: Mapping[str, Any], key: str, least: int, most: int) -> int | None:
    value = params.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ParamsError("bad_value", f"{key} is {_show(value)}")
    return value


def _show(value: object) -> str:
    """A value for a log line: its type, and its text only where that is sure to be short."""
    kind = type(value).__name__
    if isinstance(value, str):
        return f"a {kind} of {len(value)}" if len(value) > 40 else f"{value!a} ({kind})"
    if isinstance(value, int):
        return f"{value} ({kind})" if value.bit_length() <= 64 else f"a huge {kind}"
    return f"a {kind}"
