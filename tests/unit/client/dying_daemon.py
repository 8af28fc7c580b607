"""A daemon in a process of its own that dies at its first fetch, while its GPU goes on writing.

Arguments: the descriptor of a socket that listens, and of a pipe. What the kernel does in an
instant takes as long here as a test likes: the process is seen as exiting, its session's socket is
closed, and it has not exited. Once the pipe is closed, 0xEE is written over the whole first
segment, as by a copy that was on the GPU, and the process is gone.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading

from tests.plugins.waiting import wait_for
from tests.unit.client.hanging_daemon import serve_until_fetch, write_late

SYS_EXIT = {"x86_64": 60, "aarch64": 93}[platform.machine()]
"""Ends the calling thread only."""


def main() -> None:
    session, blocks = serve_until_fetch()

    def die() -> None:
        wait_for(_main_thread_is_gone)
        session.close()
        os.read(int(sys.argv[2]), 1)
        write_late(blocks)
        os._exit(0)

    threading.Thread(target=die).start()
    ctypes.CDLL(None).syscall(SYS_EXIT, 0)


def _main_thread_is_gone() -> bool:
    with open(f"/proc/{os.getpid()}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"


if __name__ == "__main__":
    main()
