"""Memory that cannot be what it is said to be."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvd.errors import MemoryRefused
from kvd.memory.engine import EngineMemory
from kvd.memory.segments import register_importer
from kvd.protocol.codes import Code
from kvd.protocol.peer import SegmentInfo
from kvd.protocol.types import LayerLayout
from tests.unit.memory.parts import (
    GOOD,
    NAME,
    PAGE,
    SEGMENT,
    info,
    layer,
    mapped_lines,
    memfd,
    open_files,
)


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
