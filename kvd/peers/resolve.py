"""Where we connect to: names are resolved off the loop, and checked against `allow_peers`."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence

from kvd.addresses import Network, parse_ip
from kvd.errors import KvdError
from kvd.protocol.codes import Code


class AddressRefused(KvdError):
    """A host that cannot be resolved, or that `allow_peers` does not cover."""


def in_networks(host: str, networks: Sequence[Network]) -> bool:
    """Whether the IP address `host` lies in one of the networks; a name never does."""
    ip = parse_ip(host.partition("%")[0])
    return ip is not None and any(ip.version == n.version and ip in n for n in networks)


async def resolve(host: str, port: int, timeout_s: float) -> list[str]:
    """Numeric addresses of `host`. Raises AddressRefused(PEER_UNREACHABLE)."""
    try:
        ipaddress.ip_address(host)
        return [host]
    except ValueError:
        pass
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout_s):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise AddressRefused(
            f"{host} was not resolved within {timeout_s:g} s", Code.PEER_UNREACHABLE
        ) from None
    except (OSError, UnicodeError) as e:
        raise AddressRefused(f"{host} cannot be resolved: {e}", Code.PEER_UNREACHABLE) from None
    return list(dict.fromkeys(str(info[4][0]) for info in found))


async def candidates(host: str, port: int, allow: Sequence[Network], timeout_s: float) -> list[str]:
    """The allowed addresses of `host`, at least one: what was checked is what is connected to.

    Raises AddressRefused: PEER_NOT_ALLOWED, or PEER_UNREACHABLE when it does not resolve.
    """
    found = await resolve(host, port, timeout_s)
    good = [ip for ip in found if in_networks(ip, allow)]
    if good:
        return good
    listed = ", ".join(found[:4]) or "nothing"
    raise AddressRefused(
        f"{host} ({listed}) is in none of allow_peers: {', '.join(map(str, allow)) or 'none'}",
        Code.PEER_NOT_ALLOWED,
    )


def tcp_url(ip: str, port: int) -> str:
    """A ZMQ endpoint; IPv6 goes in brackets."""
    return f"tcp://[{ip}]:{port}" if ":" in ip else f"tcp://{ip}:{port}"
