"""Binding a Unix SEQPACKET listener: path checks, stale files, mode, socket activation."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from kvd.errors import KvdError
from kvd.local.seqpacket import MAX_PATH, connect, peercred, short_address

BACKLOG = 128
LOCK_TIMEOUT_S = 5.0


class BindError(KvdError):
    """An address or a path that cannot be served; the text names it and the way out."""


class Listener:
    """A bound socket, and the file to remove when it closes (none when systemd passed it)."""

    def __init__(self, sock: socket.socket, path: str, inode: tuple[int, int] | None) -> None:
        self.sock = sock
        self.path = path
        self._inode = inode

    def close(self) -> None:
        """Stops listening; removes the socket's file if it is still the one that we made."""
        self.sock.close()
        if self._inode is None:
            return
        with contextlib.suppress(OSError):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == self._inode:
                os.unlink(self.path)


def bind(
    path: str,
    *,
    any_length: bool = False,
    kind: int = socket.SOCK_SEQPACKET,
    gid: int | None = None,
) -> Listener:
    """Listens at `path` (mode 0600; its folder is made 0700 if missing).

    With `gid` the members of that group may connect too: mode 0660, and 0750 for a folder that
    is made here.

    A file left behind by a daemon that died is replaced. Raises BindError: path too long, in use
    by a live daemon (its pid is named), not a socket, no permission.
    """
    size = len(os.fsencode(path))
    if size > MAX_PATH and not any_length:
        raise BindError(
            f"socket path of {size} bytes, at most {MAX_PATH} are possible: {path} "
            "(give a shorter one with --socket)"
        )
    folder = Path(path).parent
    try:
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if gid is not None:
                os.chown(folder, -1, gid)
                folder.chmod(0o750)
        with _locked(folder):
            _remove_stale(path, kind)
            return _bind(path, kind, gid)
    except OSError as e:
        raise BindError(
            f"cannot listen at {path}: {os.strerror(e.errno) if e.errno else e} "
            "(give a path in a folder that you may write to with --socket)"
        ) from e


def from_systemd(environ: dict[str, str] | None = None) -> Listener | None:
    """The listener that systemd passed (LISTEN_FDS), if it passed one to this process.

    Raises BindError when what was passed is no listening SEQPACKET Unix socket.
    """
    env = os.environ if environ is None else environ
    try:
        if int(env.get("LISTEN_PID", "0")) != os.getpid():
            return None
        count = int(env.get("LISTEN_FDS", "0"))
    except ValueError:
        return None
    if count < 1:
        return None
    if count > 1:
        raise BindError(f"systemd passed {count} sockets, kvd takes one (ListenSequentialPacket=)")
    try:
        sock = socket.socket(fileno=os.dup(3))
    except OSError as e:
        raise BindError(f"LISTEN_FDS is set, but descriptor 3 is no socket: {e}") from e
    listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if (sock.family, sock.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET) or not listening:
        sock.close()
        raise BindError(
            "systemd passed a socket of another kind: use ListenSequentialPacket= in the unit"
        )
    os.close(3)
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        env.pop(name, None)
    sock.set_inheritable(False)
    sock.setblocking(False)
    name = sock.getsockname()
    return Listener(sock, name if isinstance(name, str) else os.fsdecode(name), None)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Two daemons that start at once must not each take the other's fresh socket for stale."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    give_up = time.monotonic() + LOCK_TIMEOUT_S
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _remove_stale(path: str, kind: int) -> None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise BindError(f"{path} exists and is no socket: remove it, or give another --socket")
    try:
        probe = connect(path, kind)
    except OSError as e:
        if e.errno == errno.ECONNREFUSED:
            os.unlink(path)
            return
        if e.errno in (errno.EAGAIN, errno.EPROTOTYPE):
            raise BindError(f"{path} is in use by another program: give another --socket") from e
        raise
    with probe:
        pid = peercred(probe)[0]
    raise BindError(f"another daemon (pid {pid}) serves {path}: stop it, or give another --socket")


def _bind(path: str, kind: int, gid: int | None) -> Listener:
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        # The kernel makes the file with the socket's own mode, so there is no moment at which
        # others could connect (unlike chmod after bind), and no process-wide umask to change.
        os.fchmod(sock.fileno(), 0o600)
        with short_address(path) as address:
            sock.bind(address)
        if gid is not None:
            # Nobody gets through before `listen`, so there is no moment of a wrong group.
            os.chown(path, -1, gid)
            os.chmod(path, 0o660)
        sock.listen(BACKLOG)
        made = os.lstat(path)
    except BaseException:
        sock.close()
        raise
    return Listener(sock, path, (made.st_dev, made.st_ino))
