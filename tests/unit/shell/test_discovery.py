"""The discovery file: it appears whole, and never takes the place of what is somebody else's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvd.lifecycle import DiscoveryFile
from kvd.local.listener import BindError

TOLD = {"pid": os.getpid(), "socket": "/run/kvd/kvd.sock"}


def test_it_is_there_between_write_and_remove(tmp_path: Path) -> None:
    path = tmp_path / "made" / "kvd.json"
    file = DiscoveryFile(str(path))
    file.write(TOLD)
    assert json.loads(path.read_text()) == TOLD
    file.remove()
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("left", ["", json.dumps({**TOLD, "pid": 1})], ids=["empty", "a daemon's"])
def test_what_a_daemon_left_behind_is_replaced(tmp_path: Path, left: str) -> None:
    path = tmp_path / "kvd.json"
    path.write_text(left)
    DiscoveryFile(str(path)).write(TOLD)
    assert json.loads(path.read_text()) == TOLD


@pytest.mark.parametrize("content", ["notes", '{"my": "settings"}', "[1]"])
def test_somebody_elses_file_is_left_alone_and_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keep.txt"
    path.write_text(content)
    with pytest.raises(BindError, match="no daemon wrote it") as refused:
        DiscoveryFile(str(path)).write(TOLD)
    assert str(path) in refused.value.detail
    DiscoveryFile(str(path)).remove()
    assert path.read_text() == content


def test_links_and_pipes_are_left_alone(tmp_path: Path) -> None:
    target, link, pipe = (tmp_path / name for name in ("target", "link", "pipe"))
    target.write_text(json.dumps(TOLD))
    link.symlink_to(target)
    os.mkfifo(pipe)
    for path in (link, pipe):
        with pytest.raises(BindError, match="no daemon wrote it"):
            DiscoveryFile(str(path)).write(TOLD)
    assert link.is_symlink()
    assert pipe.is_fifo()


def test_a_daemon_that_cannot_write_it_says_so(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(BindError, match="cannot write discovery_file"):
        DiscoveryFile(str(blocked / "kvd.json")).write(TOLD)
