"""An owner that re-uses its blocks at once: run as a program, beside a reader.

Arguments: the descriptors of the segment, the fence table and the board. It arms the fence word,
leaves the blocks alone for a moment of random length, takes the word back, and fills the blocks
with the next word's byte. The board's first word is what is offered now; it ends when the second
is set; the third counts the reader's copies that have ended.
"""

from __future__ import annotations

import mmap
import random
import sys

import numpy as np

from tests.contract.rig import SLOT


def byte_of(word: int) -> int:
    """What all bytes hold while `word` is armed."""
    return word % 251


def main() -> None:
    segment_fd, fence_fd, board_fd = (int(arg) for arg in sys.argv[1:])
    data = np.frombuffer(mmap.mmap(segment_fd, 0), np.uint8)
    fence = np.frombuffer(mmap.mmap(fence_fd, 0), np.uint64)
    board = np.frombuffer(mmap.mmap(board_fd, 0), np.uint64)
    word = 1
    while not board[1]:
        word += 1
        data[:] = byte_of(word)
        fence[SLOT] = word
        board[0] = word
        if not random.randrange(4):
            # For a whole copy, however slow the reader is. The next is under way, then.
            ended = board[2]
            while board[2] < ended + 2 and not board[1]:
                pass
        for _ in range(random.randrange(10 ** random.randrange(2, 6))):
            if board[1]:
                break
        fence[SLOT] = 0


if __name__ == "__main__":
    main()
