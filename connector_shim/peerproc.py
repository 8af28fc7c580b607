"""The daemon's process, as seen from its socket: is it alive, and may it be ended.

A daemon that hangs (stopped, or stuck in a driver call) may still write into this engine's blocks
when it wakes. Only its exit proves that it will not, so the client may have to bring it about.

What an exit proves (Linux, do_exit): a pidfd becomes readable when the last thread of the process
has gone through exit_mm, exit_files and exit_task_work, in which the files of the process are
released. So by then no thread of it runs, and the release of the GPU driver's files, which ends
what the process had on the GPU, has returned. (In NVIDIA's published kernel modules that release
is put off only while the machine is being suspended.) A socket that reads as closed proves less:
its files are released one after the other, the socket's maybe before the driver's.
"""

from __future__ import annotations

import logging
import os
import re
import select
import signal
import socket
import struct

log = logging.getLogger(__name__)

_SO_PEERPIDFD = 77
_PF_EXITING = 0x4
_UCRED = struct.Struct("iII")
_PID = re.compile(rb"^Pid:\s*(\d+)", re.MULTILINE)


class PeerProcess:
    """Holds a pidfd, so that a process number which is used again is never taken for the daemon."""

    def __init__(self, sock: socket.socket) -> None:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        self.pid, self.uid, self.gid = _UCRED.unpack(raw)
        self._pidfd = _peer_pidfd(sock)
        if self._pidfd < 0:
            self._pidfd = _open_pidfd(self.pid)
        self._killed = False
        self._told = False

    def sender_is(self, pid: int) -> None:
        """Corrects the process: the socket names who called listen(), which may not be the daemon.

        With socket activation that is the service manager; `pid` is who sent the first frame.
        """
        if pid == self.pid:
            return
        self.close()
        self.pid = pid
        self._pidfd = _open_pidfd(pid)

    def end(self, why: str, num_fetches: int) -> bool:
        """Kills it, once; True if that was now. Where it is not allowed, that is logged, once."""
        if self._killed:
            return False
        why_not = self._kill()
        if why_not is None:
            self._killed = True
            log.warning("kvd: %s: killed its process %d", why, self.pid)
            return True
        if not self._told:
            self._told = True
            log.error(
                "kvd: %s and may not be killed from here (%s); the blocks of %d fetches stay "
                "held until it answers or exits", why, why_not, num_fetches,
            )  # fmt: skip
        return False

    def _kill(self) -> str | None:
        """Returns why it cannot be killed, or None if the signal was sent."""
        if self.pid in (1, os.getpid(), os.getppid()):
            return f"process {self.pid} is not one to end from here"
        if self._pidfd < 0:
            return "its process cannot be seen from here"
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return None
        except OSError as exc:
            return f"process {self.pid}: {exc.strerror}"
        return None

    def exited(self) -> bool:
        """All its threads have ended. False also when that cannot be known."""
        if self._pidfd < 0:
            return False
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(0))

    def lives(self) -> bool | None:
        """Whether it runs and is not on its way out; None where that cannot be known.

        Asked after its socket was found closed, True means that its program closed it: of a
        process that ends, each thread is marked as exiting before the files are released.
        """
        try:
            with open(f"/proc/self/fdinfo/{self._pidfd}", "rb") as file:
                # Not `self.pid`: the number by which this very /proc knows the process.
                pid = int(_PID.findall(file.read())[0])
            with open(f"/proc/{pid}/stat", "rb") as file:
                flags = int(file.read().rpartition(b")")[2].split()[6])
        except (OSError, IndexError, ValueError):
            return False if self.exited() else None
        # Not exited now: so the number was not another process's meanwhile.
        return not flags & _PF_EXITING and not self.exited()

    def fileno(self) -> int | None:
        """Becomes readable when the process has exited."""
        return self._pidfd if self._pidfd >= 0 else None

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _peer_pidfd(sock: socket.socket) -> int:
    try:
        fd = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return -1
    os.set_inheritable(fd, False)
    return fd


def _open_pidfd(pid: int) -> int:
    if pid <= 0:
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
