"""Small engines' memories to be taken apart."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from kvd.memory.engine import EngineMemory
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


SEGMENT = 64 * 1024
GOOD = [layer("model.0", (0, 0, 1024, 1024))]
