"""Exceptions of the daemon. Each carries a `code` from `kvd.protocol.codes`."""

from __future__ import annotations

from kvd.protocol.codes import Code


class KvdError(Exception):
    """Base: `code` says what kind, `detail` names the thing and the way out."""

    code: Code = Code.INTERNAL

    def __init__(self, detail: str, code: Code | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        if code is not None:
            self.code = code


class ConfigError(KvdError):
    """A setting that is unknown or has a bad value. Exit status 78 (EX_CONFIG)."""

    code = Code.UNSUPPORTED


class MemoryRefused(KvdError):
    """Memory or a layout that cannot be used as it was described."""

    code = Code.BAD_MEMORY


class ProtocolError(KvdError):
    """A message that does not belong; the connection it came on is closed."""

    code = Code.BAD_MESSAGE
