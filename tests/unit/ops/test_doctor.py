"""Each fault is planted, and must be named with its fix; in a clean run nothing is named."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from kvd import __version__, keys
from kvd.cli import main
from kvd.config import load
from kvd.local.listener import bind
from kvd.ops import checks_peer, doctor
from kvd.ops.doctor import CHECKS, PEER_CHECKS, examine
from kvd.ops.findings import Finding, Surroundings, worst
from kvd.peers.wire import encode_to_consumer
from kvd.protocol import peer
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr

GIB = 2**30


def room(total: int, free: int) -> Callable[[str], Any]:
    found = SimpleNamespace(f_blocks=total // 4096, f_bavail=free // 4096, f_frsize=4096)
    return lambda path: found


def status(**daemon: Any) -> dict[str, Any]:
    told = {
        "pid": os.getpid(), "version": __version__, "ready": True, "reasons": {},
        "draining": False, "transports": ["shm"],
    }  # fmt: skip
    return {"daemon": {**told, **daemon}, "peers": []}


class Clean:
    """Surroundings in which all is well, and ways to change them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "shm").mkdir()
        self.proc = folder / "proc"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "self/mounts").write_text(f"tmpfs {folder / 'shm'} tmpfs rw 0 0\n")
        (self.proc / str(os.getpid())).mkdir()
        congestion = self.proc / "sys/net/ipv4"
        congestion.mkdir(parents=True)
        (congestion / "tcp_available_congestion_control").write_text("reno cubic\n")
        self.listener = bind(str(folder / "kvd.sock"))

    def at(self, overrides: dict[str, object] | None = None, **changes: Any) -> Surroundings:
        own: dict[str, object] = {
            "socket": self.listener.path, "shm_threads": 1, **(overrides or {}),
        }  # fmt: skip
        base = Surroundings(
            load(own, None, {}),
            env={},
            shm=self.folder / "shm",
            proc=self.proc,
            statvfs=room(64 * GIB, 60 * GIB),
            clock_state=lambda: 0,
            limits=lambda kind: (65536, 65536),
            version=lambda package: "0.32.0" if package == "vllm" else None,
            plugins=lambda: ["kvd"],
            status=status(),
        )
        return replace(base, **changes)


@pytest.fixture
def clean(tmp_run_dir: Path) -> Iterator[Clean]:
    made = Clean(tmp_run_dir)
    yield made
    made.listener.close()


def bad(found: list[Finding]) -> list[Finding]:
    return [f for f in found if f.level != "ok"]


def test_a_clean_run_names_nothing(clean: Clean) -> None:
    found = examine(clean.at())
    assert bad(found) == []
    assert worst(found) == "ok"
    assert {f.check for f in found} == {c.__name__.removeprefix("check_") for c in CHECKS}


Fault = tuple[dict[str, object], dict[str, Any]]


def long_path(clean: Clean) -> Fault:
    return {"socket": f"{clean.folder}/{'x' * 90}"[:105]}, {}


def wrong_uid(clean: Clean) -> Fault:
    return {}, {"uid": os.geteuid() + 1}


def tiny_shm(clean: Clean) -> Fault:
    return {}, {"statvfs": room(64 * 2**20, 60 * 2**20)}


def full_shm(clean: Clean) -> Fault:
    return {}, {"statvfs": room(64 * GIB, GIB)}


def shm_on_disk(clean: Clean) -> Fault:
    (clean.proc / "self/mounts").write_text(f"/dev/vda {clean.folder / 'shm'} ext4 rw 0 0\n")
    return {}, {}


def no_daemon(clean: Clean) -> Fault:
    return {}, {"status": None, "problem": "nobody listens there"}


def dead_socket(clean: Clean) -> Fault:
    clean.listener.sock.close()
    return {}, {"status": None, "problem": "refused"}


def draining(clean: Clean) -> Fault:
    return {}, {"status": status(draining=True, ready=False)}


def not_ready(clean: Clean) -> Fault:
    return {}, {"status": status(ready=False, reasons={"not_serving": "sockets are closed"})}


def old_daemon(clean: Clean) -> Fault:
    return {}, {"status": status(version="0.0.1")}


def other_pid_namespace(clean: Clean) -> Fault:
    (clean.proc / str(os.getpid())).rmdir()
    return {}, {}


def few_files(clean: Clean) -> Fault:
    return {}, {"limits": lambda kind: (256, 256)}


def clock_off(clean: Clean) -> Fault:
    return {}, {"clock_state": lambda: 5}


def many_threads(clean: Clean) -> Fault:
    return {"shm_threads": 64}, {}


