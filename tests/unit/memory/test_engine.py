"""Opening, pinning and unmapping an engine's memory."""

from __future__ import annotations

import asyncio
import gc
import os
import threading

import pytest

from kvd.errors import MemoryRefused
from kvd.memory.engine import EngineMemory
from tests.unit.memory.parts import (
    info,
    layer,
    mapped_lines,
    memfd,
    open_files,
    simple,
)


def test_what_it_says_about_itself(memory: EngineMemory) -> None:
    assert memory.nbytes == 64 * 1024 + 8192
    assert (memory.num_layers, memory.num_groups, memory.num_blocks) == (2, 1, 64)
    assert memory.fence_slots == 16
    assert memory.block_nbytes(0) == 1024 + 128
    assert memory.block_nbytes(0, 1) == 128
    assert memory.block_nbytes(0, 0, 1) == 1024
    assert memory.block_nbytes(0, 1, 0) == 0
    for bad in ((1, 0, 2), (0, 1, 2), (0, -1, 1), (0, 3, 0)):
        with pytest.raises(MemoryRefused):
            memory.block_nbytes(*bad)


def test_a_group_without_layers_here_has_no_bytes() -> None:
    opened = EngineMemory.open(
        segments=[(info(0, 4096), memfd(4096))],
        layers=[layer("a", (0, 0, 64, 64), group=2)],
        num_blocks=8,
        fence=None,
        writable=False,
    )
    assert opened.num_groups == 3
    assert [opened.block_nbytes(g) for g in range(3)] == [0, 0, 64]
    with pytest.raises(MemoryRefused):
        opened.fence_word(0)
    opened.close_when_unpinned()
    assert opened.wait_closed_blocking(5.0)


def test_closing_unmaps_and_closes_everything() -> None:
    before = open_files()
    opened = simple()
    assert len(mapped_lines()) == 3
    assert not opened.closed
    opened.close_when_unpinned()
    opened.close_when_unpinned()
    assert opened.wait_closed_blocking(5.0)
    assert mapped_lines() == []
    assert open_files() == before
    with pytest.raises(MemoryRefused):
        opened.pin()
    with pytest.raises(MemoryRefused):
        opened.share()
    with pytest.raises(MemoryRefused):
        opened.fence_word(0)
    with pytest.raises(MemoryRefused):
        opened.view(0, (1,), (1,))


def test_a_pin_keeps_the_memory_mapped() -> None:
    opened = simple()
    opened.pin()
    opened.pin()
    opened.close_when_unpinned()
    assert opened.closing
    opened.unpin()
    assert not opened.wait_closed_blocking(0.01)
    assert len(mapped_lines()) == 3
    assert opened.fence_word(3) == 0
    opened.unpin()
    assert opened.wait_closed_blocking(5.0)
    assert mapped_lines() == []
    with pytest.raises(RuntimeError, match="unpin without pin"):
        opened.unpin()


def test_a_forgotten_view_delays_unmapping_and_never_dangles() -> None:
    opened = simple()
    view = opened.view(0, (64, 1024), (1024, 1))[3:5]
    opened.close_when_unpinned()
    assert not opened.wait_closed_blocking(0.05)
    assert view.sum() == 0  # would be a fault
    del view
    assert opened.wait_closed_blocking(5.0)
    assert mapped_lines() == []


def test_memory_that_is_dropped_without_closing_is_unmapped() -> None:
    opened = simple()
    assert len(mapped_lines()) == 3
    fds = list(opened._fds)
    del opened
    gc.collect()
    assert mapped_lines() == []
    for fd in fds:
        os.close(fd)


async def test_waiting_on_the_loop() -> None:
    opened = simple()
    opened.pin()
    opened.close_when_unpinned()
    assert not await opened.wait_closed(0.01)
    waiting = asyncio.ensure_future(opened.wait_closed(5.0))
    await asyncio.sleep(0)
    opened.unpin()
    assert await waiting
    assert await opened.wait_closed(0.0)
    assert mapped_lines() == []


def test_pins_from_many_threads() -> None:
    opened = simple()
    start = threading.Barrier(9)
    refused = 0
    lock = threading.Lock()

    def use() -> None:
        nonlocal refused
        start.wait()
        for _ in range(400):
            try:
                with opened.pinned():
                    assert opened.fence_word(1) == 0
            except MemoryRefused:
                with lock:
                    refused += 1

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    start.wait()
    opened.close_when_unpinned()
    for thread in threads:
        thread.join(30)
    assert opened.wait_closed_blocking(5.0)
    assert refused > 0
    assert mapped_lines() == []
