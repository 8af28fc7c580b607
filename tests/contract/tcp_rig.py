"""A rig behind a data server, and a client that speaks the wire by hand."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from kvd.transport.options import TransportOptions
from kvd.transport.tcp_wire import (
    HEAD_BYTES,
    PREAMBLE_BYTES,
    Head,
    Kind,
    Request,
    pack_request,
    preamble,
    unpack_head,
)
from tests.contract.harness import TcpHarness
from tests.contract.rig import TICKET, Rig, Shape

SHAPE = Shape((*((0, (512,)) for _ in range(4)), (1, (64, 64))))
BLOCK = 4 * 512
OPTIONS = TransportOptions(
    data_timeout_s=0.6, connect_timeout_s=0.6, first_frame_s=0.4, idle_s=60.0, tcp_streams=1
)
"""Short, for those who do not keep them."""
PATIENT = replace(OPTIONS, data_timeout_s=60.0, connect_timeout_s=60.0, first_frame_s=60.0)
"""For everything else: a machine that pauses breaks nothing."""


@contextlib.asynccontextmanager
async def served(
    monkeypatch: pytest.MonkeyPatch, options: TransportOptions = TcpHarness.options
) -> AsyncIterator[tuple[Rig, TcpHarness]]:
    rig = Rig.make(SHAPE, (40, 48))
    try:
        monkeypatch.setattr(TcpHarness, "options", options)
        harness = TcpHarness(rig, monkeypatch)
        try:
            harness.admit([range(40), range(40)])
            yield rig, harness
        finally:
            await harness.aclose()
    finally:
        rig.close()


class RawClient:
    """Speaks the wire by hand, with deadlines."""

    def __init__(self, port: int, *, hello: bool = True) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=10)
        if hello:
            self.sock.sendall(preamble())
            assert self.read(PREAMBLE_BYTES) == preamble()

    def read(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            got = self.sock.recv(nbytes - len(data))
            if not got:
                raise EOFError(f"{len(data)} of {nbytes} bytes came")
            data += got
        return data

    def head(self) -> Head:
        head, code, detail = unpack_head(self.read(HEAD_BYTES))
        return replace(head, code=self.read(code).decode(), detail=self.read(detail).decode())

    def ask(self, request: Request) -> Head:
        self.sock.sendall(pack_request(request))
        head = self.head()
        if head.kind is Kind.DATA:
            self.read(head.nbytes)
            head = self.head()
        assert head.request == request.request
        return head

    def ended(self) -> bool:
        """Waits for the server to close; False if anything but its preamble comes instead."""
        try:
            left = self.sock.recv(64)
            return left in (b"", preamble()) and self.sock.recv(64) == b""
        except ConnectionResetError:
            return True


def request(indices: list[int], **changes: object) -> Request:
    base = Request(7, TICKET, 0, 0, 5, BLOCK * len(indices), np.array(indices, np.uint32))
    return replace(base, **changes)  # type: ignore[arg-type]
