"""Where the daemon's socket is."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from connector_shim.errors import ClientError
from kvd.protocol.codes import Code

MAX_SOCKET_PATH = 107
"""Bytes that fit into a Unix socket address, the closing zero left out."""

SYSTEM_DIR = "/run/kvd"


def candidates(env: Mapping[str, str]) -> list[str]:
    """The default paths, in the order in which they are tried."""
    paths = [f"{SYSTEM_DIR}/kvd.sock"]
    runtime = env.get("XDG_RUNTIME_DIR")
    if runtime:
        paths.append(f"{runtime}/kvd/kvd.sock")
    paths.append(f"{_shared_tmp_dir()}/kvd.sock")
    return paths


def resolve_socket(
    path: str | None, *, local_rank: int = 0, env: Mapping[str, str] | None = None
) -> str:
    """The socket to connect to: `path`, else KVD_SOCKET, else the first default that exists.

    `{local_rank}` in it is replaced. Where none of the defaults exists, it is the one at which
    `kvd serve` would listen by default. Raises ClientError UNSUPPORTED for a path that no socket
    can have, PEER_NOT_ALLOWED for a default that another user may have put there.
    """
    env = os.environ if env is None else env
    chosen = path or env.get("KVD_SOCKET")
    if chosen:
        return check_length(chosen.replace("{local_rank}", str(local_rank)))
    paths = candidates(env)
    chosen = next((p for p in paths if os.path.exists(p)), None)
    if chosen is None:
        if os.access(SYSTEM_DIR, os.W_OK):
            return check_length(paths[0])
        return check_length(paths[1] if len(paths) > 2 else paths[-1])
    if os.path.dirname(chosen) == _shared_tmp_dir():
        _check_private(os.path.dirname(chosen))
    return check_length(chosen)


def check_length(path: str) -> str:
    """Returns the path, or raises ClientError UNSUPPORTED if no socket can have it."""
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH:
        raise ClientError(
            Code.UNSUPPORTED,
            f"socket path {path!r} has {size} bytes; at most {MAX_SOCKET_PATH} are possible",
        )
    return path


def no_daemon(path: str, why: str) -> str:
    """Words for an engine's log when no daemon answers at `path`."""
    return f"no kvd daemon at {path}: {why}. Start one with: kvd serve --socket {path}"


def _shared_tmp_dir() -> str:
    return f"/tmp/kvd-{os.geteuid()}"  # noqa: S108 - checked by _check_private


def _check_private(folder: str) -> None:
    """A folder that anybody may have made is ours only if we own it and nobody else writes it."""
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise ClientError(
            Code.PEER_NOT_ALLOWED,
            f"{folder} is owned by uid {info.st_uid} with mode {info.st_mode & 0o777:o}: it must "
            f"be owned by uid {os.geteuid()} and writable by nobody else",
        )
