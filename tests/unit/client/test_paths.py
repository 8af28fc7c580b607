"""Which socket is taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from connector_shim import paths
from connector_shim.errors import ClientError
from connector_shim.paths import resolve_socket
from kvd.addresses import default_socket_path
from kvd.protocol.codes import Code


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /run/kvd."""
    folder = tmp_path / "run"
    monkeypatch.setattr(paths, "SYSTEM_DIR", str(folder))
    return folder


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /tmp/kvd-$UID."""
    folder = tmp_path / "tmp"
    monkeypatch.setattr(paths, "shared_tmp_dir", lambda: str(folder))
    return folder


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(tmp_path / "user")}


def put(path: Path) -> str:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch()
    return str(path)


def test_the_order_is_explicit_then_variable_then_the_first_that_exists(
    tmp_path: Path, system: Path, shared: Path, env: dict[str, str]
) -> None:
    in_tmp = put(shared / "kvd.sock")
    assert resolve_socket(None, env=env) == in_tmp
    of_user = put(tmp_path / "user" / "kvd" / "kvd.sock")
    assert resolve_socket(None, env=env) == of_user
    of_system = put(system / "kvd.sock")
    assert resolve_socket(None, env=env) == of_system
    env["KVD_SOCKET"] = "/by/env"
    assert resolve_socket(None, env=env) == "/by/env"
    assert resolve_socket("/explicit", env=env) == "/explicit"


def test_the_local_rank_is_filled_in(env: dict[str, str]) -> None:
    assert resolve_socket("/a/{local_rank}.sock", local_rank=3, env=env) == "/a/3.sock"
    env["KVD_SOCKET"] = "/b/{local_rank}/{local_rank}"
    assert resolve_socket(None, local_rank=1, env=env) == "/b/1/1"


def test_a_path_that_no_socket_can_have_is_refused() -> None:
    assert resolve_socket("x" * 107) == "x" * 107
    for path in ("x" * 108, "ä" * 54):
        with pytest.raises(ClientError, match="108 bytes; at most 107") as caught:
            resolve_socket(path)
        assert caught.value.code is Code.UNSUPPORTED


def test_without_a_daemon_the_path_is_the_one_where_it_would_listen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for path in paths.candidates({}):
        if Path(path).exists():
            pytest.skip("a daemon of this user runs here")
    assert resolve_socket(None, env={}) == default_socket_path({})
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert resolve_socket(None, env=env) == default_socket_path(env)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720])
def test_a_folder_in_tmp_that_others_may_write_is_not_trusted(
    system: Path, shared: Path, mode: int
) -> None:
    put(shared / "kvd.sock")
    shared.chmod(mode)
    with pytest.raises(ClientError, match="nobody else may write") as caught:
        resolve_socket(None, env={})
    assert caught.value.code is Code.PEER_NOT_ALLOWED
    shared.chmod(0o700)
    assert resolve_socket(None, env={})


def test_a_link_in_tmp_is_not_trusted(tmp_path: Path, system: Path, shared: Path) -> None:
    put(tmp_path / "elsewhere" / "kvd.sock")
    shared.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ClientError) as caught:
        resolve_socket(None, env={})
    assert caught.value.code is Code.PEER_NOT_ALLOWED
