"""A group of users on the engines' socket: who gets in, by the kernel's own account of them."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd.config import load
from kvd.errors import ConfigError
from kvd.local import seqpacket
from kvd.local.listener import bind
from kvd.local.seqpacket import connect, engine_refusal
from kvd.protocol import local
from kvd.protocol.codes import Code
from tests.unit.shell.fakes import Shell, Shim, hello

GID, OTHER_GID, UID = 54_321, 54_322, 54_323
SETGROUPS, SETRESUID, SETRESGID = 116, 117, 119
"""Numbers of the system calls on x86-64."""

as_others = pytest.mark.skipif(
    os.geteuid() != 0 or os.uname().machine != "x86_64", reason="only root can be somebody else"
)


def run_as(uid: int, gid: int, groups: tuple[int, ...], run: Callable[[], None]) -> None:
    """Runs as somebody else: the kernel keeps credentials by thread, and this one ends after."""
    libc = ctypes.CDLL(None, use_errno=True)
    failed: list[BaseException] = []

    def call(number: int, *args: object) -> None:
        if libc.syscall(number, *args) != 0:
            raise OSError(ctypes.get_errno(), f"system call {number}")

    def thread() -> None:
        try:
            call(SETGROUPS, len(groups), (ctypes.c_uint32 * max(1, len(groups)))(*groups))
            call(SETRESGID, gid, gid, gid)
            call(SETRESUID, uid, uid, uid)
            run()
        except BaseException as e:
            failed.append(e)

    one = threading.Thread(target=thread)
    one.start()
    one.join(30)
    if failed:
        raise failed[0]


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that others may enter."""
    made = Path(tempfile.mkdtemp(prefix="kvdg-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def test_without_a_group_the_socket_is_ours_alone(folder: Path) -> None:
    made = bind(str(folder / "k"))
    assert stat.S_IMODE(os.stat(folder / "k").st_mode) == 0o600
    made.close()


def test_with_a_group_the_socket_and_a_new_folder_are_the_groups_too(folder: Path) -> None:
    gid = GID if os.geteuid() == 0 else os.getegid()
    path = folder / "new" / "k"
    made = bind(str(path), gid=gid)
    for place, mode in ((path, 0o660), (path.parent, 0o750)):
        found = os.stat(place)
        assert (found.st_gid, stat.S_IMODE(found.st_mode)) == (gid, mode)
    made.close()


@pytest.mark.parametrize(
    ("uid", "gid", "groups", "let_in"),
    [
        (UID, GID, (), True),
        (UID, OTHER_GID, (7, GID), True),
        (UID, OTHER_GID, (), False),
        (UID, OTHER_GID, (7,), False),
        (0, OTHER_GID, (), True),
    ],
)
def test_who_may_register(
    monkeypatch: pytest.MonkeyPatch, uid: int, gid: int, groups: tuple[int, ...], let_in: bool
) -> None:
    monkeypatch.setattr(seqpacket, "peercred", lambda _sock: (1, uid, gid))
    monkeypatch.setattr(seqpacket, "_groups", lambda _sock: groups)
    with socket.socket(socket.AF_UNIX) as sock:
        refusal = engine_refusal(sock, GID, "it")
        assert (refusal is None) == let_in
        if refusal is not None:
            assert f"uid {uid}" in refusal
            assert "socket_group" in refusal
        # Without the setting a group is nothing.
        assert (engine_refusal(sock, None, "it") is None) == (uid == 0)


@as_others
async def test_members_are_let_in_and_others_are_not(
    make_shell: Callable[..., Shell], folder: Path
) -> None:
    shell = make_shell(path=folder / "k", gid=GID)

    def connect_as(uid: int, gid: int, *groups: int) -> Shim:
        made: list[Shim] = []
        run_as(uid, gid, groups, lambda: made.append(shell.connect()))
        return made[0]

    for gid, groups in ((GID, ()), (OTHER_GID, (GID,))):
        shim = await asyncio.to_thread(connect_as, UID, gid, *groups)
        shim.send(hello(engine_id=f"e{gid}"))
        await shim.expect(local.Welcome)
    with pytest.raises(PermissionError):
        await asyncio.to_thread(connect_as, UID, OTHER_GID)
    # One whom the file's mode lets through is still looked at.
    os.chmod(shell.path, 0o666)  # noqa: S103
    shim = await asyncio.to_thread(connect_as, UID, OTHER_GID)
    refused = await shim.expect(local.Refused)
    assert refused.code == Code.UNSUPPORTED
    assert shell.drops.counts["session", "uid"] == 1


@as_others
def test_the_link_and_the_control_socket_stay_ours(folder: Path) -> None:
    made = bind(str(folder / "k.link"), any_length=True)
    try:
        with pytest.raises(PermissionError):
            run_as(UID, GID, (), lambda: connect(str(folder / "k.link")).close())
    finally:
        made.close()


def test_a_group_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"no-such-group.*does not have"):
        load({"socket_group": "no-such-group"}, env={})
    assert load({"socket_group": "root"}, env={}).socket_gid == 0
    assert load({"socket_group": "4242"}, env={}).socket_gid == 4242
    assert load({}, env={}).socket_gid is None
