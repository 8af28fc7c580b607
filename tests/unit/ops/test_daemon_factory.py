"""The daemon as an operator meets it: a process, its files, its endpoints, its exit status."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

from tests.plugins.daemons import DaemonFactory


def test_a_daemon_says_where_it_is_and_cleans_up(
    daemon_factory: DaemonFactory, tmp_run_dir: Path
) -> None:
    daemon = daemon_factory("a", transport="tcp")
    told = json.loads(daemon.discovery_file.read_text())
    assert told["pid"] == daemon.pid
    assert told["socket"] == daemon.socket
    assert daemon.get("/healthz")[0] == 200
    status, body = daemon.get("/readyz")
    assert (status, json.loads(body)) == (200, {"ready": True, "reasons": {}})
    assert daemon.metric("kvd_sessions") == 0
    assert daemon.metric("kvd_build_info") == 1
    with socket.create_connection(daemon.advertise, timeout=5):
        pass
    assert daemon.stop() == 0
    assert not daemon.discovery_file.exists()
    assert sorted(p.suffix for p in tmp_run_dir.iterdir() if p.suffix != ".log") == []
    assert all("event" in line for line in daemon.logs())


def test_a_second_daemon_on_the_same_socket_or_port_is_refused_by_name(
    daemon_factory: DaemonFactory,
) -> None:
    first = daemon_factory("a")
    second = daemon_factory("b", wait=False, socket=first.socket)
    assert second.wait() == 1
    assert str(first.pid) in second.tail()
    metrics = first.discovery["metrics"]
    third = daemon_factory("c", wait=False, metrics=metrics)
    assert third.wait() == 1
    assert f"metrics: cannot listen on {metrics}" in third.tail()
    assert first.get("/readyz")[0] == 200


def test_it_starts_again_after_a_kill(daemon_factory: DaemonFactory) -> None:
    daemon = daemon_factory("a")
    daemon.kill()
    again = daemon_factory("a")
    assert again.pid != daemon.pid
    assert again.get("/readyz")[0] == 200


def test_a_stopped_daemon_goes_on_after_sigcont(daemon_factory: DaemonFactory) -> None:
    daemon = daemon_factory("a")
    daemon.signal(signal.SIGSTOP)
    daemon.signal(signal.SIGCONT)
    assert daemon.get("/healthz")[0] == 200
