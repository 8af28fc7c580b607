"""Readers race an owner that re-uses its blocks at once: what they accept is never a mixture.

Without the check after the last byte this fails within a few hundred copies.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import numpy as np

from kvd.protocol.codes import Code
from kvd.transport.base import TransportError
from tests.contract.conftest import Connect
from tests.contract.reuser import byte_of
from tests.contract.rig import SLOT, Rig, Shape
from tests.plugins.waiting import wait_for

SHAPE = Shape(tuple((0, (16_384,)) for _ in range(4)))
BLOCKS = 32
ENOUGH = 150
"""Copies of each outcome that must have been seen."""
MOST = 200_000


class Owner:
    """What the program and the reader tell each other."""

    def __init__(self, board: mmap.mmap) -> None:
        self._words = np.frombuffer(board, np.uint64)

    def offered(self) -> int:
        """The word that is offered now."""
        return int(self._words[0])

    def copied(self) -> None:
        """A copy has ended."""
        self._words[2] += 1

    def end(self) -> None:
        self._words[1] = 1
        del self._words


@contextlib.contextmanager
def owner(rig: Rig) -> Iterator[Owner]:
    """The program, started."""
    board_fd = os.memfd_create("kvd-test-board", os.MFD_CLOEXEC)
    os.ftruncate(board_fd, 24)
    board = mmap.mmap(board_fd, 24)
    told = Owner(board)
    rig.src.fence[SLOT] = 0
    fds = [*rig.src.descriptors(), board_fd]
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.contract.reuser", *map(str, fds)],
        pass_fds=fds,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    try:
        wait_for(told.offered, what="the owner's first word")
        yield told
    finally:
        told.end()
        try:
            child.wait(20)
        finally:
            child.kill()
            child.wait(20)
        os.close(board_fd)
        board.close()


async def test_a_reader_never_accepts_reused_blocks(connect: Connect) -> None:
    async with connect(SHAPE, (BLOCKS, BLOCKS)) as (rig, harness):
        piece = rig.piece(0, range(BLOCKS), range(BLOCKS))
        puller = harness.puller()
        seen: Counter[str] = Counter()
        with owner(rig) as told:
            while min(seen["accepted"], seen["fenced"]) < ENOUGH:
                assert seen.total() < MOST, seen
                word = told.offered()
                harness.admit([range(BLOCKS)], word)
                try:
                    await puller.pull(rig.job(piece, word=word))
                except TransportError as exc:
                    if exc.code != Code.FENCED:
                        raise
                    seen["fenced"] += 1
                    continue
                finally:
                    told.copied()
                right = all((segment == byte_of(word)).all() for segment in rig.dst.segments)
                seen["accepted" if right else "wrong"] += 1
        assert seen["wrong"] == 0, seen
