"""The seam that every transport is built behind.

A transport has two ends. The consumer's daemon opens a `Puller` per attachment and runs pull jobs
on it; it is the only writer of its engine's memory. The producer's daemon may have to run a
`DataServer`, which reads its engine's memory for those who hold a ticket. Foreign exceptions stop
here: everything that leaves is a `TransportError` with a code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvd.core.instructions import Piece
from kvd.memory.engine import EngineMemory
from kvd.protocol.codes import Code
from kvd.protocol.types import Watermark


class TransportError(Exception):
    """A pull or an opening that failed; `code` is from the common list."""

    def __init__(self, code: Code, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


@dataclass(frozen=True, slots=True)
class PullJob:
    """One unit of copying; see `kvd.core.instructions.StartPull`."""

    job: int
    fetch_id: str
    ticket: bytes
    fence_slot: int
    fence_word: int
    pieces: tuple[Piece, ...]
    nbytes: int


class Puller(Protocol):
    """The consumer's end of one attachment."""

    async def pull(self, job: PullJob) -> int:
        """Copy the job's pieces into the local engine's blocks; returns the bytes copied.

        Raises TransportError (FENCED if the fence word was wrong before or after), and only once
        no byte of this job can land any more. Never waits longer than the configured data
        timeout without progress. Not to be cancelled: use `stop`.
        """
        ...

    def stop(self, fetch_id: str) -> None:
        """Make the fetch's running and queued pulls end soon, with CANCELLED."""
        ...

    async def aclose(self) -> None:
        """Ends everything; returns when nothing is read or written any more."""
        ...


@dataclass(slots=True)
class TicketView:
    """What one ticket admits to. The data server's threads read it; only the loop replaces it.

    `blocks[g]`: packed source ids; entry i is index i of the fetch, and block `first_index + i`
    of the producer's table. `valid` are in producer tokens; `block_size`, tokens per block, lets
    the server check them (with 0 it can only check that the layers have a watermark at all).
    """

    memory: EngineMemory
    fence_slot: int
    fence_word: int
    first_index: int
    blocks: tuple[bytes, ...]
    valid: tuple[Watermark, ...]
    block_size: int = 0


class DataServer(Protocol):
    """The producer's end, for transports that move bytes through it."""

    port: int

    def open_ticket(self, ticket: bytes, view: TicketView) -> None: ...

    def close_ticket(self, ticket: bytes) -> None: ...

    async def aclose(self) -> None: ...
