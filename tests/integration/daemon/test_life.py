"""A daemon's life: start in any order, restart, drain, supervisor, and what stops a start."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from connector_shim.events import Up
from kvd.protocol import local
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr
from tests.conftest import wait_for
from tests.integration.daemon.conftest import Site
from tests.integration.daemon.harness import Daemon


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def test_an_engine_may_start_before_its_daemon(site: Site) -> None:
    late = Daemon.__new__(Daemon)
    late.socket = str(site.folder / "p.sock")
    producer = site.engine(late, "producer", seed=1)
    assert producer.state() == "down"
    p = site.daemon("p")
    assert producer.up() == p.address


def test_a_consumer_may_ask_a_daemon_that_starts_later(site: Site) -> None:
    with free_port() as port:
        pass
    d = site.daemon("d", failure_cache_s=0.0)
    consumer = site.engine(d, "consumer")
    consumer.up()
    remote = PeerAddr("127.0.0.1", port)
    how = {"remote": remote, "engine_id": "producer"}
    done = consumer.fetch("t", [1], **how)
    assert done.code == Code.PEER_UNREACHABLE, done
    p = site.daemon("p", listen=f"127.0.0.1:{port}")
    producer = site.engine(p, "producer", seed=6)
    assert producer.up() == remote
    producer.offer("t", [4])
    wait_for(
        lambda: consumer.fetch("t", [1], park_s=0.0, **how).code == Code.OK, 20.0, what="it moves"
    )
    assert consumer.wrong(6, {1: 4}) == 0


def has_served(daemon: Daemon) -> bool:
    return daemon.metric("kvd_served_fetches_total", code="ok") == 1


def test_daemons_restart_between_two_transfers(site: Site) -> None:
    p, d = site.daemon("p"), site.daemon("d")
    producer, consumer = site.engine(p, "producer", seed=6), site.engine(d, "consumer")
    remote = producer.up()
    consumer.up()
    for number in range(3):
        producer.offer(f"t{number}", [number])
        how: dict[str, Any] = {"remote": remote, "engine_id": "producer"}

        def moved(name: str = f"t{number}", block: int = number, how: dict[str, Any] = how) -> bool:
            producer.poll()
            return consumer.fetch(name, [block], park_s=0.0, **how).code == Code.OK

        wait_for(moved, 20.0, what=f"transfer {number}")
        if number == 0:
            wait_for(partial(has_served, p), what="p knows that it was fetched")
            d.kill(signal.SIGTERM)
            assert d.wait() == 0
            d = site.daemon("d")
            consumer.wait(lambda: len(consumer.seen(Up)) == 2, "registered again")
        if number == 1:
            p.kill(signal.SIGTERM)
            assert p.wait() == 0
            p = site.daemon("p")
            producer.wait(lambda: len(producer.seen(Up)) == 2, "registered again")
            remote = producer.up()
    assert consumer.wrong(6, {0: 0, 1: 1, 2: 2}) == 0


def test_sigterm_lets_what_is_in_flight_end(site: Site) -> None:
    p, d = site.daemon("p"), site.daemon("d")
    producer, consumer = site.engine(p, "producer", seed=6), site.engine(d, "consumer")
    remote = producer.up()
    consumer.up()
    how: dict[str, Any] = {"remote": remote, "engine_id": "producer"}
    producer.offer("open", [1, 2], sealed=False, tokens=32)
    producer.client.extend("open", 1, tokens=16)
    producer.poll()
    fetch = consumer.start_fetch("open", [1, 2], **how)
    wait_for(lambda: consumer.poll() or p.metric("kvd_clients") == 1, what="the consumer has asked")
    p.kill(signal.SIGTERM)
    producer.wait(lambda: producer.client.state == "draining", "the shim is told")
    ready = json.loads(get_any(p, "/readyz"))
    assert ready["ready"] is False
    assert "draining" in ready["reasons"]
    with pytest.raises(Exception, match="drain"):
        producer.client.offer("new", 1, blocks=[[3]], tokens=16, lease_s=1.0)
    producer.client.seal("open", 1, tokens=32)
    producer.poll()
    assert consumer.finish(fetch).code == Code.OK
    assert consumer.wrong(6, {1: 1, 2: 2}) == 0

    def gone() -> bool:
        producer.poll()
        return p.popen.poll() is not None

    wait_for(gone, 20.0, what="the daemon ends")
    assert p.popen.returncode == 0
    assert not p.discovery.exists()
    assert not Path(p.socket).exists()
    assert not Path(p.socket + ".link").exists()
    assert producer.client.state == "down"


def get_any(daemon: Daemon, path: str) -> str:
    """An answer's body, whatever its status."""
    try:
        return daemon.get(path)
    except urllib.error.HTTPError as e:
        return str(e.read().decode())


