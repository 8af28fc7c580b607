"""A daemon in a process of its own that registers one client and stops itself at its first fetch.

Argument: the descriptor of a socket that listens, or of one that is connected already. When it is
continued it writes 0xEE over the whole first segment, as a late copy would, and ends.
"""

from __future__ import annotations

import array
import mmap
import os
import signal
import socket
import sys

import msgspec

from kvd.protocol import local
from tests.unit.client.fake import welcome

LATE = 0xEE

_decode = msgspec.msgpack.Decoder(local.FromShim).decode


def serve_until_fetch() -> tuple[socket.socket, mmap.mmap]:
    """The session, once a fetch is to go, and its first segment."""
    session = socket.socket(fileno=int(sys.argv[1]))
    if session.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        session, _ = session.accept()
    session.setblocking(True)
    session.send(welcome())
    fds = array.array("i")
    while True:
        data, ancillary, _, _ = session.recvmsg(65536, socket.CMSG_SPACE(16))
        for _, kind, payload in ancillary:
            if kind == socket.SCM_RIGHTS:
                fds.frombytes(payload)
        message = _decode(data)
        if isinstance(message, local.Register):
            session.send(msgspec.msgpack.encode(local.Registered(1)))
        if isinstance(message, local.Fetch):
            return session, mmap.mmap(fds[0], 0)


def write_late(blocks: mmap.mmap) -> None:
    blocks[:] = bytes([LATE]) * len(blocks)


def main() -> None:
    session, blocks = serve_until_fetch()
    with session, blocks:
        os.kill(os.getpid(), signal.SIGSTOP)
        write_late(blocks)


if __name__ == "__main__":
    main()
