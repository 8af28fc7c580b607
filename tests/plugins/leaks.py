"""Fails the run when the suite leaves something behind.

Looked at after each test: open files of the test process. Looked at when the session ends:
processes that the tests started, threads of the test process, listening TCP ports of both, bound
Unix sockets under the session's runtime folder, and /dev/shm files of kvd and torch.

Other runs may go on beside this one, so everything is attributed: processes by a mark in their
environment (inherited, so that orphans carry it too) or by having been seen as descendants;
/dev/shm files by being new, in use by nobody outside this run, and named after a process of this
run if after any. A file that cannot be attributed is only reported, not held against the suite,
when engines or daemons that are not of this run were seen beside it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import uuid
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

MARK_ENV = "KVDTEST_RUN"
"""Names the run in the environment of everything that it starts; nested runs are listed too."""

SHM_PREFIXES = ("kvd", "torch_", "psm_", "sem.mp-")
FD_MARGIN = 16
"""Open files that one test may add: caches and lazily opened devices, not connections."""
FD_SESSION_MARGIN = 64
LOOK_EVERY_S = 1.0
SETTLE_S = float(os.environ.get("KVDTEST_SETTLE_S", "5"))
"""How long what is already ending may take to be gone."""

# Threads of libraries that cannot be ended, by the start of their name.
KNOWN_THREADS = ("pytest_timeout", "tqdm_monitor", "pydevd", "asyncio-waitpid")


@dataclass
class Leaks:
    """What this session found, and what was there before it."""

    run_id: str
    run_root: Path
    outer_mark: str = ""
    shm_before: frozenset[str] = frozenset()
    threads_before: frozenset[int] = frozenset()
    ports_before: frozenset[int] = frozenset()
    fds_before: int = 0
    seen: set[psutil.Process] = field(default_factory=set)
    fd_growth: list[tuple[int, str]] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    """Fails the session."""
    doubtful: list[str] = field(default_factory=list)
    """Is only reported."""
    neighbours: bool = False
    """Engines or daemons of somebody else ran meanwhile."""
    looked_at: float = 0.0


LEAKS = pytest.StashKey[Leaks]()
FDS_AT_START = pytest.StashKey[int]()


def open_fds() -> int:
    """Number of open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def fd_targets() -> list[str]:
    """What the open files of this process are, to be shown in a failure."""
    out = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            out.append(f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:
            continue
    return out


def shm_entries() -> frozenset[str]:
    """Names in /dev/shm that kvd, torch or multiprocessing make."""
    try:
        names = os.listdir("/dev/shm")
    except OSError:
        return frozenset()
    return frozenset(n for n in names if n.startswith(SHM_PREFIXES))


def marked_processes(mark: str, me: int | None = None) -> list[psutil.Process]:
    """Living processes, other than `me`, whose environment carries the mark."""
    me = os.getpid() if me is None else me
    needle = f"{MARK_ENV}=".encode()
    out = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == me:
            continue
        try:
            environ = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:
            continue
        for item in environ.split(b"\0"):
            if item.startswith(needle) and mark.encode() in item:
                try:
                    out.append(psutil.Process(int(entry)))
                except psutil.NoSuchProcess:
                    break
                break
    return out


def is_alive(process: psutil.Process) -> bool:
    """Whether it still runs, or is a zombie that this process should have waited for."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return int(process.ppid()) == os.getpid()
        return bool(process.is_running())
    except psutil.Error:
        return False


def describe(process: psutil.Process) -> str:
    """pid, state and command line."""
    try:
        line = " ".join(process.cmdline()) or process.name()
        return f"pid {process.pid} ({process.status()}): {line[:200]}"
    except psutil.Error:
        return f"pid {process.pid}"


def listening_ports(pid: int | str = "self") -> frozenset[int]:
    """TCP ports on which the process listens."""
    inodes = set()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    except OSError:
        return frozenset()
    ports = set()
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            cells = row.split()
            if cells[3] == "0A" and cells[9] in inodes:
                ports.add(int(cells[1].rpartition(":")[2], 16))
    return frozenset(ports)


def bound_sockets(root: Path) -> list[str]:
    """Unix sockets of living processes that are bound to a path under `root`."""
    out = []
    for row in Path("/proc/net/unix").read_text().splitlines()[1:]:
        cells = row.split(maxsplit=7)
        if len(cells) == 8 and cells[7].startswith(f"{root}/"):
            out.append(cells[7])
    return sorted(set(out))


def shm_users(name: str) -> list[int]:
    """Living processes, this one included, that have the /dev/shm file open or mapped."""
    path = f"/dev/shm/{name}"
    out = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            if path in Path(f"/proc/{entry}/maps").read_text():
                out.append(int(entry))
                continue
            fds = os.listdir(f"/proc/{entry}/fd")
        except OSError:
            continue
        for fd in fds:
            try:
                if os.readlink(f"/proc/{entry}/fd/{fd}") == path:
                    out.append(int(entry))
                    break
            except OSError:
                continue
    return out


def stray_threads(before: frozenset[int]) -> list[str]:
    """Threads that were not there when the session began."""
    return [
        f"{t.name}{' (daemon)' if t.daemon else ''}"
        for t in threading.enumerate()
        if t.ident not in before and not t.name.startswith(KNOWN_THREADS) and t.is_alive()
    ]


def _remember_descendants(leaks: Leaks) -> None:
    with contextlib.suppress(psutil.Error):
        leaks.seen.update(psutil.Process().children(recursive=True))
    if not leaks.neighbours and time.monotonic() - leaks.looked_at > LOOK_EVERY_S:
        leaks.looked_at = time.monotonic()
        leaks.neighbours = neighbours(leaks)


def neighbours(leaks: Leaks) -> bool:
    """Whether a process that works like ours, and is not of this run, exists now."""
    ours = {p.pid for p in leaks.seen} | {p.pid for p in marked_processes(leaks.run_id)}
    parents = {p.pid for p in psutil.Process().parents()} | {os.getpid()}
    for process in psutil.process_iter(["pid", "cmdline", "name"]):
        if process.pid in ours or process.pid in parents:
            continue
        line = " ".join(process.info["cmdline"] or [process.info["name"] or ""]).lower()
        if "python" in line and any(word in line for word in ("kvd", "pytest", "vllm")):
            return True
        if line.startswith("vllm::"):
            return True
    return False


def _living(leaks: Leaks) -> list[psutil.Process]:
    _remember_descendants(leaks)
    living = {p for p in leaks.seen if is_alive(p)}
    living.update(marked_processes(leaks.run_id))
    return sorted(living, key=lambda p: p.pid)


def _settled(leaks: Leaks) -> list[psutil.Process]:
    """Living processes after those that are ending had their time."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        living = _living(leaks)
        threads = stray_threads(leaks.threads_before)
        if (not living and not threads) or time.monotonic() > deadline:
            return living
        time.sleep(0.05)


def check(leaks: Leaks) -> list[str]:
    """Everything that is left behind now, one line each. Ends the processes among it."""
    found = []
    for process in _settled(leaks):
        ports = sorted(listening_ports(process.pid))
        found.append(f"process: {describe(process)}" + (f", listens on {ports}" if ports else ""))
        try:
            process.send_signal(signal.SIGKILL)
            process.wait(SETTLE_S)
        except (psutil.Error, ChildProcessError):
            continue
    found += [f"thread: {name}" for name in stray_threads(leaks.threads_before)]
    found += [
        f"listening port of the test process: {port}"
        for port in sorted(listening_ports() - leaks.ports_before)
    ]
    found += [f"bound socket: {path}" for path in bound_sockets(leaks.run_root)]
    me = os.getpid()
    our_pids = {p.pid for p in leaks.seen} | {me}
    for name in sorted(shm_entries() - leaks.shm_before):
        users = shm_users(name)
        if users and me not in users:
            continue
        # torch's names are torch_PID_RANDOM_COUNT.
        sure = me in users or any(part in map(str, our_pids) for part in name.split("_")[1:2])
        if sure or not leaks.neighbours:
            found.append(f"/dev/shm/{name}")
        else:
            leaks.doubtful.append(f"/dev/shm/{name} (may be somebody else's)")
    gc.collect()
    grown = open_fds() - leaks.fds_before
    if grown > FD_SESSION_MARGIN:
        worst = sorted(leaks.fd_growth, reverse=True)[:5]
        found.append(f"open files: {grown} more than at the start; most by {worst}")
    return found


# --- hooks ----------------------------------------------------------------------------------


def start(config: pytest.Config, run_root: Path) -> Leaks:
    """Marks this run, and remembers how things are before the first test."""
    run_id = uuid.uuid4().hex
    outer = os.environ.get(MARK_ENV, "")
    os.environ[MARK_ENV] = f"{outer}:{run_id}" if outer else run_id
    leaks = Leaks(
        run_id=run_id,
        run_root=run_root,
        outer_mark=outer,
        shm_before=shm_entries(),
        threads_before=frozenset(t.ident for t in threading.enumerate() if t.ident is not None),
        ports_before=listening_ports(),
        fds_before=open_fds(),
    )
    config.stash[LEAKS] = leaks
    return leaks


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    leaks = item.config.stash.get(LEAKS, None)
    if leaks is not None:
        item.stash[FDS_AT_START] = open_fds()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, object, object]:
    leaks = item.config.stash.get(LEAKS, None)
    if leaks is None:
        return (yield)
    _remember_descendants(leaks)
    result = yield
    before = item.stash.get(FDS_AT_START, open_fds())
    mark = item.get_closest_marker("fd_margin")
    margin = FD_MARGIN + (int(mark.args[0]) if mark is not None else 0)
    if open_fds() - before > margin:
        gc.collect()
    grown = open_fds() - before
    if grown > 0:
        leaks.fd_growth.append((grown, item.nodeid))
    if grown > margin:
        listing = "\n  ".join(fd_targets())
        pytest.fail(f"{grown} more open files after this test than before it:\n  {listing}", False)
    return result


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    leaks = session.config.stash.get(LEAKS, None)
    if leaks is None:
        return
    leaks.found = check(leaks)
    if leaks.found:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    leaks = terminalreporter.config.stash.get(LEAKS, None)
    if leaks is None or not (leaks.found or leaks.doubtful):
        return
    terminalreporter.section("left behind by the suite", red=bool(leaks.found))
    for line in leaks.found + leaks.doubtful:
        terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    leaks = config.stash.get(LEAKS, None)
    if leaks is None:
        return
    if leaks.outer_mark:
        os.environ[MARK_ENV] = leaks.outer_mark
    else:
        os.environ.pop(MARK_ENV, None)
