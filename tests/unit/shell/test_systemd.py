"""The notify protocol over a real datagram socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.systemd import Notifier


@pytest.fixture
def supervisor(tmp_run_dir: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_run_dir / "notify"))
        sock.settimeout(5)
        yield sock


def test_each_message_in_turn(supervisor: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": supervisor.getsockname()})
    notifier.ready("up")
    notifier.watchdog()
    notifier.status("busy")
    notifier.stopping("bye")
    notifier.close()
    notifier.watchdog()  # after close: nothing, and no error
    assert [supervisor.recv(4096).decode() for _ in range(4)] == [
        f"READY=1\nSTATUS=up\nMAINPID={os.getpid()}",
        "WATCHDOG=1",
        "STATUS=busy",
        "STOPPING=1\nSTATUS=bye",
    ]


def test_an_abstract_address() -> None:
    name = f"kvd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0{name}")
        sock.settimeout(5)
        notifier = Notifier({"NOTIFY_SOCKET": f"@{name}"})
        notifier.watchdog()
        notifier.close()
        assert sock.recv(4096) == b"WATCHDOG=1"


def test_a_supervisor_that_does_not_read_never_blocks_us(supervisor: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": supervisor.getsockname()})
    for _ in range(10_000):
        notifier.watchdog()
    notifier.close()


@pytest.mark.parametrize("address", ["", "relative", "/nowhere/at/all"])
def test_without_a_supervisor_nothing_happens(address: str) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": address})
    notifier.ready("up")
    notifier.close()


@pytest.mark.parametrize(
    ("env", "seconds"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "2000000"}, 2.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}, 2.0),
        ({"WATCHDOG_USEC": "2000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_for_whom_it_names(env: dict[str, str], seconds: float | None) -> None:
    assert Notifier(env).watchdog_s == seconds
