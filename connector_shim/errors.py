"""The one exception that the client raises at its caller."""

from __future__ import annotations

from kvd.protocol.codes import Code


class ClientError(Exception):
    """A call that could not be carried out. `code` says what kind, `detail` names the way out."""

    def __init__(self, code: Code, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
