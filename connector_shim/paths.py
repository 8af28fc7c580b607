"""Where the daemon's socket is."""

from __future__ import annotations

import errno
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
    paths.append(f"{shared_tmp_dir()}/kvd.sock")
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
        return check_length(next(filter(_can_be_made, paths), paths[-1]))
    if os.path.dirname(chosen) == shared_tmp_dir():
        check_private(os.path.dirname(chosen))
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


def why_not(path: str, exc: OSError) -> tuple[Code, str]:
    """For an engine's log: why there is no connection, and what can be done about it."""
    if exc.errno in (errno.EACCES, errno.EPERM):
        try:
            owner = f"it belongs to uid {os.stat(path).st_uid}"
        except OSError:
            owner = "its folder may not be entered"
        return (
            Code.PEER_NOT_ALLOWED,
            f"no access to the daemon's socket {path}: {owner}, this engine runs as uid "
            f"{os.geteuid()}: run both as the same user, or name a group of this user in the "
            "daemon's socket_group",
        )
    return (
        Code.DAEMON_GONE,
        f"no kvd daemon at {path}: {exc.strerror}. Start one with: kvd serve --socket {path}",
    )


def shared_tmp_dir() -> str:
    """Under /tmp, where anybody could have made it: to be used after `check_private`."""
    return f"/tmp/kvd-{os.geteuid()}"  # noqa: S108


def _can_be_made(path: str) -> bool:
    """As the daemon decides where it listens: its folder, or the folder's parent, is writable."""
    folder = os.path.dirname(path)
    return os.access(folder if os.path.exists(folder) else os.path.dirname(folder), os.W_OK)


def check_private(folder: str) -> None:
    """Raises ClientError PEER_NOT_ALLOWED for a folder that is not ours alone to write."""
    info = os.lstat(folder)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise ClientError(
            Code.PEER_NOT_ALLOWED,
            f"{folder} belongs to uid {info.st_uid}, mode {info.st_mode & 0o777:o}: it must be a "
            f"folder of uid {os.geteuid()} that nobody else may write",
        )
