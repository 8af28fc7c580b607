"""Who this daemon is to others: a lasting name, a boot id new at each start, and its machine."""

from __future__ import annotations

import os
import secrets
import socket
import time
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from kvd.protocol.types import PeerAddr


@dataclass(frozen=True, slots=True)
class Identity:
    """`host` is a hint that two daemons share a machine; only their link proves it."""

    daemon_id: str
    boot_id: int
    host: str
    version: str


def host_key() -> str:
    """Names this running kernel: equal for all containers on one machine, whatever their names."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def new_boot_id() -> int:
    """63 bits that no other start of this daemon has had."""
    return (time.time_ns() & ~0xFFFFF & (2**63 - 1)) | secrets.randbits(20)


def identify(address: PeerAddr, version: str) -> Identity:
    """The name is made of machine, network namespace and bound port.

    Only one live socket can have these, and a daemon that comes back on its port gets its old
    name: others then know at once that the earlier life is over.
    """
    host = host_key()
    try:
        namespace = os.readlink("/proc/self/ns/net")
    except OSError:
        namespace = ""
    place = blake2b(f"{host}|{namespace}|{address}".encode(), digest_size=6).hexdigest()
    return Identity(
        daemon_id=f"{socket.gethostname()[:64]}-{address.port}-{place}",
        boot_id=new_boot_id(),
        host=host,
        version=version,
    )
