"""Binding the Unix socket, and taking over one that a supervisor passed."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvd.local import listener as module
from kvd.local.listener import BindError, bind, from_systemd
from kvd.local.seqpacket import MAX_PATH, connect, short_address


def test_a_path_of_107_bytes_is_the_longest(tmp_run_dir: Path) -> None:
    room = MAX_PATH - len(str(tmp_run_dir)) - 1
    made = bind(str(tmp_run_dir / ("x" * room)))
    made.close()
    with pytest.raises(BindError, match="108 bytes, at most 107") as error:
        bind(str(tmp_run_dir / ("x" * (room + 1))))
    assert "--socket" in error.value.detail


def test_the_link_may_have_a_longer_path(tmp_run_dir: Path) -> None:
    path = str(tmp_run_dir / ("y" * 120) / "kvd.sock.link")
    made = bind(path, any_length=True)
    try:
        assert os.stat(path).st_mode & 0o777 == 0o600
        connect(path).close()
    finally:
        made.close()
    assert not os.path.exists(path)


def test_short_paths_are_used_as_they_are(tmp_run_dir: Path) -> None:
    with short_address(str(tmp_run_dir / "a")) as address:
        assert address == str(tmp_run_dir / "a")


def test_a_live_owner_is_named(tmp_run_dir: Path) -> None:
    path = str(tmp_run_dir / "k")
    made = bind(path)
    try:
        with pytest.raises(BindError, match=f"pid {os.getpid()}"):
            bind(path)
    finally:
        made.close()


def test_a_stale_file_is_replaced_and_removed(tmp_run_dir: Path) -> None:
    path = str(tmp_run_dir / "k")
    bind(path).sock.close()
    assert os.path.exists(path)
    made = bind(path)
    connect(path).close()
    made.close()
    assert not os.path.exists(path)


def test_somebody_elses_file_is_not_removed(tmp_run_dir: Path) -> None:
    path = str(tmp_run_dir / "k")
    first = bind(path)
    os.unlink(path)
    second = bind(path)
    first.close()
    assert os.path.exists(path)
    second.close()


def test_another_program_on_the_path_is_left_alone(tmp_run_dir: Path) -> None:
    path = str(tmp_run_dir / "k")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(path)
        other.listen()
        with pytest.raises(BindError, match="another program"):
            bind(path)
    assert os.path.exists(path)


def test_two_that_start_at_once_do_not_take_each_others_socket(
    tmp_run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    path = str(tmp_run_dir / "k")
    folder = os.open(tmp_run_dir, os.O_RDONLY | os.O_DIRECTORY)
    monkeypatch.setattr(module, "LOCK_TIMEOUT_S", 0.1)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        with pytest.raises(BindError):
            bind(path)
        fcntl.flock(folder, fcntl.LOCK_UN)
        bind(path).close()
    finally:
        os.close(folder)


def test_a_folder_that_cannot_be_made_is_named(tmp_run_dir: Path) -> None:
    (tmp_run_dir / "file").write_text("")
    with pytest.raises(BindError, match="file/k"):
        bind(str(tmp_run_dir / "file" / "k"))


def test_nothing_passed_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_systemd({}) is None
    assert from_systemd({"LISTEN_PID": str(os.getpid() + 1), "LISTEN_FDS": "1"}) is None
    assert from_systemd({"LISTEN_PID": "x", "LISTEN_FDS": "1"}) is None
    assert from_systemd({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "0"}) is None


def test_more_than_one_passed_is_refused() -> None:
    with pytest.raises(BindError, match="2 sockets"):
        from_systemd({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2"})


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_passed_socket_of_another_kind_is_refused(
    kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, kind) as wrong:
        real = os.dup
        monkeypatch.setattr(os, "dup", lambda fd: real(wrong.fileno()))
        with pytest.raises(BindError, match="ListenSequentialPacket"):
            from_systemd({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"})
