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

_decode = msgspec.msgpack.Decoder(local.FromShim).decode


def main() -> None:
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
        if isinstance(message, local.FetchGo):
            break
    with mmap.mmap(fds[0], 0) as blocks:
        os.kill(os.getpid(), signal.SIGSTOP)
        blocks[:] = b"\xee" * len(blocks)


if __name__ == "__main__":
    main()