def not_our_address(clean: Clean) -> Fault:
    settings: dict[str, object] = {
        "listen": "192.0.2.1:7700", "insecure": True, "allow_peers": "192.0.2.0/24",
    }  # fmt: skip
    return settings, {"status": None, "problem": "none"}


def unknown_name(clean: Clean) -> Fault:
    return {"advertise": "no-such-host.invalid:1"}, {}


def advertised_loopback(clean: Clean) -> Fault:
    settings: dict[str, object] = {
        "listen": "0.0.0.0:7700", "advertise": "127.0.0.1", "insecure": True,
        "allow_peers": "192.0.2.0/24",
    }  # fmt: skip
    return settings, {}


def peers_only_here(clean: Clean) -> Fault:
    return {"listen": "192.0.2.1:7700", "insecure": True}, {}


def everybody(clean: Clean) -> Fault:
    return {"listen": "192.0.2.1:1", "insecure": True, "allow_peers": "0.0.0.0/0"}, {}


def no_keys(clean: Clean) -> Fault:
    return {"keys": str(clean.folder / "keys")}, {}


def keys_for_all(clean: Clean) -> Fault:
    keys.init(clean.folder / "keys")
    (clean.folder / "keys/kvd.key").chmod(0o644)
    return {"keys": str(clean.folder / "keys")}, {}


def no_trusted(clean: Clean) -> Fault:
    keys.init(clean.folder / "keys")
    return {"keys": str(clean.folder / "keys")}, {}


def open_token(clean: Clean) -> Fault:
    file = clean.folder / "token"
    file.write_text("x" * 30)
    file.chmod(0o644)
    return {"control_token_file": str(file)}, {}


def peer_down(clean: Clean) -> Fault:
    down = {"address": "192.0.2.9:7700", "state": "down", "problem": "refuses connections"}
    return {}, {"status": {**status(), "peers": [down]}}


def leftovers(clean: Clean) -> Fault:
    (clean.folder / "shm/torch_999999_1_0").touch()
    return {}, {}


def congestion(clean: Clean) -> Fault:
    return {"tcp_congestion": "bbr"}, {}


def new_vllm(clean: Clean) -> Fault:
    return {}, {"version": lambda package: "9.1.0" if package == "vllm" else None}


def no_plugin(clean: Clean) -> Fault:
    return {}, {"plugins": list}


def plugin_left_out(clean: Clean) -> Fault:
    return {}, {"env": {"VLLM_PLUGINS": "lora"}}


def gpu(clean: Clean, *, driver: str = "550.54.15", **changes: Any) -> Fault:
    """A host with a GPU, and this wrong with it."""
    if driver:
        (clean.proc / "driver/nvidia").mkdir(parents=True)
        text = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Wed Mar  6 2024"
        (clean.proc / "driver/nvidia/version").write_text(text)
    versions = {"vllm": "0.32.0", "cuda-bindings": "12.9.0", "nvidia-nccl-cu12": "2.27.5"}
    versions.update(changes.pop("versions", {}))
    settings = clean.at().settings.model_copy(update={"device": "cuda:0"})
    every = {"settings": settings, "version": versions.get, "gpus": lambda index: (2, [])}
    return {}, {**every, **changes}


def no_driver(clean: Clean) -> Fault:
    return gpu(clean, driver="")


def old_driver(clean: Clean) -> Fault:
    return gpu(clean, driver="470.82.01")


def no_bindings(clean: Clean) -> Fault:
    return gpu(clean, versions={"cuda-bindings": None})


def gpus_apart(clean: Clean) -> Fault:
    return gpu(clean, gpus=lambda index: (3, [2]))


def gpu_hidden(clean: Clean) -> Fault:
    def probe(index: int) -> tuple[int, list[int]]:
        raise RuntimeError("there are 0 GPUs")

    return gpu(clean, gpus=probe)


def no_nccl(clean: Clean) -> Fault:
    return gpu(clean, versions={"nvidia-nccl-cu12": None})


def old_nccl(clean: Clean) -> Fault:
    return gpu(clean, versions={"nvidia-nccl-cu12": "2.10.3"})


def little_memlock(clean: Clean) -> Fault:
    return gpu(clean, limits=lambda kind: (65536, 65536))


def broken_tls(clean: Clean) -> Fault:
    return {"tls_cert": "/none/a.pem", "tls_key": "/none/a.key", "tls_ca": "/none/ca.pem"}, {}