def test_a_second_signal_stops_at_once(site: Site) -> None:
    p = site.daemon("p", drain_timeout_s=600)
    producer = site.engine(p, "producer", seed=6)
    producer.up()
    producer.offer("t", [1], lease_s=500)
    p.kill(signal.SIGTERM)
    producer.wait(lambda: producer.client.state == "draining", "draining")
    assert p.popen.poll() is None
    p.kill(signal.SIGINT)
    assert p.wait() == 0
    producer.wait(lambda: producer.seen(local.OfferEnded), "the engine hears of it")


def test_a_drain_is_bounded(site: Site) -> None:
    p = site.daemon("p", drain_timeout_s=0.3)
    producer = site.engine(p, "producer", seed=6)
    producer.up()
    producer.offer("t", [1], lease_s=500)
    p.kill(signal.SIGTERM)
    assert p.wait() == 0


def test_an_idle_daemon_stops_at_once(site: Site) -> None:
    p = site.daemon("p", drain_timeout_s=600).ready()
    p.kill(signal.SIGINT)
    assert p.wait() == 0


def test_a_supervisor_is_told(site: Site) -> None:
    address = str(site.folder / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(address)
        notify.settimeout(60)
        p = site.daemon("p", env={"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "300000"})
        first = notify.recv(4096).decode()
        assert first.startswith("READY=1\n")
        # READY comes when everything is there to be used.
        assert json.loads(p.discovery.read_text())["pid"] == p.pid
        assert f"MAINPID={p.pid}" in first
        assert {notify.recv(4096) for _ in range(3)} == {b"WATCHDOG=1"}
        p.kill(signal.SIGTERM)
        heard = b""
        while b"STOPPING=1" not in heard:
            heard = notify.recv(4096)
        assert p.wait() == 0


def test_a_stopped_daemon_feeds_no_watchdog(site: Site) -> None:
    address = str(site.folder / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(address)
        notify.settimeout(60)
        p = site.daemon("p", env={"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "300000"})
        assert b"READY=1" in notify.recv(4096)
        p.kill(signal.SIGSTOP)
        wait_for(
            lambda: Path(f"/proc/{p.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T",
            what="stopped",
        )
        notify.settimeout(1.0)
        quiet = False
        for _ in range(20):
            try:
                notify.recv(4096)
            except TimeoutError:
                quiet = True
                break
        assert quiet
        p.kill(signal.SIGCONT)
        notify.settimeout(30)
        assert notify.recv(4096) == b"WATCHDOG=1"


def refused(site: Site, **settings: object) -> str:
    """A daemon that must not start: its status is 1, and what it says."""
    daemon = site.daemon("refused", **settings)
    assert daemon.wait(60) == 1
    assert not daemon.discovery.exists()
    return daemon.tail()


def test_a_port_that_is_taken_is_named(site: Site) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        for setting in ("listen", "data_listen", "metrics"):
            text = refused(site, **{setting: f"127.0.0.1:{port}"})
            assert str(port) in text, text
            assert "in use" in text, text
    assert not (site.folder / "refused.sock").exists()


def test_a_live_daemon_on_the_same_socket_is_named_by_pid(site: Site) -> None:
    p = site.daemon("p").ready()
    text = refused(site, socket=p.socket)
    assert f"pid {p.pid}" in text, text
    assert p.popen.poll() is None
    producer = site.engine(p, "producer")
    producer.up()


def test_a_socket_left_behind_is_replaced(site: Site) -> None:
    first = site.daemon("p").ready()
    first.kill(signal.SIGKILL)
    first.wait()
    assert Path(first.socket).exists()
    second = site.daemon("p").ready()
    site.engine(second, "producer").up()


def test_the_socket_is_for_its_user_alone_in_a_folder_made_for_it(site: Site) -> None:
    folder = site.folder / "made"
    p = site.daemon("p", socket=str(folder / "k.sock")).ready()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "k.sock").stat().st_mode & 0o777 == 0o600
    assert (folder / "k.sock.link").stat().st_mode & 0o777 == 0o600
    p.kill(signal.SIGTERM)
    assert p.wait() == 0
    assert list(folder.iterdir()) == []


def test_a_file_that_is_no_socket_is_left_alone(site: Site) -> None:
    path = site.folder / "precious"
    path.write_text("data")
    assert "no socket" in refused(site, socket=str(path))
    assert path.read_text() == "data"


def test_a_passed_listener_is_served(site: Site) -> None:
    """Socket activation: the supervisor's socket on descriptor 3, before and after."""
    path = site.folder / "activated.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        pid = os.fork()
        if pid == 0:  # LISTEN_PID must be the daemon's own
            try:
                log = os.open(site.folder / "a.log", os.O_WRONLY | os.O_CREAT, 0o600)
                os.dup2(log, 2)
                os.dup2(listener.fileno(), 3)
                os.set_inheritable(3, True)
                env = {
                    **os.environ,
                    "LISTEN_FDS": "1",
                    "LISTEN_PID": str(os.getpid()),
                    "KVD_DIE_WITH_PARENT": str(os.getppid()),
                }
                command = [sys.executable, "-m", "kvd", "serve", f"--socket={path}.unused"]
                command.append(f"--discovery-file={site.folder / 'a.json'}")
                os.execve(sys.executable, command, env)  # noqa: S606
            finally:
                os._exit(99)
        try:
            fake = Daemon.__new__(Daemon)
            fake.socket = str(path)
            engine = site.engine(fake, "producer")
            engine.wait(lambda: engine.client.state == "up", "registered", 60.0)
            found = json.loads((site.folder / "a.json").read_text())
            assert found["socket"] == str(path)
            assert not Path(f"{path}.unused").exists()
        finally:
            os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + 30
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        # It is the supervisor's: it stays for the next daemon.
        assert path.exists()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="there is nothing to set elsewhere")
def test_the_c_librarys_settings_are_there_from_the_start(site: Site) -> None:
    """It executes itself anew once, as the same process, and not for ever."""
    p = site.daemon("p", first_start=True).ready()
    environ = Path(f"/proc/{p.pid}/environ").read_bytes().split(b"\0")
    assert b"KVD_REEXEC=1" in environ
    assert any(item.startswith(b"GLIBC_TUNABLES=") and b"x86" in item for item in environ)
    assert p.popen.poll() is None


def test_a_daemon_ends_with_the_process_that_started_it(site: Site) -> None:
    starter = site.folder / "starter.py"
    starter.write_text(
        "import os, subprocess, sys, time\n"
        "env = {**os.environ, 'KVD_DIE_WITH_PARENT': str(os.getpid()), 'KVD_REEXEC': '1'}\n"
        "subprocess.Popen([sys.executable, '-m', 'kvd', 'serve', *sys.argv[1:]], env=env)\n"
        "time.sleep(600)\n"
    )
    discovery = site.folder / "child.json"
    parent = subprocess.Popen(
        [
            sys.executable,
            str(starter),
            f"--socket={site.folder / 'child.sock'}",
            f"--discovery-file={discovery}",
        ],
        start_new_session=True,
    )
    try:
        wait_for(discovery.exists, 60, what="the daemon serves")
        pid = json.loads(discovery.read_text())["pid"]
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), 20, what="the daemon is gone")
    assert not discovery.exists()
