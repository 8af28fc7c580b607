"""The one list of outcome codes: log key, metric label and wire value are the same string.

The shim imports this module, so it needs nothing but the standard library.
"""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    """How something ended. `OK` is the only success."""

    OK = "ok"

    # The transfer is not there, or is no longer the one that was asked for.
    UNKNOWN_TRANSFER = "unknown_transfer"
    STALE_GENERATION = "stale_generation"
    STALE_EPOCH = "stale_epoch"
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"
    RANGE_NOT_HELD = "range_not_held"
    UNALIGNED_RANGE = "unaligned_range"
    PROMPT_MISMATCH = "prompt_mismatch"
    FENCED = "fenced"

    # The other side.
    PEER_UNREACHABLE = "peer_unreachable"
    PEER_LOST = "peer_lost"
    PEER_NOT_ALLOWED = "peer_not_allowed"
    UNKNOWN_ENGINE = "unknown_engine"
    GEOMETRY_MISMATCH = "geometry_mismatch"
    VERSION_MISMATCH = "version_mismatch"
    TRANSPORT_UNAVAILABLE = "transport_unavailable"
    TRANSPORT_ERROR = "transport_error"
    INTEGRITY = "integrity"

    # This side.
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    ENGINE_GONE = "engine_gone"
    DAEMON_GONE = "daemon_gone"
    DRAINING = "draining"
    OVERLOADED = "overloaded"
    NOT_REGISTERED = "not_registered"
    DUPLICATE = "duplicate"
    BAD_MESSAGE = "bad_message"
    BAD_MEMORY = "bad_memory"
    NO_SPACE = "no_space"
    UNSUPPORTED = "unsupported"
    INTERNAL = "internal"


RETRYABLE: frozenset[Code] = frozenset(
    {
        Code.PEER_UNREACHABLE,
        Code.PEER_LOST,
        Code.TRANSPORT_ERROR,
        Code.DEADLINE,
        Code.DAEMON_GONE,
        Code.DRAINING,
        Code.OVERLOADED,
        Code.FENCED,
        Code.REVOKED,
    }
)
"""Codes after which the same request, prefilled again, may well succeed."""
