"""The bootstrap query: where an engine's ranks are, for routers and peers that know one address.

The answer has the shape that Mooncake's routers ask for: for each data parallel rank the engine's
id and, by tensor and pipeline rank, where its daemon listens. Where the ranks of an engine have
daemons of their own, the one that is asked asks the others (`bootstrap_peers`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from typing import Any

import aiohttp
import structlog

from kvd.addresses import HostPort, Network, parse_host_port
from kvd.errors import KvdError
from kvd.peers.resolve import candidates
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr, Rank

log = structlog.get_logger("kvd.bootstrap")

PATH = "/query"
OWN = "own"
"""With this in the query a daemon tells of its own producers alone: none asks in circles."""
MAX_ANSWER = 256 * 1024


class BootstrapError(KvdError):
    """A bootstrap service that does not answer, or does not know the rank."""

    code = Code.PEER_UNREACHABLE


def answer(engines: Iterable[tuple[str, Rank]], advertise: PeerAddr) -> dict[str, Any]:
    """What `PATH` tells of this daemon's producers."""
    out: dict[str, Any] = {}
    for engine_id, rank in engines:
        entry = out.setdefault(str(rank.dp_rank), {"engine_id": engine_id, "worker_addr": {}})
        if entry["engine_id"] == engine_id:
            by_pp = entry["worker_addr"].setdefault(str(rank.tp_rank), {})
            by_pp[str(rank.pp_rank)] = f"tcp://{advertise}"
    return out


async def ask_others(
    others: Sequence[HostPort], allow: Sequence[Network], timeout_s: float
) -> list[Any]:
    """What the daemons of other ranks tell of theirs; one that does not answer is left out."""

    async def ask(at: HostPort) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                for ip in await candidates(at.host, at.port, allow, timeout_s):
                    return json.loads(await _get(PeerAddr(ip, at.port), f"?{OWN}=1"))
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KvdError) as e:
            log.warning("bootstrap_peer_failed", address=str(at), detail=str(e) or repr(e))
        return {}

    return await asyncio.gather(*map(ask, others))


def merge(own: dict[str, Any], others: Iterable[Any]) -> dict[str, Any]:
    """Adds the ranks that others tell of; what this daemon says itself stands."""
    for found in others:
        for dp_rank, entry in found.items() if isinstance(found, dict) else ():
            try:
                engine_id, ranks = str(entry["engine_id"]), entry["worker_addr"].items()
                mine = own.setdefault(dp_rank, {"engine_id": engine_id, "worker_addr": {}})
                if mine["engine_id"] != engine_id:
                    continue
                for tp_rank, by_pp in ranks:
                    known = mine["worker_addr"].setdefault(tp_rank, {})
                    for pp_rank, url in by_pp.items():
                        known.setdefault(pp_rank, str(url))
            except (KeyError, TypeError, AttributeError):
                continue
    return own


async def locate(at: PeerAddr, allow: Sequence[Network], timeout_s: float) -> PeerAddr:
    """Ask the bootstrap service `at` for its rank's daemon. Raises BootstrapError."""
    ips = await candidates(at.host, at.port, allow, timeout_s)
    problem = ""
    for ip in ips:
        try:
            async with asyncio.timeout(timeout_s):
                text = await _get(PeerAddr(ip, at.port))
            return _find(json.loads(text), at)
        except TimeoutError:
            problem = f"no answer within {timeout_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as e:
            problem = str(e) or type(e).__name__
    raise BootstrapError(f"{at}: {problem}")


async def _get(at: PeerAddr, query: str = "") -> bytes:
    async with (
        aiohttp.ClientSession(trust_env=False) as session,
        session.get(
            f"http://{PeerAddr(at.host, at.port)}{PATH}{query}", allow_redirects=False
        ) as got,
    ):
        if got.status != 200:
            raise ValueError(f"HTTP status {got.status}")
        text = await got.content.read(MAX_ANSWER + 1)
        while not got.content.at_eof() and len(text) <= MAX_ANSWER:
            text += await got.content.read(MAX_ANSWER + 1)
        if len(text) > MAX_ANSWER:
            raise ValueError(f"an answer of more than {MAX_ANSWER} bytes")
        return text


def _find(found: Any, at: PeerAddr) -> PeerAddr:
    assert at.rank is not None
    pp, tp = at.rank
    if isinstance(found, dict):
        for entry in found.values():
            try:
                url = entry["worker_addr"][str(tp)][str(pp)]
                place = parse_host_port(str(url).removeprefix("tcp://"))
            except (KeyError, TypeError, ValueError, KvdError):
                continue
            if place.port:
                return PeerAddr(place.host, place.port)
    raise BootstrapError(f"{at} knows no daemon for rank pp={pp} tp={tp}")
