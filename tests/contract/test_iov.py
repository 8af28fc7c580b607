"""Scatter-gather vectors over a socket pair, cut wherever the kernel cuts them."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.transport import iov
from kvd.transport.iov import Vector, stretch
from kvd.transport.tcp_wire import (
    HEAD_BYTES,
    LENGTH_BYTES,
    MAX_COUNT,
    BadFrame,
    Head,
    Kind,
    Request,
    check_preamble,
    pack_head,
    pack_request,
    preamble,
    request_length,
    unpack_head,
    unpack_request,
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    a.setblocking(False)
    b.setblocking(False)
    yield a, b
    a.close()
    b.close()


def carve(buffer: np.ndarray, cuts: list[int], gap: int) -> np.ndarray:
    """Stretches of the given lengths, `gap` bytes apart."""
    rows, at = [], 0
    for n in cuts:
        rows.append((buffer.ctypes.data + at, n))
        at += n + gap
    return np.array(rows, np.uint64).reshape(-1, 2)


def pump(vector: Vector, sock: socket.socket, *, sending: bool) -> int:
    try:
        return vector.send(sock.fileno()) if sending else vector.receive(sock.fileno())
    except OSError as exc:
        if exc.errno != errno.EAGAIN:
            raise
        return 0


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    st.integers(1, 5000),
    st.integers(1, 9),
)
def test_bytes_keep_their_order(
    monkeypatch: pytest.MonkeyPatch, cuts: list[int], cap: int, max_iov: int
) -> None:
    a, b = socket.socketpair()
    with a, b:
        a.setblocking(False)
        b.setblocking(False)
        a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
        monkeypatch.setattr(iov, "CALL_BYTES", cap)
        monkeypatch.setattr(iov, "MAX_IOV", max_iov)
        total = sum(cuts)
        src = np.random.default_rng(total).integers(0, 256, total + 3 * len(cuts), dtype=np.uint8)
        dst = np.zeros(total + 7, np.uint8)
        out = Vector(carve(src, cuts, 3))
        into = Vector(
            carve(dst, [min(total, 11), max(total - 11, 0)] if total > 11 else [total], 7)
        )
        assert (out.nbytes, out.left) == (total, total)
        while into.left:
            sent = pump(out, a, sending=True)
            got = pump(into, b, sending=False)
            assert sent + got > 0
            assert max(sent, got) <= cap + iov.HEAD_ROOM
        assert out.left == 0
        parts, at = [], 0
        for n in cuts:
            parts.append(src[at : at + n])
            at += n + 3
        whole = np.concatenate(parts)
        assert (dst[: min(total, 11)] == whole[:11]).all()
        assert (dst[18 : total + 7] == whole[11:]).all()
        assert (dst[min(total, 11) : 18][:7] == 0).all()


def test_redirected_bytes_land_in_scratch(pair: tuple[socket.socket, socket.socket]) -> None:
    a, b = pair
    dst = np.full(1000, 0xEE, np.uint8)
    scratch = np.zeros(64, np.uint8)
    vector = Vector(carve(dst, [400, 300], 100))
    a.sendall(b"\x01" * 700)
    got = vector.receive(b.fileno())
    assert got == 700
    vector = Vector(carve(dst, [400, 300], 100))
    a.sendall(b"\x02" * 450)
    assert vector.receive(b.fileno()) == 450
    vector.redirect(scratch)
    assert vector.left == 250
    a.sendall(b"\x03" * 250)
    while vector.left:
        assert vector.receive(b.fileno()) > 0
    assert (dst[:400] == 2).all()
    assert (dst[500:550] == 2).all()
    assert (dst[550:800] == 1).all()
    assert (scratch == 3).all()


def test_repeated_scratch_has_the_asked_length(pair: tuple[socket.socket, socket.socket]) -> None:
    a, b = pair
    scratch = np.full(100, 7, np.uint8)
    for nbytes in (1, 100, 101, 250):
        vector = Vector.repeated(scratch, nbytes)
        while vector.left:
            vector.send(a.fileno())
        assert b.recv(1000) == b"\x07" * nbytes


def test_errors_of_the_kernel_come_as_oserror() -> None:
    data = np.zeros(4, np.uint8)
    with pytest.raises(OSError, match="Bad file descriptor"):
        Vector(stretch(data)).send(2**20)


# --- frames ---------------------------------------------------------------------------------


@given(
    st.integers(0, 2**32 - 1),
    st.binary(min_size=16, max_size=16),
    st.integers(0, 65535),
    st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)),
    st.lists(st.integers(0, 2**32 - 2), min_size=1, max_size=40),
    st.booleans(),
)
def test_requests_survive_the_wire(
    number: int,
    ticket: bytes,
    group: int,
    rest: tuple[int, int, int],
    indices: list[int],
    ranged: bool,
) -> None:
    if ranged:
        first = min(indices[0], 2**32 - 50)
        indices = list(range(first, first + len(indices)))
    asked = Request(number, ticket, group, *rest, np.array(indices, np.uint32))
    frame = pack_request(asked)
    body = frame[LENGTH_BYTES:]
    assert request_length(frame[:LENGTH_BYTES]) == len(body)
    got = unpack_request(body)
    assert got.indices.tolist() == indices
    assert (got.request, got.ticket, got.group) == (number, ticket, group)
    assert (got.first_layer, got.num_layers, got.nbytes) == rest
    if ranged:
        assert len(body) == 48


@given(st.binary(max_size=200))
def test_foreign_bytes_are_no_request(data: bytes) -> None:
    if len(data) >= 48:
        try:
            got = unpack_request(data)
        except BadFrame:
            return
        assert 1 <= got.indices.size <= MAX_COUNT
        assert data[0] == Kind.REQUEST


@pytest.mark.parametrize("length", [0, 47, 48 + 4 * MAX_COUNT + 1, 2**31, 2**32 - 1])
def test_lengths_are_checked_before_anything_is_read(length: int) -> None:
    with pytest.raises(BadFrame, match=str(length)):
        request_length(length.to_bytes(4, "little"))


def test_heads_survive_the_wire_and_long_text_is_cut() -> None:
    head = Head(Kind.ABORT, 9, 0, "fenced", "slot 3 " * 200)
    data = pack_head(head)
    got, code, detail = unpack_head(data[:HEAD_BYTES])
    assert (got.kind, got.request, code, detail) == (Kind.ABORT, 9, 6, 512)
    assert data[HEAD_BYTES : HEAD_BYTES + code] == b"fenced"
    assert len(data) == HEAD_BYTES + code + detail
    for bad in (b"\x01" + data[1:HEAD_BYTES], b"\xff" * HEAD_BYTES):
        with pytest.raises(BadFrame):
            unpack_head(bad)


def test_preambles() -> None:
    check_preamble(preamble())
    with pytest.raises(BadFrame, match="not a data connection"):
        check_preamble(b"HTTP/1.1")
    with pytest.raises(BadFrame, match=r"data protocol 2\.0, this is 1\.1"):
        check_preamble(b"KVDD\x02\x00\x00\x00")
    check_preamble(b"KVDD\x01\x00\x07\x00")  # a newer minor is fine
