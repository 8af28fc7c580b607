"""Importers of segments, by kind of memory.

An importer checks a descriptor and maps it into an engine's reservation. Kinds without an
importer are refused by name; modules for other kinds register theirs with `register_importer`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from typing import Protocol

from kvd.errors import MemoryRefused
from kvd.memory.host import Reservation
from kvd.protocol.codes import Code
from kvd.protocol.peer import SegmentInfo

_F_ADD_SEALS = 1033
_F_SEAL_SHRINK = 0x0002


class Importer(Protocol):
    """Brings segments of one kind into this process's address space."""

    def check(self, info: SegmentInfo, fd: int, *, writable: bool) -> None:
        """Raises MemoryRefused if `fd` cannot be the segment that `info` describes."""
        ...

    def map(self, info: SegmentInfo, fd: int, space: Reservation, offset: int) -> None:
        """Maps the segment at `offset` of `space`; raises MemoryRefused."""
        ...


class MemfdImporter:
    """memfd, and files of /dev/shm: anything that is a plain file in memory."""

    def check(self, info: SegmentInfo, fd: int, *, writable: bool) -> None:
        check_file(f"segment {info.segment}", fd, info.nbytes, writable=writable)

    def map(self, info: SegmentInfo, fd: int, space: Reservation, offset: int) -> None:
        map_file(f"segment {info.segment}", fd, info.nbytes, space, offset)


def check_file(what: str, fd: int, nbytes: int, *, writable: bool) -> None:
    """Raises MemoryRefused unless `fd` is a plain file of at least `nbytes` bytes.

    If the file's owner allows it, its size is sealed: shrinking a mapped file would kill this
    process by SIGBUS.
    """
    if nbytes <= 0:
        raise MemoryRefused(f"{what}: {nbytes} bytes")
    try:
        info = os.fstat(fd)
        mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError as exc:
        raise MemoryRefused(f"{what}: descriptor {fd}: {exc.strerror}") from None
    if not stat.S_ISREG(info.st_mode):
        raise MemoryRefused(f"{what}: not a plain file (mode {info.st_mode:#o})")
    if mode == os.O_WRONLY or (writable and mode != os.O_RDWR):
        wanted = "reading and writing" if writable else "reading"
        raise MemoryRefused(f"{what}: the descriptor is not open for {wanted}")
    try:
        fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK)
        info = os.fstat(fd)
    except OSError:
        pass
    if info.st_size < nbytes:
        raise MemoryRefused(f"{what}: {nbytes} bytes described, its file has {info.st_size}")


def map_file(what: str, fd: int, nbytes: int, space: Reservation, offset: int) -> None:
    """Maps a checked file; OSErrors become MemoryRefused (NO_SPACE when memory ran out)."""
    try:
        space.map(offset, fd, nbytes)
    except OSError as exc:
        full = exc.errno in (errno.ENOMEM, errno.EFAULT, errno.ENOSPC)
        hint = " (is /dev/shm or the memory limit too small?)" if full else ""
        raise MemoryRefused(
            f"{what}: cannot map {nbytes} bytes: {exc.strerror}{hint}",
            Code.NO_SPACE if full else Code.BAD_MEMORY,
        ) from None


_importers: dict[str, Importer] = {"memfd": MemfdImporter()}


def register_importer(kind: str, importer: Importer) -> None:
    """Makes a further kind of memory usable."""
    _importers[kind] = importer


def importer(info: SegmentInfo) -> Importer:
    """The importer for a segment's kind; raises MemoryRefused (UNSUPPORTED) naming the kind."""
    try:
        return _importers[info.kind]
    except KeyError:
        known = ", ".join(sorted(_importers))
        raise MemoryRefused(
            f"segment {info.segment}: memory of kind {info.kind!r} cannot be used by this daemon"
            f" (it knows {known}); memory of a GPU needs one that was started with"
            " --device cuda:N",
            Code.UNSUPPORTED,
        ) from None
