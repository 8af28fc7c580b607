"""ZMQ sockets as this daemon uses them: nothing lingers, nothing blocks, everything is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import zmq
import zmq.asyncio

from kvd.protocol import peer

HIGH_WATER = 1000
"""Messages queued per peer and direction before it counts as stuck."""
RECV_BUDGET = 64
"""Messages taken from a socket before others on the loop get their turn."""


def open_socket(context: zmq.asyncio.Context, kind: int, *, ipv6: bool) -> zmq.asyncio.Socket:
    """A ROUTER or DEALER with the options that both share."""
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.IPV6, int(ipv6))
    socket.set(zmq.SNDHWM, HIGH_WATER)
    socket.set(zmq.RCVHWM, HIGH_WATER)
    socket.set(zmq.MAXMSGSIZE, peer.MAX_FRAME)
    return socket


def send_nowait(socket: zmq.asyncio.Socket, parts: Sequence[bytes]) -> BaseException | None:
    """Sends or fails at once; returns the error, zmq.Again when the other side's queue is full."""
    # With NOBLOCK pyzmq tries before it returns, and never leaves the message waiting.
    sent = socket.send_multipart(parts, flags=zmq.NOBLOCK)
    if not isinstance(sent, asyncio.Future):  # pyzmq's annotation is wider than what it returns
        return RuntimeError("the socket is not one of zmq.asyncio")
    if not sent.done():
        sent.cancel()
        return zmq.Again()
    return sent.exception()


def error_text(error: zmq.ZMQError) -> str:
    """What went wrong, in words."""
    return zmq.strerror(error.errno) if error.errno is not None else str(error)
