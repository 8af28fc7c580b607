"""Opening, sharing and unmapping an engine's memory."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvd.errors import MemoryRefused
from kvd.memory.engine import EngineMemory
from kvd.memory.segments import register_importer
from kvd.protocol.codes import Code
from kvd.protocol.peer import SegmentInfo
from kvd.protocol.types import LayerLayout, Region

PAGE = mmap.PAGESIZE
NAME = "kvd-test-unmap"


def memfd(nbytes: int, name: str = NAME) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


def info(segment: int, nbytes: int, kind: str = "memfd") -> SegmentInfo:
    return SegmentInfo(segment=segment, kind=kind, nbytes=nbytes, device="cpu")  # type: ignore[arg-type]


def layer(name: str, *regions: tuple[int, int, int, int], group: int = 0) -> LayerLayout:
    return LayerLayout(name=name, group=group, regions=[Region(*region) for region in regions])


def mapped_lines(name: str = NAME) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if name in line]


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def simple(*, writable: bool = True, slots: int = 16) -> EngineMemory:
    return EngineMemory.open(
        segments=[(info(0, 64 * 1024), memfd(64 * 1024)), (info(5, 8192), memfd(8192))],
        layers=[layer("a", (0, 0, 1024, 1024)), layer("b", (5, 0, 128, 64), (5, 64, 128, 64))],
        num_blocks=64,
        fence=(memfd(8 * slots), slots),
        writable=writable,
    )


@pytest.fixture
def memory() -> Iterator[EngineMemory]:
    opened = simple()
    yield opened
    opened.close_when_unpinned()
    assert opened.wait_closed_blocking(5.0)


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


# --- what is refused ------------------------------------------------------------------------

SEGMENT = 64 * 1024
GOOD = [layer("model.0", (0, 0, 1024, 1024))]


def refuse(
    match: str,
    *,
    layers: list[LayerLayout] | None = None,
    num_blocks: int = 64,
    nbytes: int = SEGMENT,
    infos: list[SegmentInfo] | None = None,
    fence: tuple[int, int] | None = None,
    make: Callable[[int], int] = memfd,
    writable: bool = True,
) -> MemoryRefused:
    before = open_files()
    infos = [info(0, SEGMENT)] if infos is None else infos
    with pytest.raises(MemoryRefused, match=match) as caught:
        EngineMemory.open(
            segments=[(i, make(nbytes)) for i in infos],
            layers=GOOD if layers is None else layers,
            num_blocks=num_blocks,
            fence=None if fence is None else (memfd(fence[0]), fence[1]),
            writable=writable,
        )
    assert open_files() == before, "descriptors were taken over and not closed"
    gc.collect()
    assert mapped_lines() == []
    return caught.value


@pytest.mark.parametrize(
    ("match", "layers"),
    [
        (r"model\.3.* region 0.*65537.*65536", [layer("model.3", (0, 1, 1024, 1024))]),
        (r"model\.3.* region 1.*end at byte", [layer("model.3", (0, 0, 8, 8), (0, 2**62, 8, 8))]),
        (r"model\.3.*stride 1000.*1024", [layer("model.3", (0, 0, 1000, 1024))]),
        (r"model\.3.*0 bytes", [layer("model.3", (0, 0, 1024, 0))]),
        (r"model\.3.*segment 4 was not passed", [layer("model.3", (4, 0, 1024, 1024))]),
        (r"model\.3.*described twice", [layer("model.3", (0, 0, 8, 8)), layer("model.3")]),
        (r"model\.3.*0 regions", [layer("model.3")]),
        (r"model\.3.*65 regions", [layer("model.3", *[(0, 0, 8, 8)] * 65)]),
        (r"model\.3.*group 256", [layer("model.3", (0, 0, 8, 8), group=256)]),
        (r"region 1 overlaps .*region 0", [layer("m", (0, 0, 256, 128), (0, 100, 256, 128))]),
        (r"region 0 overlaps .*region 1", [layer("m", (0, 64, 256, 128), (0, 0, 256, 128))]),
        (r"'b'.* overlaps .*'a'", [layer("a", (0, 0, 512, 512)), layer("b", (0, 0, 512, 512))]),
        (r"'b'.* overlaps .*'a'", [layer("a", (0, 0, 512, 512)), layer("b", (0, 512, 256, 256))]),
        (r"'b'.* overlaps .*'a'", [layer("a", (0, 0, 512, 8)), layer("b", (0, 1020, 512, 8))]),
        ("no layers", []),
        ("4097 layers", [layer(f"l{i}", (0, 8 * i, 8, 8)) for i in range(4097)]),
    ],
)
def test_layers_that_do_not_fit_are_refused_by_name(match: str, layers: list[LayerLayout]) -> None:
    assert refuse(match, layers=layers).code == Code.BAD_MEMORY


def test_segments_that_cannot_be_are_refused(tmp_path: Path) -> None:
    refuse("segment 0: 65536 bytes described, its file has 65535", nbytes=SEGMENT - 1)
    refuse("segment 0: 0 bytes", infos=[info(0, 0)])
    refuse("0 segments", infos=[])
    refuse("segment 7 is described twice", infos=[info(7, SEGMENT), info(7, SEGMENT)])
    refuse("0 blocks", num_blocks=0)
    refuse("4294967295 blocks", num_blocks=2**32 - 1)
    refused = refuse("'cuda_ipc' cannot be used", infos=[info(0, SEGMENT, "cuda_ipc")])
    assert refused.code == Code.UNSUPPORTED
    refuse("not a plain file", make=lambda n: os.open("/dev/zero", os.O_RDWR | os.O_CLOEXEC))
    refuse("not a plain file", make=lambda n: os.open(tmp_path, os.O_RDONLY | os.O_CLOEXEC))

    def read_only(nbytes: int) -> int:
        fd = memfd(nbytes)
        try:
            return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(fd)

    refuse("not open for reading and writing", make=read_only)


def test_fence_tables_that_cannot_be_are_refused() -> None:
    refuse("fence table: 0 slots", fence=(128, 0))
    refuse("fence table: 136 bytes described, its file has 128", fence=(128, 17))
    refuse(r"fence table: 16777217 slots", fence=(128, 2**24 + 1))


def test_layouts_that_only_look_like_overlap_are_taken() -> None:
    good = [
        # K and V in turns, within each block
        [layer("a", (0, 0, 512, 256), (0, 256, 512, 256))],
        # all layers within each block
        [layer(f"l{i}", (0, 128 * i, 1024, 128)) for i in range(8)],
        # two groups in one pool, kept apart by their block tables
        [layer("a", (0, 0, 512, 512)), layer("b", (0, 0, 1024, 1024), group=1)],
        # one after the other
        [layer("a", (0, 0, 256, 256)), layer("b", (0, 64 * 256, 512, 512))],
    ]
    for layers in good:
        opened = EngineMemory.open(
            segments=[(info(0, SEGMENT), memfd(SEGMENT))],
            layers=layers,
            num_blocks=64,
            fence=None,
            writable=True,
        )
        opened.close_when_unpinned()
        assert opened.wait_closed_blocking(5.0)


def test_a_full_tmpfs_is_refused_and_is_no_bus_error() -> None:
    class Full:
        def check(self, info: SegmentInfo, fd: int, *, writable: bool) -> None: ...

        def map(self, info: SegmentInfo, fd: int, space: object, offset: int) -> None:
            from kvd.memory.host import Reservation
            from kvd.memory.segments import map_file

            assert isinstance(space, Reservation)
            map_file("segment 0", fd, info.nbytes, space, offset)

    # A mapping that goes on behind the file's end faults just as a full tmpfs does.
    register_importer("test_beyond_the_end", Full())
    try:
        refused = refuse(
            "is /dev/shm or the memory limit too small",
            infos=[info(0, SEGMENT, "test_beyond_the_end")],
            nbytes=PAGE,
        )
    finally:
        from kvd.memory import segments

        del segments._importers["test_beyond_the_end"]
    assert refused.code == Code.NO_SPACE


def test_a_mapped_segment_cannot_be_shrunk_where_sealing_is_allowed() -> None:
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SEGMENT)
    opened = EngineMemory.open(
        segments=[(info(0, SEGMENT), os.dup(fd))],
        layers=GOOD,
        num_blocks=64,
        fence=None,
        writable=True,
    )
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
    opened.close_when_unpinned()
    assert opened.wait_closed_blocking(5.0)


# --- sharing --------------------------------------------------------------------------------

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


# --- pins and unmapping ---------------------------------------------------------------------


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


# --- fence ----------------------------------------------------------------------------------


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