FAULTS: dict[Callable[[Clean], Fault], tuple[str, str, str]] = {
    long_path: ("socket_path", "bytes", "shorter path"),
    wrong_uid: ("user", "belongs to uid", "same user"),
    tiny_shm: ("shm", "64 MiB", "--shm-size"),
    full_shm: ("shm", "% full", "ls -l"),
    shm_on_disk: ("shm", "ext4", "medium Memory"),
    no_daemon: ("daemon", "no daemon", "systemctl start"),
    dead_socket: ("daemon", "dead daemon left", "systemctl start"),
    draining: ("daemon", "draining", "restart"),
    not_ready: ("daemon", "sockets are closed", "log"),
    old_daemon: ("version", "0.0.1", "restart"),
    other_pid_namespace: ("pid_namespace", "another PID namespace", "shareProcessNamespace"),
    few_files: ("limits", "256 open files", "LimitNOFILE"),
    clock_off: ("clock", "not synchronised", "chrony"),
    many_threads: ("cpus", "64 copying threads", "shm_threads"),
    not_our_address: ("ports", "not an address of this host", "ip addr"),
    unknown_name: ("advertise", "cannot be resolved", "every peer resolves"),
    advertised_loopback: ("advertise", "127.0.0.1", "by which others reach"),
    peers_only_here: ("allow_peers", "this host only", "allow_peers ="),
    everybody: ("allow_peers", "everybody", "use keys"),
    no_keys: ("keys", "there is no", "kvd keys init"),
    keys_for_all: ("keys", "mode 0644", "chmod 600"),
    no_trusted: ("keys", "trusts no other", "kvd keys add"),
    open_token: ("token", "chmod 600", "umask 077"),
    peer_down: ("peers", "192.0.2.9:7700 is down", "kvd doctor --peer"),
    leftovers: ("leftovers", "torch_999999_1_0", "rm "),
    congestion: ("congestion", "no bbr", "modprobe tcp_bbr"),
    new_vllm: ("vllm", "9.1.0 was not tested", "compatibility.md"),
    no_driver: ("gpu", "no GPU", "nvidia-smi"),
    old_driver: ("gpu", "470.82.01", "upgrade the driver"),
    no_bindings: ("gpu", "cuda-bindings is not installed", "pip install cuda-bindings"),
    gpus_apart: ("gpu", "no peer access to GPU 2", "topo -p2p"),
    gpu_hidden: ("gpu", "there are 0 GPUs", "CUDA_VISIBLE_DEVICES"),
    no_nccl: ("nccl", "not installed", "pip install nvidia-nccl"),
    old_nccl: ("nccl", "2.10.3", "--upgrade"),
    little_memlock: ("limits", "locked memory", "LimitMEMLOCK"),
    broken_tls: ("tls", "/none/ca.pem", "openssl x509"),
    no_plugin: ("vllm", "does not know KvdConnector", "pip install vllm-kvd"),
    plugin_left_out: ("vllm", "leaves kvd out", "add kvd"),
}


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_named_with_its_fix(
    clean: Clean, plant: Callable[[Clean], Fault]
) -> None:
    check, what, fix = FAULTS[plant]
    before = [f for f in examine(clean.at()) if f.check == check]
    assert {f.level for f in before} == {"ok"}
    settings, changes = plant(clean)
    found = [f for f in bad(examine(clean.at(settings, **changes))) if f.check == check]
    assert found, "the fault is not named"
    assert any(what in f.what and fix in f.fix and f.why for f in found), found


def test_a_gpu_with_which_all_is_well(clean: Clean) -> None:
    _, changes = gpu(clean, limits=lambda kind: (65536, 65536) if kind == 7 else (-1, -1))
    assert bad(examine(clean.at(**changes))) == []


def test_without_a_gpu_nothing_of_cuda_is_asked_for(clean: Clean) -> None:
    def never(_: int) -> tuple[int, list[int]]:
        raise AssertionError("asked")

    found = {f.check: f for f in examine(clean.at(gpus=never))}
    assert "no GPU" in found["gpu"].what
    assert found["gpu"].level == found["nccl"].level == "ok"


def test_a_member_of_the_sockets_group_is_no_stranger(clean: Clean) -> None:
    at = clean.at({"socket_group": "4242"}, uid=os.geteuid() + 1, groups=lambda: [4242])
    assert [f.level for f in examine(at) if f.check == "user"] == ["ok"]
    other = replace(at, groups=lambda: [7])
    assert [f.level for f in examine(other) if f.check == "user"] == ["error"]


def test_a_taken_port_is_named_and_a_free_one_is_not(clean: Clean) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        at = clean.at({"listen": f"127.0.0.1:{port}"}, status=None, problem="none")
        [found] = [f for f in examine(at) if f.check == "ports"]
        assert found.level == "error"
        assert f"port {port} is in use" in found.what
    assert [f.level for f in examine(at) if f.check == "ports"] == ["ok"]


