"""Envelopes between daemons: encoding, and decoding in two steps.

The head (version, epoch) is read before the body, so that a daemon of another major version is
refused for its version, not for a body that we cannot read.
"""

from __future__ import annotations

import msgspec

from kvd.errors import ProtocolError
from kvd.protocol import peer
from kvd.protocol.codes import Code
from kvd.protocol.types import U32, U63
from kvd.protocol.version import PROTO_MAJOR, PROTO_MINOR


class _Head(msgspec.Struct, frozen=True, array_like=True):
    major: U32
    minor: U32
    epoch: U63
    body: msgspec.Raw


_head_decoder = msgspec.msgpack.Decoder(_Head)
_to_producer = msgspec.msgpack.Decoder(peer.ToProducer)
_to_consumer = msgspec.msgpack.Decoder(peer.ToConsumer)
_encoder = msgspec.msgpack.Encoder()


def encode_to_producer(epoch: int, body: peer.ToProducer) -> bytes:
    """What a DEALER sends; `epoch` is our boot id. Raises ProtocolError when it is too long."""
    return _checked(_encoder.encode(peer.ProducerEnvelope(PROTO_MAJOR, PROTO_MINOR, epoch, body)))


def encode_to_consumer(epoch: int, body: peer.ToConsumer) -> bytes:
    """What a ROUTER sends; `epoch` is our boot id. Raises ProtocolError when it is too long."""
    return _checked(_encoder.encode(peer.ConsumerEnvelope(PROTO_MAJOR, PROTO_MINOR, epoch, body)))


def decode_to_producer(data: bytes) -> tuple[int, peer.ToProducer]:
    """(epoch, body). Raises ProtocolError: VERSION_MISMATCH, or BAD_MESSAGE."""
    head = _decode_head(data)
    try:
        return head.epoch, _to_producer.decode(head.body)
    except msgspec.MsgspecError as e:
        raise ProtocolError(f"not a message of ours: {str(e)[:200]}") from None


def decode_to_consumer(data: bytes) -> tuple[int, peer.ToConsumer]:
    """(epoch, body). Raises ProtocolError: VERSION_MISMATCH, or BAD_MESSAGE."""
    head = _decode_head(data)
    try:
        return head.epoch, _to_consumer.decode(head.body)
    except msgspec.MsgspecError as e:
        raise ProtocolError(f"not a message of ours: {str(e)[:200]}") from None


def _decode_head(data: bytes) -> _Head:
    try:
        head = _head_decoder.decode(data)
    except msgspec.MsgspecError as e:
        raise ProtocolError(f"not an envelope of ours: {str(e)[:200]}") from None
    if head.major != PROTO_MAJOR:
        raise ProtocolError(
            f"proto_major: the other daemon speaks {head.major}.{head.minor}, "
            f"this one {PROTO_MAJOR}.{PROTO_MINOR}",
            Code.VERSION_MISMATCH,
        )
    return head


def _checked(data: bytes) -> bytes:
    if len(data) > peer.MAX_FRAME:
        raise ProtocolError(
            f"a message of {len(data)} bytes, at most {peer.MAX_FRAME} are possible",
            Code.OVERLOADED,
        )
    return data


def code_of(text: str) -> Code:
    """A peer's reason to refuse as one of ours; what we do not know, or ok, is INTERNAL."""
    try:
        code = Code(text)
    except ValueError:
        return Code.INTERNAL
    return Code.INTERNAL if code is Code.OK else code
