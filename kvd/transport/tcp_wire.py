"""Frames of a data connection.

Both ends first send a preamble. The consumer then sends requests, as many ahead as it likes; the
producer answers them in order: a head, for DATA followed by the bytes (in the order block, layer,
region) and a COMMIT or ABORT, or a REFUSED head alone. Where the request asked for it, a COMMIT is
followed by the checksum of the bytes (since 1.1). All numbers are little-endian.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import numpy as np

from kvd.memory.plan import Ids
from kvd.protocol.codes import Code

MAGIC = b"KVDD"
TLS_ALERT = b"\x15\x03"
"""What a data port that speaks TLS answers to one who does not."""
MAJOR = 1
MINOR = 1
MINOR_CHECKED = 1
MAX_COUNT = 16_384
"""Most blocks of one request."""
MAX_DETAIL = 512

_PREAMBLE = struct.Struct("<4sHH")
PREAMBLE_BYTES = _PREAMBLE.size
_LENGTH = struct.Struct("<I")
_REQUEST = struct.Struct("<BBHI16sIIQII")
LENGTH_BYTES = _LENGTH.size
_CRC = struct.Struct("<I")
CRC_BYTES = _CRC.size
_LISTED, _CHECKED = 1, 2
MIN_REQUEST = _REQUEST.size
MAX_REQUEST = _REQUEST.size + 4 * MAX_COUNT
_HEAD = struct.Struct("<BBHIQ")
HEAD_BYTES = _HEAD.size


class BadFrame(Exception):
    """A frame that does not belong; the connection is closed."""


class Kind(enum.IntEnum):
    """What a frame is."""

    REQUEST = 1
    DATA = 2
    REFUSED = 3
    COMMIT = 4
    ABORT = 5


@dataclass(frozen=True, slots=True)
class Request:
    """Asks for blocks of one group in a run of layers, by index within the fetch.

    `nbytes` is what the consumer has room for: both ends must come to the same number. `checked`
    asks for a checksum.
    """

    request: int
    ticket: bytes
    group: int
    first_layer: int
    num_layers: int
    nbytes: int
    indices: Ids
    checked: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    """Start or end of an answer; `code` and `detail` come with REFUSED and ABORT."""

    kind: Kind
    request: int
    nbytes: int = 0
    code: str = ""
    detail: str = ""


def preamble() -> bytes:
    return _PREAMBLE.pack(MAGIC, MAJOR, MINOR)


def check_preamble(data: bytes, *, checked: bool = False) -> None:
    """Raises BadFrame unless the other end speaks this protocol, with checksums if `checked`."""
    magic, major, minor = _PREAMBLE.unpack(data)
    if data[:2] == TLS_ALERT:
        raise BadFrame("it asks for TLS (tls_cert)")
    if magic != MAGIC:
        raise BadFrame("not a data connection of kvd")
    if major != MAJOR or (checked and minor < MINOR_CHECKED):
        what = " with verify" if checked else ""
        raise BadFrame(f"data protocol {major}.{minor}, this is {MAJOR}.{MINOR}{what}")


def pack_request(request: Request) -> bytes:
    """A request frame; indices that count up by one are sent as a range."""
    indices = request.indices
    count = int(indices.size)
    first = int(indices[0]) if count else 0
    ranged = bool(np.array_equal(indices, np.arange(first, first + count, dtype=np.int64)))
    body = _REQUEST.pack(
        Kind.REQUEST,
        (0 if ranged else _LISTED) | (_CHECKED if request.checked else 0),
        request.group,
        request.request,
        request.ticket,
        request.first_layer,
        request.num_layers,
        request.nbytes,
        first,
        count,
    )
    listed = b"" if ranged else indices.astype("<u4").tobytes()
    return _LENGTH.pack(len(body) + len(listed)) + body + listed


def request_length(data: bytes) -> int:
    """Bytes of the request that follows; raises BadFrame before any of it is read."""
    (length,) = _LENGTH.unpack(data)
    if not MIN_REQUEST <= length <= MAX_REQUEST:
        raise BadFrame(f"request of {length} bytes")
    return int(length)


def unpack_request(data: bytes) -> Request:
    """Raises BadFrame."""
    kind, mode, group, number, ticket, first_layer, num_layers, nbytes, first, count = (
        _REQUEST.unpack_from(data)
    )
    if kind != Kind.REQUEST or mode & ~(_LISTED | _CHECKED):
        raise BadFrame(f"frame of kind {kind}, mode {mode}")
    listed = bool(mode & _LISTED)
    if not 1 <= count <= MAX_COUNT or (not listed and first + count > 2**32 - 1):
        raise BadFrame(f"blocks [{first}, {first + count})")
    if len(data) != MIN_REQUEST + (4 * count if listed else 0):
        raise BadFrame(f"request for {count} blocks in {len(data)} bytes")
    indices: Ids
    if listed:
        indices = np.frombuffer(data, "<u4", offset=MIN_REQUEST)
    else:
        indices = np.arange(first, first + count, dtype=np.uint32)
    checked = bool(mode & _CHECKED)
    return Request(number, ticket, group, first_layer, num_layers, nbytes, indices, checked)


def pack_head(head: Head) -> bytes:
    """A head, and the text that belongs to it."""
    code = head.code.encode()[:255]
    detail = head.detail.encode()[:MAX_DETAIL]
    packed = _HEAD.pack(head.kind, len(code), len(detail), head.request, head.nbytes)
    return packed + code + detail


def unpack_head(data: bytes) -> tuple[Head, int, int]:
    """The head, and the bytes of its code and of its detail that follow; raises BadFrame."""
    kind, code, detail, request, nbytes = _HEAD.unpack(data)
    if kind not in (Kind.DATA, Kind.REFUSED, Kind.COMMIT, Kind.ABORT) or detail > MAX_DETAIL:
        raise BadFrame(f"answer of kind {kind} with {detail} bytes of text")
    return Head(Kind(kind), request, nbytes), code, detail


def pack_crc(crc: int) -> bytes:
    return _CRC.pack(crc)


def unpack_crc(data: bytes) -> int:
    (crc,) = _CRC.unpack(data)
    return int(crc)


def code_of(text: str) -> Code:
    """A code that the other end named; one that this version does not know is a plain error."""
    try:
        return Code(text)
    except ValueError:
        return Code.TRANSPORT_ERROR
