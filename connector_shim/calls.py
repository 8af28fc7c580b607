"""What the calls of a producer and those of a consumer both stand on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from connector_shim.errors import ClientError
from connector_shim.frames import pack_blocks
from connector_shim.memory import MemoryDescription
from connector_shim.session import Session
from connector_shim.tracking import Tracker
from kvd.protocol.codes import Code


class Calls:
    """Set up by `Client`; nothing here waits or raises anything but ClientError."""

    _tracker: Tracker
    _session: Session
    _clock: Callable[[], float]
    _memory: MemoryDescription | None
    _closed: bool

    def _check_open(self) -> None:
        if self._closed:
            raise ClientError(Code.CANCELLED, "the client is closed")

    def _check_connected(self) -> None:
        """Enough for what a draining daemon still does."""
        self._check_open()
        if not self._session.usable:
            raise self._unusable()

    def _check_usable(self) -> None:
        self._check_connected()
        if self._session.draining:
            raise ClientError(Code.DRAINING, "the daemon is draining and takes nothing new")

    def _unusable(self) -> ClientError:
        if self._session.last_error is not None:
            return self._session.last_error
        if self._memory is None:
            return ClientError(Code.NOT_REGISTERED, "no memory was described yet")
        return ClientError(
            Code.NOT_REGISTERED, f"not registered with the daemon yet ({self._session.phase.value})"
        )

    def _pack(self, blocks: Sequence[Sequence[int]]) -> tuple[bytes, ...]:
        """One packed list for each group. Raises ClientError BAD_MEMORY."""
        num_groups = self._memory.num_groups if self._memory is not None else 0
        if len(blocks) > num_groups:
            raise ClientError(
                Code.BAD_MEMORY,
                f"{len(blocks)} groups of blocks, but the memory has {num_groups}",
            )
        return tuple(self._pack_group(group, ids) for group, ids in enumerate(blocks))

    def _pack_group(self, group: int, ids: Sequence[int]) -> bytes:
        num_blocks = self._memory.num_blocks if self._memory is not None else 0
        return pack_blocks(ids, group=group, num_blocks=num_blocks)
