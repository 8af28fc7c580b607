"""The fence table: words, slots, seals, and what another mapping sees."""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
import sys
from collections.abc import Iterator

import pytest

from connector_shim import fence
from connector_shim.errors import ClientError
from connector_shim.fence import FenceTable
from kvd.protocol.codes import Code


@pytest.fixture
def table() -> Iterator[FenceTable]:
    made = FenceTable(4)
    yield made
    made.close()


@pytest.fixture
def reader(table: FenceTable) -> Iterator[mmap.mmap]:
    """The table as a daemon maps it."""
    with mmap.mmap(table.fd, table.slots * 8, prot=mmap.PROT_READ) as mapping:
        yield mapping


def word_at(mapping: mmap.mmap, slot: int) -> int:
    return int(struct.unpack_from("<Q", mapping, 8 * slot)[0])


def test_a_word_lives_from_arm_to_drop_for_every_mapping(
    table: FenceTable, reader: mmap.mmap
) -> None:
    slot, word = table.arm("t", 1)
    assert word != fence.DEAD
    assert word_at(reader, slot) == word
    assert table.drop("t", 1)
    assert word_at(reader, slot) == fence.DEAD
    assert not table.drop("t", 1)


def test_a_slot_is_used_again_but_never_a_word(table: FenceTable) -> None:
    seen: list[int] = []
    slots: set[int] = set()
    for generation in range(50):
        slot, word = table.arm("t", generation)
        seen.append(word)
        slots.add(slot)
        table.drop("t", generation)
    assert seen == sorted(set(seen))
    assert slots == set(range(4))


def test_words_of_a_later_table_are_higher(table: FenceTable) -> None:
    _, word = table.arm("t", 1)
    later = FenceTable(1)
    assert later.arm("t", 1)[1] > word
    later.close()


def test_generations_of_one_transfer_have_words_of_their_own(
    table: FenceTable, reader: mmap.mmap
) -> None:
    first, _ = table.arm("t", 1)
    second, word = table.arm("t", 2)
    table.drop("t", 1)
    assert word_at(reader, first) == fence.DEAD
    assert word_at(reader, second) == word


def test_a_full_table_and_a_second_arm_are_refused_and_change_nothing(
    table: FenceTable, reader: mmap.mmap
) -> None:
    for index in range(4):
        table.arm(f"t{index}", 1)
    before = reader[:]
    with pytest.raises(ClientError, match="all 4 slots") as full:
        table.arm("t4", 1)
    with pytest.raises(ClientError, match="offered already") as twice:
        table.arm("t0", 1)
    assert (full.value.code, twice.value.code) == (Code.OVERLOADED, Code.DUPLICATE)
    assert reader[:] == before
    table.drop("t0", 1)
    table.arm("t4", 1)


def test_drop_all_and_close_kill_every_word(table: FenceTable, reader: mmap.mmap) -> None:
    table.arm("a", 1)
    table.arm("b", 1)
    assert table.drop_all() == 2
    assert reader[:] == bytes(32)
    table.arm("c", 1)
    table.close()
    assert reader[:] == bytes(32)


def test_nobody_else_can_write_or_resize_it(table: FenceTable) -> None:
    slot, word = table.arm("t", 1)
    with pytest.raises(OSError, match=r"Operation not permitted|Bad file descriptor"):
        os.pwrite(table.fd, bytes(8), 8 * slot)
    fd = os.open(f"/proc/self/fd/{table.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(fd, bytes(8), 8 * slot)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 32)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 8)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 4096)
    finally:
        os.close(fd)
    assert table.word(slot) == word


def test_a_reader_in_another_process_never_sees_a_torn_word(table: FenceTable) -> None:
    """Words whose halves all differ: a mixture of two would be a third value."""
    script = (
        "import mmap, sys\n"
        "m = memoryview(mmap.mmap(int(sys.argv[1]), 32, prot=mmap.PROT_READ)).cast('Q')\n"
        "sys.stdout.write('.'); sys.stdout.flush()\n"
        "seen = {m[0] for _ in range(200_000)}\n"
        "while m[1] == 0: seen.add(m[0])\n"
        "print(sorted(seen))\n"
    )
    words = memoryview(table._map).cast("Q")
    values = [0x1111111122222222, 0x3333333344444444, 0x5555555566666666]
    words[0] = values[0]
    with subprocess.Popen(
        [sys.executable, "-c", script, str(table.fd)],
        pass_fds=[table.fd],
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.read(1) == "."
        for index in range(100_000):
            words[0] = values[index % 3]
        words[1] = 1
        out, _ = child.communicate(timeout=60)
    words.release()
    seen = {int(value) for value in out.strip("[]\n").split(",")}
    assert seen
    assert seen <= set(values)


def test_machines_whose_stores_cannot_be_ordered_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(ClientError, match="riscv64") as caught:
        FenceTable(4)
    assert caught.value.code is Code.UNSUPPORTED


def test_membarrier_is_used_where_there_is_one_and_its_absence_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    number = {"x86_64": 324, "aarch64": 283}[os.uname().machine]
    monkeypatch.setattr(fence, "_MEMBARRIER_SYSCALL", {"other": number, "without": 100_000})
    fence._find_barrier("other")()
    with pytest.raises(ClientError, match="membarrier") as caught:
        fence._find_barrier("without")
    assert caught.value.code is Code.UNSUPPORTED