def test_a_check_that_breaks_is_itself_a_finding(clean: Clean) -> None:
    def breaks(path: str) -> os.statvfs_result:
        raise RuntimeError("planted")

    [found] = bad(examine(clean.at(statvfs=breaks)))
    assert (found.check, found.level) == ("shm", "error")
    assert "planted" in found.what


# --- a peer ---------------------------------------------------------------------------------


@pytest.fixture
def router() -> Iterator[Callable[[bytes], PeerAddr]]:
    """A peer that answers any hello with the given bytes."""
    context, done = zmq.Context(), threading.Event()
    threads: list[threading.Thread] = []

    def start(answer: bytes) -> PeerAddr:
        sock = context.socket(zmq.ROUTER)
        sock.set(zmq.LINGER, 1000)
        port = sock.bind_to_random_port("tcp://127.0.0.1")

        def serve() -> None:
            with sock:
                while not done.is_set():
                    if sock.poll(20):
                        sock.send_multipart([sock.recv_multipart()[0], answer])

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return PeerAddr("127.0.0.1", port)

    yield start
    done.set()
    for thread in threads:
        thread.join(15)
    context.term()


def hello_of(clean: Clean, address: PeerAddr, **settings: object) -> list[Finding]:
    return checks_peer.check_hello(clean.at(settings, peer=address))


def welcome(version: str) -> bytes:
    return encode_to_consumer(1, peer.PeerWelcome("other", version, "h", "", b"n" * 16))


def test_a_peer_that_fits(clean: Clean, router: Callable[[bytes], PeerAddr]) -> None:
    [found] = hello_of(clean, router(welcome(__version__)))
    assert (found.level, found.check) == ("ok", "hello"), found
    assert "other" in found.what


def test_a_peer_of_another_version(clean: Clean, router: Callable[[bytes], PeerAddr]) -> None:
    found = hello_of(clean, router(welcome("9.9")))
    assert [(f.check, f.level) for f in found] == [("hello", "ok"), ("version_skew", "warning")]
    refused = peer.PeerRefused(str(Code.VERSION_MISMATCH), "proto_major: 9.0 here")
    [one] = hello_of(clean, router(encode_to_consumer(1, refused)))
    assert (one.check, one.level) == ("version_skew", "error")
    assert "upgrade" in one.fix


def test_a_peer_that_is_down_or_is_none(clean: Clean, router: Callable[[bytes], PeerAddr]) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        address = PeerAddr("127.0.0.1", taken.getsockname()[1])
    [found] = hello_of(clean, address)
    assert found.level == "error"
    assert "refuses connections" in found.what or "closed" in found.what
    [found] = hello_of(clean, router(b"\x80\x04\x95N."))
    assert found.level == "error"


def test_a_peer_without_keys_when_we_have_some(
    clean: Clean, router: Callable[[bytes], PeerAddr]
) -> None:
    keys.init(clean.folder / "keys")
    [found] = hello_of(clean, router(welcome("1")), keys=str(clean.folder / "keys"))
    assert found.level == "error"
    assert "kvd keys list" in found.fix


def test_a_peer_that_is_not_allowed_or_not_found(clean: Clean) -> None:
    [found] = checks_peer.check_route(clean.at(peer=PeerAddr("192.0.2.7", 1)))
    assert "none of allow_peers" in found.what
    [found] = checks_peer.check_route(clean.at(peer=PeerAddr("no-such-host.invalid", 1)))
    assert "cannot be resolved" in found.what
    [found] = checks_peer.check_route(clean.at(peer=PeerAddr("127.0.0.1", 1)))
    assert found.level == "ok"
    assert " lo " in found.what


# --- the command ----------------------------------------------------------------------------


def test_the_command_says_it_as_json_and_by_its_status(
    tmp_run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = ["--socket", str(tmp_run_dir / "none.sock")]
    assert main(["doctor", "--json", *at]) in (1, 2)
    told = json.loads(capsys.readouterr().out)
    assert told["worst"] in ("warning", "error")
    assert {"check", "level", "what", "why", "fix"} == set(told["findings"][0])
    assert any(f["check"] == "daemon" and f["level"] == "warning" for f in told["findings"])
    monkeypatch.setattr(doctor, "examine", lambda at: [])
    assert main(["doctor", *at]) == 0


def test_mistakes_in_the_settings_are_findings_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--shm-threads", "0"]) == 78
    [found] = json.loads(capsys.readouterr().out)["findings"]
    assert (found["check"], found["level"]) == ("config", "error")
    assert "--shm-threads" in found["what"]
    assert main(["doctor", "--peer", "nowhere"]) == 78
    assert main(["doctor", "--bogus"]) == 78


def test_there_are_enough_checks() -> None:
    assert len(CHECKS) + len(PEER_CHECKS) >= 12
