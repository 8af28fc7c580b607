"""The bootstrap query: where an engine's ranks are, for routers and peers that know one address.

The answer has the shape that Mooncake's routers ask for: for each data parallel rank the engine's
id and, by tensor and pipeline rank, where its daemon listens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from typing import Any

import aiohttp

from kvd.addresses import Network, parse_host_port
from kvd.errors import KvdError
from kvd.peers.resolve import candidates
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr, Rank

PATH = "/query"
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


async def _get(at: PeerAddr) -> bytes:
    async with (
        aiohttp.ClientSession(trust_env=False) as session,
        session.get(f"http://{PeerAddr(at.host, at.port)}{PATH}", allow_redirects=False) as got,
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
