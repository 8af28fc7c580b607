"""What all parts of the core share during one `handle`: the time, the settings, the way out."""

from __future__ import annotations

from collections.abc import Callable

from kvd.core.config import CoreConfig
from kvd.core.deadlines import Deadlines
from kvd.core.instructions import Instruction, Record, SendClient, SendPeer
from kvd.protocol import peer
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr


class Refusal(Exception):
    """Input that is answered with a code. Raised and caught within the core only."""

    def __init__(self, code: Code, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


def failure_code(text: str) -> Code:
    """A peer's or transport's code as one of ours; a failure is never taken for a success."""
    try:
        code = Code(text)
    except ValueError:
        return Code.INTERNAL
    return Code.INTERNAL if code is Code.OK else code


class Context:
    """One per core. `now` is set by `handle`; instructions collect in `out`."""

    def __init__(self, config: CoreConfig, boot_id: int, token: Callable[[], bytes]) -> None:
        self.config = config
        self.boot_id = boot_id
        self.token = token
        self.now = 0.0
        self.out: list[Instruction] = []
        self.deadlines = Deadlines()
        self.draining = False
        self._count = 0

    def emit(self, instruction: Instruction) -> None:
        self.out.append(instruction)

    def to_client(self, client: int, message: peer.ToConsumer) -> None:
        self.out.append(SendClient(client, message))

    def to_peer(self, addr: PeerAddr, message: peer.ToProducer) -> None:
        self.out.append(SendPeer(addr, message))

    def record(self, kind: str, **fields: object) -> None:
        self.out.append(Record(kind, fields))

    def refused(self, code: Code, what: str, detail: str) -> None:
        self.record("refused", code=str(code), what=what, detail=detail)

    def late(self, what: str) -> None:
        self.record("late", what=what)

    def number(self) -> int:
        """A new number, unique in this core."""
        self._count += 1
        return self._count
