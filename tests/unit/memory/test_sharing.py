"""Descriptors for peers, and the fence table."""

from __future__ import annotations

import mmap
import os
import stat
import subprocess
import sys

import numpy as np
import pytest

from kvd.errors import MemoryRefused
from kvd.memory.engine import EngineMemory
from tests.unit.memory.parts import (
    GOOD,
    SEGMENT,
    info,
    mapped_lines,
    memfd,
)

AS_NOBODY = """
import mmap, os, sys
os.setresuid(65534, 65534, 65534)
fd = int(sys.argv[1])
for how in ("again", "mapped"):
    try:
        if how == "again":
            os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        else:
            mmap.mmap(fd, 0)
        print(how, "possible")
    except PermissionError:
        print(how, "refused")
print(len(mmap.mmap(fd, 0, prot=mmap.PROT_READ)))
"""


def test_shared_descriptors_are_read_only_for_good(memory: EngineMemory) -> None:
    fds = memory.share()
    try:
        assert len(fds) == 3  # both segments, then the fence table
        sizes = [os.fstat(fd).st_size for fd in fds]
        assert sizes == [64 * 1024, 8192, 16 * 8]
        for fd in fds:
            assert not os.get_inheritable(fd)
            assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o400
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 0)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(fd, b"x")
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become the user that owns the memory")
def test_the_same_user_cannot_open_shared_memory_for_writing_again() -> None:
    fds = [memfd(SEGMENT), memfd(128)]
    for fd in fds:
        os.fchown(fd, 65534, 65534)
    opened = EngineMemory.open(
        segments=[(info(0, SEGMENT), fds[0])],
        layers=GOOD,
        num_blocks=64,
        fence=(fds[1], 16),
        writable=True,
    )
    shared = opened.share()
    try:
        for fd in shared:
            done = subprocess.run(
                [sys.executable, "-c", AS_NOBODY, str(fd)],
                pass_fds=[fd],
                capture_output=True,
                text=True,
                timeout=30,
                check=True,
            )
            assert done.stdout.split("\n")[:2] == ["again refused", "mapped refused"]
    finally:
        for fd in shared:
            os.close(fd)
        opened.close_when_unpinned()
        assert opened.wait_closed_blocking(5.0)


def test_a_peers_memory_is_not_passed_on_and_is_read_only(memory: EngineMemory) -> None:
    fds = memory.share()
    peer = EngineMemory.open(
        segments=[(info(0, 64 * 1024), fds[0]), (info(5, 8192), fds[1])],
        layers=memory.layers,
        num_blocks=64,
        fence=(fds[2], 16),
        writable=False,
    )
    view = peer.view(0, (1024,), (1,))
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    lines = [line for line in mapped_lines() if " r--s " in line]
    assert len(lines) >= 3, "a peer's segments and both fence tables"
    with pytest.raises(MemoryRefused):
        peer.share()
    mine = memory.view(0, (1024,), (1,))
    mine[:3] = (1, 2, 3)
    assert view[:3].tolist() == [1, 2, 3]
    del view, mine
    peer.close_when_unpinned()
    assert peer.wait_closed_blocking(5.0)


def test_fence_words_are_read_as_they_are_written() -> None:
    fd = memfd(8 * 16)
    table = mmap.mmap(fd, 0)
    opened = EngineMemory.open(
        segments=[(info(0, SEGMENT), memfd(SEGMENT))],
        layers=GOOD,
        num_blocks=64,
        fence=(fd, 16),
        writable=True,
    )
    words = np.frombuffer(table, "<u8")
    assert opened.fence_word(15) == 0
    words[15] = 2**63 - 1
    assert opened.fence_word(15) == 2**63 - 1
    assert table[15 * 8 : 16 * 8] == (2**63 - 1).to_bytes(8, "little")
    for slot in (-1, 16, 2**40):
        with pytest.raises(MemoryRefused, match=f"fence slot {slot}"):
            opened.fence_word(slot)
    del words
    table.close()
    opened.close_when_unpinned()
    assert opened.wait_closed_blocking(5.0)


def test_loads_are_kept_in_order_or_the_machine_is_refused() -> None:
    from kvd.memory.fence import load_barrier

    load_barrier("x86_64")()
    with pytest.raises(MemoryRefused, match="riscv64"):
        load_barrier("riscv64")
