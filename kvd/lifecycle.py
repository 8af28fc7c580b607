"""One run of the daemon's process: environment, signals, supervisor, exit status."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import os
import resource
import secrets
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from kvd import __version__, logging
from kvd.errors import ConfigError
from kvd.local.listener import BindError
from kvd.memory.tunables import reexec_env
from kvd.systemd import Notifier

if TYPE_CHECKING:
    from kvd.daemon import Daemon
    from kvd.settings import Settings

log = structlog.get_logger("kvd.lifecycle")

EX_CONFIG = 78
REEXEC_GUARD = "KVD_REEXEC"
DIE_WITH_PARENT = "KVD_DIE_WITH_PARENT"
PR_SET_PDEATHSIG = 1
STOP_DEADLINE_S = 20.0
"""After this a stopping daemon exits whatever still runs."""
EXTEND_S = 10.0
"""What a draining daemon asks its supervisor for, several times within this."""


def run(settings: Settings, *, reexec: bool = True) -> int:
    """Serves until told to stop. Returns the exit status: 0, 1 (could not serve), or 78 (config).

    With `reexec` it may replace the process by itself once, to have other glibc settings.
    """
    if not _die_with_parent(os.environ.get(DIE_WITH_PARENT)):
        return 0
    if reexec:
        _reexec_once()
    # Only now: what is imported before executing anew is imported twice.
    import uvloop

    logging.setup(settings.log_format, settings.log_level)
    try:
        _raise_file_limit()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(settings))
    except ConfigError as e:
        return _fail(e.detail, EX_CONFIG)
    except BindError as e:
        return _fail(e.detail, 1)
    finally:
        logging.shutdown()


def _fail(detail: str, status: int) -> int:
    log.error("cannot_start", detail=detail, status=status)
    return status


async def _serve(settings: Settings) -> int:
    from kvd.daemon import Daemon
    from kvd.metrics import Metrics

    notifier = Notifier(os.environ)
    daemon = Daemon(settings, Metrics())
    discovery = DiscoveryFile(settings.discovery_file)
    background: list[asyncio.Task[None]] = []
    _on_signals(daemon, notifier, background)
    try:
        await daemon.start()
        # A full collection goes through all that was imported, which takes most of 0.1 s; what is
        # there by now stays until the end anyway.
        gc.collect()
        gc.freeze()
        discovery.write({"pid": os.getpid(), **daemon.addresses, "version": __version__})
        notifier.ready(f"serving {daemon.addresses['socket']}")
        if notifier.watchdog_s is not None:
            feeding = _feed_watchdog(notifier, notifier.watchdog_s, daemon.stuck)
            background.append(asyncio.ensure_future(feeding))
        await daemon.run_until_stopped()
        return 0 if daemon.failure is None else 1
    finally:
        notifier.stopping("stopping")
        notifier.extend(STOP_DEADLINE_S + EXTEND_S, "stopping")
        discovery.remove()
        _exit_in_any_case()
        await daemon.stop()
        for task in background:
            task.cancel()
        notifier.close()
        # All has been done that a signal could ask for. The loop gives handlers back before the
        # process ends, and the default action would make an orderly end look like a crash.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})


def _on_signals(daemon: Daemon, notifier: Notifier, background: list[asyncio.Task[None]]) -> None:
    """The first signal drains, the second stops at once, a third is not needed."""

    def on_signal(name: str) -> None:
        if daemon.stopping or not daemon.serving:
            log.warning("stopping_now", signal=name)
            daemon.stop_now()
        else:
            log.info("signal", signal=name)
            daemon.drain()
            background.append(asyncio.ensure_future(_ask_for_time(daemon, notifier)))

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, signal.Signals(number).name)


async def _ask_for_time(daemon: Daemon, notifier: Notifier) -> None:
    """While it drains, which `drain_timeout_s` bounds: a supervisor's own limit may be lower."""
    while True:
        left = ", ".join(f"{count} {name}" for name, count in daemon.in_flight().items() if count)
        notifier.extend(EXTEND_S, f"draining: {left or 'nothing is in flight'}")
        await asyncio.sleep(EXTEND_S / 5)


async def _feed_watchdog(
    notifier: Notifier, watchdog_s: float, stuck: Callable[[float], list[str]]
) -> None:
    """Fed from the loop itself, and only while the data threads get on too: a daemon in which
    either hangs is not alive."""
    told: list[str] = []
    while True:
        hanging = stuck(watchdog_s)
        if not hanging:
            notifier.watchdog()
        elif hanging != told:
            log.critical("threads_hang", threads=hanging, effect="the watchdog is not fed")
            notifier.status(f"{', '.join(hanging)} hangs")
        told = hanging
        await asyncio.sleep(watchdog_s / 3)


def _exit_in_any_case() -> None:
    """Stopping waits for copies with a deadline each; this bounds the whole of it."""
    # The default action of SIGALRM ends the process, even where a thread hangs in the kernel's
    # reach or the interpreter waits for one.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, STOP_DEADLINE_S)


class DiscoveryFile:
    """JSON that tells others where the daemon is, there exactly while it serves."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None

    def write(self, content: dict[str, Any]) -> None:
        """Appears whole or not at all. Raises BindError where it cannot be written, and where
        something else is there: that is left alone."""
        if self._path is None:
            return
        if not self._replaceable():
            raise BindError(
                f"discovery_file {self._path} is there already, and no daemon wrote it: name "
                "another path, or remove it"
            )
        temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(temporary, flags, 0o644)
        except OSError as e:
            raise self._failed(e) from None
        try:
            with os.fdopen(fd, "w") as out:
                out.write(json.dumps(content) + "\n")
            temporary.replace(self._path)
        except OSError as e:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise self._failed(e) from None

    def _failed(self, error: OSError) -> BindError:
        return BindError(
            f"cannot write discovery_file {self._path}: {os.strerror(error.errno or 0)}"
        )

    def _replaceable(self) -> bool:
        """Nothing is there, or what a daemon has left behind."""
        assert self._path is not None
        try:
            if not stat.S_ISREG(self._path.lstat().st_mode):
                return False
            found = json.loads(self._path.read_bytes() or b"{}")
        except (FileNotFoundError, NotADirectoryError):
            return True
        except (OSError, ValueError):
            return False
        return isinstance(found, dict) and (not found or {"pid", "socket"} <= found.keys())

    def remove(self) -> None:
        """Removes it if it is still ours."""
        if self._path is None:
            return
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if json.loads(self._path.read_text()).get("pid") == os.getpid():
                self._path.unlink()


def _reexec_once() -> None:
    """Executes the process again with the tunables that copying wants."""
    env = reexec_env(os.environ)
    if env is None or REEXEC_GUARD in os.environ:
        return
    env[REEXEC_GUARD] = "1"
    arguments = sys.orig_argv[1:]
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *arguments], env)  # noqa: S606


def _die_with_parent(parent: str | None) -> bool:
    """Asks the kernel for SIGTERM at the parent's death; False if it is dead already.

    `parent` is the pid that started us, in text; None or empty asks for nothing.
    """
    if not parent:
        return True
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    # Had it died before the call, nobody would tell us. Process 1 takes all others along.
    return parent.strip() in ("1", str(os.getppid()))


def _raise_file_limit() -> None:
    """Every segment of every engine is a descriptor here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
