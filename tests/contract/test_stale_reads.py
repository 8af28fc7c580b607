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
from collections.abc import Callable, Iterator

import pytest

from kvd.protocol.codes import Code
from kvd.transport.base import TransportError
from tests.contract.conftest import Connect
from tests.contract.harness import TcpHarness
from tests.contract.reuser import byte_of
from tests.contract.rig import SLOT, TICKET, Rig, Shape
from tests.plugins.waiting import wait_for

SHAPE = Shape(tuple((0, (16_384,)) for _ in range(4)))
BLOCKS = 32
ENOUGH = 150
"""Copies of each outcome that must have been seen."""
MOST = 200_000


@contextlib.contextmanager
def owner(rig: Rig) -> Iterator[Callable[[], int]]:
    """The program, started; gives a function that says which word is offered now."""
    board_fd = os.memfd_create("kvd-test-board", os.MFD_CLOEXEC)
    os.ftruncate(board_fd, 16)
    board = mmap.mmap(board_fd, 16)

    def offered() -> int:
        return int.from_bytes(board[:8], "little")

    rig.src.fence[SLOT] = 0
    fds = [*rig.src.descriptors(), board_fd]
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.contract.reuser", *map(str, fds)],
        pass_fds=fds,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    try:
        wait_for(offered, what="the owner's first word")
        yield offered
    finally:
        board[8] = 1
        try:
            child.wait(20)
        finally:
            child.kill()
            child.wait(20)
        os.close(board_fd)
        board.close()


async def test_a_reader_never_accepts_reused_blocks(connect: Connect, transport: str) -> None:
    if transport not in ("shm", "tcp"):
        pytest.skip("the fake copies on the loop, block by block; tcp6 is tcp")
    async with connect(SHAPE, (BLOCKS, BLOCKS)) as (rig, harness):
        piece = rig.piece(0, range(BLOCKS), range(BLOCKS))
        puller = harness.puller()
        seen: Counter[str] = Counter()
        with owner(rig) as offered:
            while min(seen["accepted"], seen["fenced"]) < ENOUGH:
                assert seen.total() < MOST, seen
                word = offered()
                if isinstance(harness, TcpHarness):
                    view = harness.view([range(BLOCKS)])
                    view.fence_word = word
                    harness.server.open_ticket(TICKET, view)
                try:
                    await puller.pull(rig.job(piece, word=word))
                except TransportError as exc:
                    if exc.code != Code.FENCED:
                        raise
                    seen["fenced"] += 1
                    continue
                right = all((segment == byte_of(word)).all() for segment in rig.dst.segments)
                seen["accepted" if right else "wrong"] += 1
        assert seen["wrong"] == 0, seen
