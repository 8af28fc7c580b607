"""A daemon that damages what it fetches: the demo's negative control, and nothing else's.

`python -m kvd.demo.damage serve ...` is `kvd serve ...` with one difference: after the first copy
of each fetch, the bytes of one block in one layer are changed before the engine is told that its
KV is there. If answers stayed the same after that, comparing them would prove nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

import numpy as np

from kvd.memory.engine import EngineMemory
from kvd.transport.base import PullJob

MAX_REMEMBERED = 65_536
HIGHEST_BIT = np.uint8(0x80)


class Puller(Protocol):
    """A puller that lets us at the memory of its own engine."""

    local: EngineMemory


Pull = Callable[[Any, PullJob], Coroutine[Any, Any, int]]


def damaging(pull: Pull) -> Pull:
    """`pull`, followed by the damage for each fetch's first job."""
    seen: set[str] = set()

    async def pull_and_damage(self: Puller, job: PullJob) -> int:
        nbytes = await pull(self, job)
        if job.fetch_id not in seen:
            if len(seen) >= MAX_REMEMBERED:
                seen.clear()
            seen.add(job.fetch_id)
            damage(self.local, job)
        return nbytes

    return pull_and_damage


def damage(memory: EngineMemory, job: PullJob) -> None:
    """Change the job's first destination block in the middle one of its layers.

    The highest bit of each byte is turned over: signs are swapped and sizes halved or doubled,
    while zeros (a partial block's rest) do not become anything that would spoil all arithmetic.
    """
    piece = job.pieces[0]
    block = int.from_bytes(piece.dst[:4], "little")
    layers = [
        layer
        for layer in range(piece.first_layer, piece.first_layer + piece.num_layers)
        if memory.layers[layer].group == piece.group
    ]
    table = memory.tables[piece.group]
    rows = table.rows(layers[len(layers) // 2], 1)
    regions = zip(table.offset[rows], table.stride[rows], table.nbytes[rows], strict=True)
    with memory.pinned():
        for offset, stride, nbytes in regions:
            view = memory.view(int(offset + block * stride), (int(nbytes),), (1,))
            np.bitwise_xor(view, HIGHEST_BIT, out=view)
            del view


def install(pullers: Iterable[type[Any]]) -> None:
    """Make all pullers of these classes, in this process, damage what they pull."""
    for puller in pullers:
        puller.pull = damaging(puller.pull)


def main() -> int:
    """Run the kvd command with damaging pullers."""
    from kvd.cli import main as kvd
    from kvd.transport.shm import ShmPuller
    from kvd.transport.tcp_puller import TcpPuller

    install([ShmPuller, TcpPuller])
    return kvd(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
