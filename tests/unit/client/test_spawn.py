"""A daemon as a child: what it inherits, where its socket is, and how it ends."""

from __future__ import annotations

import _thread
import contextlib
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from connector_shim import spawn
from connector_shim.client import Client
from connector_shim.errors import ClientError
from connector_shim.spawn import SpawnedDaemon, child_env, private_socket_path, spawn_daemon
from kvd import addresses
from kvd.protocol.codes import Code
from kvd.protocol.types import Rank
from tests.conftest import wait_for
from tests.unit.client.fake import describe

ROOT = Path(__file__).parents[3]
START_S = 120.0


@pytest.fixture
def start(path: Path) -> Iterator[Callable[..., SpawnedDaemon]]:
    """Starts a real daemon at `path` and waits until it listens."""
    started: list[SpawnedDaemon] = []

    def start_one(**options: object) -> SpawnedDaemon:
        daemon = spawn_daemon(str(path), **options)  # type: ignore[arg-type]
        started.append(daemon)
        wait_for(path.exists, START_S, what="the daemon listens")
        return daemon

    yield start_one
    for daemon in started:
        daemon.stop(0.0)


def test_what_a_worker_inherits_is_reset_and_the_rest_kept() -> None:
    env = child_env(
        {
            "LD_PRELOAD": "libtcmalloc.so",
            "OMP_NUM_THREADS": "1",
            "KMP_BLOCKTIME": "1",
            "GOMP_CPU_AFFINITY": "3",
            "KVD_LOG_LEVEL": "debug",
            "PATH": "/bin",
            "MY_OMP_": "kept",
            "PYTHONPATH": "/elsewhere",
        }
    )
    assert env.pop("KVD_DIE_WITH_PARENT") == str(os.getpid())
    assert env.pop("PYTHONPATH").split(":") in ([str(ROOT), "/elsewhere"], ["/elsewhere"])
    assert env == {"KVD_LOG_LEVEL": "debug", "PATH": "/bin", "MY_OMP_": "kept"}


def test_a_spawned_daemon_serves_on_all_cores_and_ends_in_order(
    start: Callable[..., SpawnedDaemon], path: Path
) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        daemon = start(settings={"log_level": "warning", "insecure": False})
        assert os.sched_getaffinity(0) == {min(cores)}
    finally:
        os.sched_setaffinity(0, cores)
    assert os.sched_getaffinity(daemon.pid) >= cores
    assert os.getsid(daemon.pid) == daemon.pid != os.getsid(0)
    assert os.readlink(f"/proc/{daemon.pid}/fd/0") == os.devnull
    with Client(str(path), engine_id="engine") as client:
        describe(client)
        assert client.wait_up(60.0).version
        assert client.statistics()["registrations"] == 1
    assert daemon.exit_code() is None
    assert daemon.stop(30.0) == 0
    assert daemon.exit_code() == 0
    assert daemon.stop(0.0) == 0
    assert list(path.parent.iterdir()) == []


def test_a_daemon_that_does_not_stop_is_killed_and_swept_up(
    start: Callable[..., SpawnedDaemon], path: Path
) -> None:
    daemon = start()
    os.kill(daemon.pid, signal.SIGSTOP)
    assert daemon.stop(0.1) == -signal.SIGKILL
    assert list(path.parent.iterdir()) == []


def test_a_daemon_that_cannot_start_is_told_by_its_exit_code(path: Path) -> None:
    daemon = spawn_daemon(str(path), settings={"no_such_setting": 1})
    assert wait_for(daemon.exit_code, START_S, what="it has ended") == 78
    assert daemon.stop() == 78


def test_it_dies_with_the_engine(path: Path) -> None:
    script = (
        "import sys, time\n"
        "from connector_shim.spawn import spawn_daemon\n"
        "print(spawn_daemon(sys.argv[1]).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        daemon = os.pidfd_open(pid)
        try:
            wait_for(path.exists, START_S, what="the daemon listens")
            engine.kill()
            engine.wait(10)
            wait_for(lambda: select.select([daemon], [], [], 0)[0], 60.0, what="it has ended")
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(daemon, signal.SIGKILL)
            os.close(daemon)
    assert not path.exists()


def test_only_the_main_thread_may_spawn(path: Path) -> None:
    told: SimpleQueue[object] = SimpleQueue()

    def work() -> None:
        try:
            told.put(spawn_daemon(str(path)))
        except ClientError as error:
            told.put(error)

    _thread.start_new_thread(work, ())
    error = told.get(timeout=60)
    assert isinstance(error, ClientError)
    assert (error.code, "main thread" in error.detail) == (Code.UNSUPPORTED, True)


def test_a_program_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    cores = os.sched_getaffinity(0)
    with pytest.raises(ClientError, match="/no/such/python"):
        spawn_daemon(str(path))
    assert os.sched_getaffinity(0) == cores


# --- the socket's path ----------------------------------------------------------------------------


def path_for(engine_id: str, folder: str, rank: Rank = Rank()) -> str:  # noqa: B008 - frozen
    return private_socket_path(engine_id, rank, {"XDG_RUNTIME_DIR": folder})


def test_the_path_has_engine_and_rank_in_a_private_folder(tmp_run_dir: Path) -> None:
    path = Path(path_for("engine-1", str(tmp_run_dir), Rank(pp_rank=1, tp_rank=2, dp_rank=3)))
    assert path.parent == tmp_run_dir / "kvd"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.name == f"engine-1-{os.getpid()}-dp3pp1tp2.sock"


def test_ids_that_make_no_file_name_or_are_too_long_stay_apart(tmp_run_dir: Path) -> None:
    folder = str(tmp_run_dir)
    ids = ["../../etc/passwd", "a/b", "a_b", "a b", "ü" * 40, "x" * 200, "x" * 200 + "y", "n\0ul"]
    paths = [path_for(engine_id, folder) for engine_id in ids]
    assert len(set(paths)) == len(ids)
    for path in paths:
        assert Path(path).parent == tmp_run_dir / "kvd"
        assert len(os.fsencode(path + ".link")) <= 107


def test_a_folder_that_leaves_no_room_is_refused() -> None:
    with tempfile.TemporaryDirectory(prefix="kvdt-" + "x" * 80, dir="/tmp") as folder:
        with pytest.raises(ClientError, match="no room") as caught:
            path_for("engine", folder)
        assert caught.value.code is Code.UNSUPPORTED


def test_a_folder_of_somebody_else_is_refused(tmp_run_dir: Path) -> None:
    (tmp_run_dir / "kvd").mkdir()
    (tmp_run_dir / "kvd").chmod(0o777)
    with pytest.raises(ClientError) as caught:
        path_for("engine", str(tmp_run_dir))
    assert caught.value.code is Code.PEER_NOT_ALLOWED
    (tmp_run_dir / "file").touch()
    with pytest.raises(ClientError) as caught:
        path_for("engine", str(tmp_run_dir / "file"))
    assert caught.value.code is Code.PEER_NOT_ALLOWED


def test_the_names_of_the_other_sockets_are_the_daemons() -> None:
    assert addresses.LINK_SUFFIX == spawn.LINK_SUFFIX
    assert addresses.CONTROL_SUFFIX == spawn.CONTROL_SUFFIX
