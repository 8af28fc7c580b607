"""Checksums of engine memory, for `verify = crc`: CRC-32C over stretches, in their order."""

from __future__ import annotations

from collections.abc import Callable

from crc32c import crc32c

from kvd.memory.engine import EngineMemory
from kvd.memory.plan import Ids, addresses
from kvd.transport.iov import Stretches

CALL_BYTES = 4 * 2**20
"""Most bytes between two looks at whether to go on."""

Checksum = int


def stretches_crc(
    memory: EngineMemory, stretches: Stretches, go_on: Callable[[], bool]
) -> Checksum | None:
    """Over (address, bytes) of memory that is pinned; None as soon as `go_on` says no.

    Works without the GIL, however short a stretch is.
    """
    crc = 0
    budget = CALL_BYTES
    for address, nbytes in stretches.tolist():
        for at in range(0, nbytes, CALL_BYTES):
            part = min(nbytes - at, CALL_BYTES)
            if budget <= 0:
                if not go_on():
                    return None
                budget = CALL_BYTES
            view = memory.view(address - memory.address + at, (part,), (1,))
            crc = crc32c(view.data, crc, gil_release_mode=1)
            budget -= part
    return crc


def blocks_crc(
    memory: EngineMemory,
    group: int,
    first_layer: int,
    num_layers: int,
    ids: Ids,
    go_on: Callable[[], bool],
) -> Checksum | None:
    """The same over blocks, in the order block, layer, region."""
    return stretches_crc(memory, addresses(memory, group, first_layer, num_layers, ids), go_on)
