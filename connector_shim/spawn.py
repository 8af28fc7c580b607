"""A daemon as a child of the engine: for those who run no service manager.

What a vLLM worker would hand down and a daemon must not have is reset: the worker's binding to a
core, preloaded allocators, OpenMP settings. The child gets a session of its own, so that Ctrl-C in
the engine's terminal does not reach it in the middle of a copy; it ends with `stop`, or with the
engine.

The end with the engine: the child asks the kernel for a signal at its parent's death (it sees
KVD_DIE_WITH_PARENT, the parent's process id, and checks that it still has that parent). The kernel
takes for the parent the *thread* that started the child: a daemon that was started by a pool's
thread would end when the pool shrinks. So a daemon may be started from the main thread only.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import stat
import subprocess
import sys
from _thread import get_native_id
from collections.abc import Mapping
from pathlib import Path

import kvd.protocol
from connector_shim.errors import ClientError
from connector_shim.paths import MAX_SOCKET_PATH, check_private, shared_tmp_dir
from kvd.protocol.codes import Code
from kvd.protocol.types import Rank

log = logging.getLogger(__name__)

DIE_WITH_PARENT_ENV = "KVD_DIE_WITH_PARENT"
LINK_SUFFIX = ".link"
"""The daemon makes a second socket of this name beside its own; it has to fit too."""
CONTROL_SUFFIX = ".ctl"
"""And a third one."""

Setting = str | int | float | bool

_RESET = re.compile(r"LD_PRELOAD|(?:OMP|GOMP|KMP)_.*")
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]")


class SpawnedDaemon:
    """A daemon that this process started. Whether it is ready is learnt by connecting to it."""

    def __init__(self, process: subprocess.Popen[bytes], socket_path: str) -> None:
        self._process = process
        self.socket_path = socket_path

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative if a signal ended it."""
        return self._process.poll()

    def stop(self, grace_s: float = 5.0, kill_wait_s: float = 5.0) -> int | None:
        """SIGTERM (it drains), after `grace_s` another (it stops), then SIGKILL.

        Each step waits with a limit. Returns the exit code, or None if even the last did not end
        it (it hangs in the kernel): logged. Removes the sockets that a killed daemon leaves.
        Calling it again does nothing more.
        """
        steps = (
            (self._process.terminate, grace_s),
            (self._process.terminate, min(grace_s, 2.0)),
            (self._process.kill, kill_wait_s),
        )
        for signal_it, wait_s in steps:
            # Popen knows whether the child was reaped, so no signal can reach a stranger.
            signal_it()
            try:
                code = self._process.wait(wait_s)
            except subprocess.TimeoutExpired:
                continue
            self._remove_sockets()
            return code
        log.error("kvd: the daemon (process %d) does not even die", self.pid)
        return None

    def _remove_sockets(self) -> None:
        for suffix in ("", LINK_SUFFIX, CONTROL_SUFFIX):
            path = self.socket_path + suffix
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISSOCK(os.lstat(path).st_mode):
                    os.unlink(path)


def spawn_daemon(
    socket_path: str,
    *,
    settings: Mapping[str, Setting] | None = None,
    env: Mapping[str, str] | None = None,
) -> SpawnedDaemon:
    """Starts `kvd serve --socket <socket_path>` and returns at once.

    `settings`: the daemon's, by name (`{"log_level": "debug"}`). Its log goes to this process's
    stderr. Raises ClientError: UNSUPPORTED in another thread than the main one, NO_SPACE when the
    process cannot be started.
    """
    if get_native_id() != os.getpid():
        raise ClientError(
            Code.UNSUPPORTED,
            "a daemon can be spawned from the main thread only, for it ends with the thread that "
            "started it; start it apart (kvd serve) and connect",
        )
    command = [sys.executable, "-P", "-m", "kvd", "serve", f"--socket={socket_path}"]
    for name, value in (settings or {}).items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        command.append(f"--{name.replace('_', '-')}={text}")
    own_cores = os.sched_getaffinity(0)
    try:
        # Inherited by the child. Put back at once, and only ever changed for this thread.
        os.sched_setaffinity(0, own_cores | _cores_of(os.getppid()))
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=_stderr(),
            stderr=_stderr(),
            env=child_env(os.environ if env is None else env),
            start_new_session=True,
        )
    except OSError as exc:
        raise ClientError(Code.NO_SPACE, f"cannot start {command[0]}: {exc}") from exc
    finally:
        os.sched_setaffinity(0, own_cores)
    return SpawnedDaemon(process, socket_path)


def child_env(env: Mapping[str, str]) -> dict[str, str]:
    """What of the engine's environment the daemon gets, and what it gets besides."""
    kept = {name: value for name, value in env.items() if not _RESET.fullmatch(name)}
    kept[DIE_WITH_PARENT_ENV] = str(os.getpid())
    # The child runs the package that this process has, also where that is not installed.
    root = Path(kvd.protocol.__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), kept.get("PYTHONPATH")]))
    return kept


def private_socket_path(engine_id: str, rank: Rank, env: Mapping[str, str] | None = None) -> str:
    """A socket path for the daemon of one rank, in a folder (made if need be) that is ours alone.

    The name has the engine's id (shortened where it is too long), the rank, and this process, so
    that an engine which is started again does not meet its predecessor's daemon. Raises
    ClientError: PEER_NOT_ALLOWED for a folder that others may write, UNSUPPORTED where its path
    leaves no room for a name.
    """
    env = os.environ if env is None else env
    runtime = env.get("XDG_RUNTIME_DIR")
    folder = f"{runtime}/kvd" if runtime else shared_tmp_dir()
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as exc:
        raise ClientError(Code.PEER_NOT_ALLOWED, f"cannot make the folder {folder}: {exc}") from exc
    check_private(folder)
    tail = f"-{os.getpid()}-dp{rank.dp_rank}pp{rank.pp_rank}tp{rank.tp_rank}.sock"
    room = MAX_SOCKET_PATH - len(os.fsencode(f"{folder}/{tail}{LINK_SUFFIX}"))
    name = _NOT_IN_A_NAME.sub("_", engine_id)
    if name != engine_id or len(name) > room:
        digest = hashlib.blake2b(engine_id.encode(errors="surrogateescape"), digest_size=4)
        name = f"{name[: max(0, room - 9)]}-{digest.hexdigest()}"
    if len(name) > room:
        raise ClientError(Code.UNSUPPORTED, f"the path of {folder} leaves no room for a socket")
    return f"{folder}/{name}{tail}"


def _cores_of(pid: int) -> set[int]:
    """Workers are bound to a core each; the process that started them has what was allowed.

    With no such process to be seen, every core is asked for: the kernel grants those it allows.
    """
    try:
        return os.sched_getaffinity(pid) if pid > 0 else set(range(os.cpu_count() or 1))
    except OSError:
        return set(range(os.cpu_count() or 1))


def _stderr() -> int:
    try:
        os.fstat(2)
    except OSError:
        return subprocess.DEVNULL
    return 2
