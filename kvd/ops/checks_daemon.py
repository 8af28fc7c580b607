"""Checks of the daemon that runs here (or does not), of its keys, and of who may ask it."""

from __future__ import annotations

import os
from pathlib import Path

from kvd import __version__, keys
from kvd.control import read_token
from kvd.errors import ConfigError
from kvd.keys import KeysError
from kvd.local.seqpacket import connect, peercred
from kvd.ops.findings import Finding, Surroundings, error, ok, warning


def check_daemon(at: Surroundings) -> list[Finding]:
    daemon = at.daemon
    if daemon is None:
        path = Path(at.settings.socket)
        stale = path.exists() and not _listens(str(path))
        return [
            warning(
                "daemon",
                f"a dead daemon left {path} behind" if stale else f"no daemon: {at.problem}",
                why="vLLM serves without transfers until there is one",
                fix="start it: systemctl start kvd@0, or kvd serve; journalctl -u kvd@0 says why "
                "it ended",
            )
        ]
    if daemon["draining"]:
        return [
            warning(
                "daemon",
                f"the daemon (pid {daemon['pid']}) is draining",
                why="it takes nothing new",
                fix="restart it when nothing is in flight: systemctl restart kvd@0",
            )
        ]
    if not daemon["ready"]:
        reasons = "; ".join(f"{k}: {v}" for k, v in daemon["reasons"].items())
        return [
            error(
                "daemon",
                f"the daemon (pid {daemon['pid']}) is not ready: {reasons}",
                why="it takes no work",
                fix="see its log",
            )
        ]
    return [ok("daemon", f"pid {daemon['pid']} is ready, by {'/'.join(daemon['transports'])}")]


def _listens(path: str) -> bool:
    try:
        connect(path).close()
    except OSError:
        return False
    return True


def check_version(at: Surroundings) -> list[Finding]:
    daemon = at.daemon
    if daemon is not None and daemon["version"] != __version__:
        return [
            warning(
                "version",
                f"the running daemon is {daemon['version']}, installed is {__version__}",
                why="it was not restarted after the installation",
                fix="systemctl restart kvd@0 (engines go on meanwhile)",
            )
        ]
    return [ok("version", __version__)]


def check_pid_namespace(at: Surroundings) -> list[Finding]:
    """By the peer's credentials: a process of another PID namespace has no pid here."""
    if at.status is None:
        return [ok("pid_namespace", "no daemon to look at")]
    try:
        with connect(at.settings.socket) as sock:
            pid = peercred(sock)[0]
    except OSError as e:
        return [
            error(
                "pid_namespace",
                f"{at.settings.socket} cannot be connected to: {e.strerror}",
                why="engines cannot either",
                fix="see the daemon's log; restart it",
            )
        ]
    if not (at.proc / str(pid)).exists() or pid == 0:
        return [
            warning(
                "pid_namespace",
                "the daemon runs in another PID namespace",
                why="an engine cannot end a daemon that hangs, and then keeps its blocks until "
                "the daemon's supervisor restarts it",
                fix="shareProcessNamespace: true (Kubernetes), pid: service:... (compose)",
            )
        ]
    return [ok("pid_namespace", f"pid {pid} can be seen from here")]


def check_keys(at: Surroundings) -> list[Finding]:
    settings = at.settings
    reachable = not (settings.listen_at.is_loopback and settings.data_listen_at.is_loopback)
    if not settings.keys:
        if reachable:
            return [
                warning(
                    "keys",
                    "other hosts reach this daemon, and there are no keys (insecure = true)",
                    why="whoever reaches the port can fetch KV, that is what users wrote",
                    fix="kvd keys init, kvd keys add, and keys = FOLDER on every daemon",
                )
            ]
        return [ok("keys", "none, and only this host reaches the daemon")]
    try:
        ring = keys.load(settings.keys)
    except KeysError as e:
        return [
            error("keys", e.detail, why="the daemon does not start so", fix=_keys_fix(e.detail))
        ]
    if not ring.peers:
        return [
            warning(
                "keys",
                f"{settings.keys} trusts no other daemon",
                why="only daemons with the same key pair can talk to this one",
                fix="kvd keys add NAME KEY; the other's KEY: kvd keys list, there",
            )
        ]
    return [ok("keys", f"{len(ring.peers)} peers are trusted")]


def _keys_fix(detail: str) -> str:
    return detail.partition("run: ")[2] or "kvd keys init, or restore the folder"


def check_token(at: Surroundings) -> list[Finding]:
    try:
        token = read_token(at.settings.control_token_file)
    except ConfigError as e:
        return [
            error(
                "token",
                e.detail,
                why="the daemon does not start so",
                fix="(umask 077; openssl rand -hex 24 > FILE)",
            )
        ]
    return [ok("token", "POST needs the token" if token else "POST on this host only")]


def check_allow_peers(at: Surroundings) -> list[Finding]:
    settings = at.settings
    only_here = all(n.is_loopback for n in settings.peer_networks)
    if not settings.listen_at.is_loopback and only_here:
        return [
            error(
                "allow_peers",
                f"listen is {settings.listen}, but allow_peers covers this host only",
                why="every other daemon is refused, and none is contacted",
                fix="allow_peers = the networks that the other daemons are in",
            )
        ]
    wide = [str(n) for n in settings.peer_networks if n.prefixlen == 0]
    if wide and not settings.keys:
        return [
            warning(
                "allow_peers",
                f"{', '.join(wide)} is everybody",
                why="without keys any host may fetch KV",
                fix="name the networks of your daemons, or use keys",
            )
        ]
    return [ok("allow_peers", ", ".join(settings.allow_peers))]


def check_peers(at: Surroundings) -> list[Finding]:
    """Peers that the running daemon wants and cannot reach."""
    down = [] if at.status is None else [p for p in at.status["peers"] if p["state"] == "down"]
    found = [
        error(
            "peers",
            f"{p['address']} is down: {p['problem'] or 'no reason known'}",
            why="what it holds cannot be fetched; vLLM prefills again",
            fix=f"kvd doctor --peer {p['address']} looks closer",
        )
        for p in down
    ]
    return found or [ok("peers", "none is down")]


def check_leftovers(at: Surroundings) -> list[Finding]:
    """Shared memory that dead engines left."""
    try:
        names = [n for n in os.listdir(at.shm) if n.startswith("torch_")]
    except OSError:
        names = []
    dead = [n for n in names if _is_dead(at, n)]
    if dead:
        return [
            warning(
                "leftovers",
                f"{len(dead)} files of dead engines in {at.shm}, such as {dead[0]}",
                why="they take memory until the next boot",
                fix="rm " + " ".join(str(at.shm / n) for n in dead[:4]),
            )
        ]
    return [ok("leftovers", "none")]


def _is_dead(at: Surroundings, name: str) -> bool:
    """torch names its files torch_PID_...; a pid that is not there has ended."""
    pid = name.split("_")[1] if name.count("_") else ""
    return pid.isdigit() and not (at.proc / pid).exists()
