"""How the demo ends what it started: every process of a group, whatever it does with SIGTERM."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from kvd.demo.ports import Ports
from kvd.demo.processes import Child, Children, shared_memory_of
from tests.conftest import wait_for_async
from tests.plugins.processes import runs

IGNORES_TERM = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
SAYS_READY = "print('ready', flush=True)\n"
WAITS = "import signal; signal.pause()\n"
HAS_A_CHILD = (
    "import subprocess, sys\n"
    "p = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=subprocess.PIPE)\n"
    "p.stdout.readline(); print('child', p.pid, flush=True)\n"
)


@pytest.fixture
async def children() -> AsyncIterator[Children]:
    found = Children()
    yield found
    found.hurry = True
    await found.stop_all()


async def start(
    children: Children, folder: Path, code: str, *args: str, grace: float = 20.0
) -> Child:
    """Start a Python program and wait until it has said its first line."""
    argv = [sys.executable, "-c", code, *args]
    log = folder / f"{uuid.uuid4().hex}.log"
    child = children.start("test", argv, log=log, grace_s=grace)
    await wait_for_async(lambda: "\n" in log.read_text(), what="the program runs")
    return child


def grandchild(child: Child) -> psutil.Process:
    return psutil.Process(int(child.log.read_text().split()[1]))


async def test_a_polite_child_is_only_asked(children: Children, tmp_path: Path) -> None:
    child = await start(children, tmp_path, SAYS_READY + WAITS)
    assert child.alive()
    await children.stop(child)
    assert child.popen.returncode == -15
    assert children.all() == []


async def test_a_deaf_child_is_killed(children: Children, tmp_path: Path) -> None:
    child = await start(children, tmp_path, IGNORES_TERM + SAYS_READY + WAITS, grace=0.2)
    await children.stop(child)
    assert child.popen.returncode == -9


async def test_hurry_takes_no_grace(children: Children, tmp_path: Path) -> None:
    child = await start(children, tmp_path, IGNORES_TERM + SAYS_READY + WAITS, grace=10_000)
    stopping = asyncio.create_task(children.stop(child))
    await wait_for_async(lambda: child.stopping)
    assert child.alive()
    children.hurry = True
    await asyncio.wait_for(stopping, 30)
    assert child.popen.returncode == -9


async def test_a_grandchild_does_not_survive(children: Children, tmp_path: Path) -> None:
    deaf = IGNORES_TERM + SAYS_READY + WAITS
    child = await start(children, tmp_path, HAS_A_CHILD + WAITS, deaf)
    other = grandchild(child)
    await children.stop(child)
    assert not runs(other)


async def test_a_grandchild_of_a_crashed_child_does_not_survive(
    children: Children, tmp_path: Path
) -> None:
    child = await start(children, tmp_path, HAS_A_CHILD, IGNORES_TERM + SAYS_READY + WAITS)
    other = grandchild(child)
    await wait_for_async(lambda: not child.alive())
    assert children.ended() == [child]
    assert child.exit_code() == 0
    assert other.is_running()
    await children.stop(child)
    assert not runs(other)


async def test_shared_memory_of_a_killed_child_is_removed(
    children: Children, tmp_path: Path
) -> None:
    path = Path(f"/dev/shm/kvd-demo-test-{uuid.uuid4().hex}")
    code = (
        "import mmap, os, sys\n"
        "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600); os.ftruncate(fd, 4096)\n"
        "m = mmap.mmap(fd, 4096); os.close(fd)\n"
    )
    try:
        child = await start(
            children, tmp_path, IGNORES_TERM + code + SAYS_READY + WAITS, str(path), grace=0.2
        )
        assert shared_memory_of(child.pid) == {path.name}
        await children.stop(child)
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


async def test_a_resource_tracker_may_finish_its_work(children: Children, tmp_path: Path) -> None:
    """What only the tracker knows of (made, and unmapped since) goes as well."""
    path = Path(f"/dev/shm/kvd-demo-test-{uuid.uuid4().hex}")
    code = (
        "import os, sys\n"
        "from multiprocessing import resource_tracker\n"
        "resource_tracker.register('/' + os.path.basename(sys.argv[1]), 'shared_memory')\n"
        "open(sys.argv[1], 'w').close()\n"
    )
    try:
        child = await start(
            children, tmp_path, IGNORES_TERM + code + SAYS_READY + WAITS, str(path), grace=0.2
        )
        assert path.exists()
        assert shared_memory_of(child.pid) == set()
        await children.stop(child)
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)


async def test_children_go_with_a_demo_that_is_killed(children: Children, tmp_path: Path) -> None:
    code = (
        "import pathlib, sys\n"
        "from kvd.demo.processes import Children\n"
        f"argv = [sys.executable, '-c', {WAITS!r}]\n"
        f"child = Children().start('x', argv, log=pathlib.Path({str(tmp_path / 'x.log')!r}))\n"
        "print('child', child.pid, flush=True)\n"
    )
    demo = await start(children, tmp_path, code + WAITS)
    other = grandchild(demo)
    os.kill(demo.pid, 9)
    await wait_for_async(
        lambda: not runs(other),
        what="the child follows",
    )


def test_reserved_ports_are_ours_until_a_server_takes_them() -> None:
    with Ports() as ports:
        port = ports.reserve()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                assert client.getpeername()[1] == port
