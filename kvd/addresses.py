"""Addresses as an operator writes them: host:port, networks, and paths of Unix sockets.

Everything here raises ValueError with a sentence that says what is allowed.
"""

from __future__ import annotations

import grp
import ipaddress
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

MAX_SOCKET_PATH = 107
"""Bytes of path that fit into a Unix socket's address, without the closing NUL."""

LINK_SUFFIX = ".link"
"""Appended to the daemon's socket path: the socket that daemons on one host share memory by."""

CONTROL_SUFFIX = ".ctl"
"""Appended likewise: HTTP for the operator on this host (`kvd status` and its like)."""

CONTROL_HEADER = "X-Kvd-Control"
"""Asked for by POST: pages in a browser cannot send it to us without asking first."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class HostPort(NamedTuple):
    """A TCP endpoint. IPv6 hosts are kept without brackets; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach it. A name, other than localhost, never is."""
        if self.host == "localhost":
            return True
        ip = parse_ip(self.host)
        return ip is not None and ip.is_loopback

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for all addresses of the host (0.0.0.0 or ::)."""
        ip = parse_ip(self.host)
        return ip is not None and ip.is_unspecified


def parse_ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `text` spells, an IPv4 one where IPv6 only wraps it; None for a name."""
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    return ip


def parse_host_port(text: str, *, default_port: int | None = None) -> HostPort:
    """Reads `host:port`, `[v6]:port`, and either with `tcp://` in front.

    With `default_port`, the port may be left out. Raises ValueError.
    """
    rest = text.strip().removeprefix("tcp://")
    if rest.startswith("["):
        host, closed, tail = rest[1:].partition("]")
        if not closed or (tail and not tail.startswith(":")):
            raise ValueError("must be [address]:port for IPv6")
        port_text = tail[1:] if tail else None
        ip = parse_ip(host)
        if ":" not in host or ip is None:
            raise ValueError(f"has {host!r} in brackets, which is no IPv6 address")
    elif rest.count(":") > 1:
        raise ValueError(f"must have brackets around an IPv6 address: [{rest}]:port")
    else:
        host, colon, tail = rest.partition(":")
        port_text = tail if colon else None
    if not host:
        raise ValueError("has no host; write host:port")
    if port_text is None:
        if default_port is None:
            raise ValueError(f"has no port; write {rest}:port")
        return HostPort(_host(host), default_port)
    if not (port_text.isascii() and port_text.isdigit()) or int(port_text) > 65535:
        raise ValueError(f"has the port {port_text!r}; it must be a number from 0 to 65535")
    return HostPort(_host(host), int(port_text))


def _host(host: str) -> str:
    if any(c.isspace() or c in "/@[]" for c in host):
        raise ValueError(f"has {host!r} as its host, which is neither an address nor a name")
    if len(host) > 255:
        raise ValueError("has a host of more than 255 characters")
    return host


def parse_bind(text: str) -> HostPort:
    """As `parse_host_port`, for something to listen on: an IP address, `localhost` or `*`.

    Names are refused since ZMQ binds to addresses only.
    """
    at = parse_host_port(text)
    if at.host == "*":
        return at._replace(host="0.0.0.0")  # noqa: S104
    if at.host == "localhost":
        return at._replace(host="127.0.0.1")
    if parse_ip(at.host) is None:
        raise ValueError(f"must have an IP address of this host, localhost or *, not {at.host!r}")
    return at


def parse_network(text: str) -> Network:
    """Reads `10.0.0.0/8`, `fd00::/8`, or one address. Raises ValueError."""
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        pass
    try:
        loose = ipaddress.ip_network(text, strict=False)
    except ValueError:
        raise ValueError(
            f"has {text!r}, which is no network; write an address or address/bits"
        ) from None
    raise ValueError(f"has {text!r}, which names a host within a network; write {loose}")


def check_socket_path(path: str) -> str:
    """The absolute path of a Unix socket, if it is one that can be bound. Raises ValueError."""
    full = os.path.abspath(os.path.expanduser(path))
    nbytes = len(os.fsencode(full))
    if "\0" in path:
        raise ValueError("must not have a NUL in it")
    if path.endswith("/") or Path(full).is_dir():
        raise ValueError(f"must name a socket, not the folder {full}")
    if nbytes > MAX_SOCKET_PATH:
        raise ValueError(
            f"has {nbytes} bytes, more than the {MAX_SOCKET_PATH} that a Unix socket allows: {full}"
        )
    return full


def default_socket_path(env: Mapping[str, str] | None = None) -> str:
    """/run/kvd where that may be written, else the user's runtime folder, else /tmp."""
    environ = os.environ if env is None else env
    candidates = ["/run/kvd"]
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        candidates.append(f"{runtime}/kvd")
    for folder in candidates:
        if os.access(folder if os.path.exists(folder) else os.path.dirname(folder), os.W_OK):
            return f"{folder}/kvd.sock"
    return f"/tmp/kvd-{os.getuid()}/kvd.sock"  # noqa: S108


def group_id(group: str) -> int | None:
    """The group's number, None for no group. Raises ValueError for one that does not exist."""
    if not group:
        return None
    try:
        return int(group) if group.isascii() and group.isdigit() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise ValueError(f"is {group!r}, a group that this host does not have") from None
