"""`kvd status`, `transfers`, `healthcheck`, `drain` and `release` against daemons that work."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvd.cli import main
from kvd.ops import checks_peer, doctor
from kvd.ops.findings import Finding
from kvd.protocol import local
from kvd.protocol.codes import Code
from tests.conftest import wait_for
from tests.integration.daemon.conftest import Pair, Site
from tests.integration.daemon.harness import ROOT, Daemon


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main([str(a) for a in args])
    said = capsys.readouterr()
    return status, said.out, said.err


def status_of(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code, out, _ = run(capsys, "status", "--json", "--socket", daemon.socket)
    assert code == 0
    [found] = json.loads(out).values()
    assert isinstance(found, dict)
    return found


def transfers_of(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    code, out, _ = run(capsys, "transfers", "--json", "--socket", daemon.socket)
    assert code == 0
    found = json.loads(out)
    assert isinstance(found, list)
    return found


def test_status_and_transfers_tell_what_moved(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    producer, consumer = pair.engines(seed=3)
    producer.offer("moved", [1, 2])
    done = pair.fetch(consumer, "moved", [3, 4])
    assert done.code == Code.OK
    failed = pair.fetch(consumer, "never-offered", [5], park_s=0.0)
    assert failed.code != Code.OK

    d = status_of(pair.d, capsys)
    assert [e["engine_id"] for e in d["engines"]] == [consumer.engine_id]
    [peer] = d["peers"]
    assert (peer["address"], peer["state"]) == (str(pair.p.address), "up")
    assert {a["transport"] for a in d["attachments"]} == {done.transport}
    assert failed.code in {f["code"] for f in d["failures"]}
    assert d["daemon"]["ready"] is True
    wait_for(lambda: status_of(pair.d, capsys)["peers"][0]["rtt_s"] > 0, what="the RTT is known")
    p = status_of(pair.p, capsys)
    assert [c["daemon_id"] for c in p["clients"]] == [d["daemon"]["daemon_id"]]

    code, out, _ = run(capsys, "transfers", "--json", "--socket", pair.d.socket, "--last", "2")
    newest, older = json.loads(out)
    assert (newest["transfer_id"], newest["code"]) == ("never-offered", failed.code)
    assert (older["transfer_id"], older["code"], older["nbytes"]) == ("moved", "ok", done.nbytes)
    assert older["peer"] == str(pair.p.address)
    stages = older["stages"]
    assert 0 <= stages["parked"] <= stages["granted"] <= stages["last_byte"] <= stages["told"]

    served = wait_for(
        lambda: [t for t in transfers_of(pair.p, capsys) if t["transfer_id"] == "moved"],
        what="the producer's daemon knows that it ended",
    )[0]
    assert (served["direction"], served["transport"]) == ("served", done.transport)
    told = served["stages"]
    assert 0 <= told["granted"] <= told["told"]
    assert told["parked"] <= told["granted"]
    if done.transport == "tcp":
        assert told["granted"] <= told["first_byte"] <= told["last_byte"] <= told["told"]
    else:
        assert (told["first_byte"], told["last_byte"]) == (-1, -1)

    code, out, _ = run(capsys, "status", "--socket", pair.d.socket, "--socket", pair.p.socket)
    assert code == 0
    for text in (consumer.engine_id, producer.engine_id, str(pair.p.address), failed.code):
        assert text in out
    assert "moved" in run(capsys, "transfers", "--at", pair.p.found["metrics"])[1]


def test_daemons_are_found_by_address_and_by_discovery_file(
    pair: Pair, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ways = [("--at", pair.p.found["metrics"]), ("--discovery", pair.p.discovery)]
    for way in ways:
        code, out, _ = run(capsys, "status", "--json", *way)
        [found] = json.loads(out).values()
        assert (code, found["daemon"]["pid"]) == (0, pair.p.pid)
    code, out, _ = run(capsys, "status", "--json", "--socket", tmp_path / "nobody.sock")
    assert code == 1
    assert "no daemon serves there" in out
    assert run(capsys, "status", "--discovery", tmp_path / "nothing.json")[0] == 78


def test_the_control_socket_is_for_our_user_alone(pair: Pair) -> None:
    assert os.stat(pair.p.socket + ".ctl").st_mode & 0o777 == 0o600


def test_an_operator_frees_the_blocks_of_a_transfer(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    producer, consumer = pair.engines(seed=3)
    producer.offer("stuck/1", [1, 2])
    producer.offer("open", [3], sealed=False, tokens=16)
    at = ("--socket", pair.p.socket)
    wait_for(lambda: len(status_of(pair.p, capsys)["offers"]) == 2, what="both are offered")
    assert run(capsys, "release", "stuck/1", *at)[0] == 0
    producer.wait(lambda: producer.seen(local.OfferEnded), "the engine is told")
    assert [e.transfer_id for e in producer.seen(local.OfferEnded)] == ["stuck/1"]
    assert run(capsys, "release", "stuck/1", *at)[0] == 1
    # One that is being read is not taken away without a word.
    fetch = pair.start(consumer, "open", [7], generation=1)
    wait_for(
        lambda: any(o["grants"] for o in status_of(pair.p, capsys)["offers"]), what="it is read"
    )
    code, _, err = run(capsys, "release", "open", *at)
    assert code == 1
    assert "force=true" in err
    assert run(capsys, "release", "open", "--force", *at)[0] == 0
    assert consumer.finish(fetch).code == Code.REVOKED


def test_healthcheck_drain_and_the_end(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = site.daemon("p", metrics="").ready()
    at = ("--socket", daemon.socket)
    engine = site.engine(daemon, "engine", seed=1)
    engine.up()
    assert run(capsys, "healthcheck", "--ready", *at)[0] == 0
    engine.offer("held", [1])
    wait_for(lambda: status_of(daemon, capsys)["offers"], what="it is offered")
    code, _, err = run(capsys, "drain", "--timeout", "0.2", *at)
    assert code == 1
    assert "1 offers" in err
    code, _, err = run(capsys, "healthcheck", "--ready", *at)
    assert code == 1
    assert "draining" in err
    assert run(capsys, "healthcheck", *at)[0] == 0
    assert run(capsys, "release", "held", *at)[0] == 0
    assert run(capsys, "drain", *at)[:2] == (
        0,
        "drained: nothing is in flight, nothing new is taken\n",
    )
    # Drained, it waits for whoever stops it; then it ends at once, and well.
    assert daemon.popen.poll() is None
    engine.client.close()
    daemon.kill(signal.SIGTERM)
    assert daemon.wait() == 0
    assert not os.path.exists(daemon.socket + ".ctl")
    assert run(capsys, "healthcheck", *at)[0] == 1


def test_watch_fits_a_terminal_of_80_columns(pair: Pair) -> None:
    producer, consumer = pair.engines(seed=3)
    producer.offer("a-transfer-with-a-rather-long-name-" + "x" * 60, [1, 2])
    assert pair.fetch(consumer, "nobody-offers-this", [3], park_s=0.0).code != Code.OK
    leader, follower = pty.openpty()
    env = {**os.environ, "COLUMNS": "80", "LINES": "50", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "kvd", "status", "--watch", "--interval", "0.2"]
    watch = subprocess.Popen(
        [*command, "--socket", pair.p.socket, "--socket", pair.d.socket],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=follower, stderr=follower, env=env,
    )  # fmt: skip
    os.close(follower)
    try:
        seen = b""
        deadline = time.monotonic() + 60
        while seen.count(b"Ctrl-C ends") < 3:
            assert time.monotonic() < deadline, seen[-2000:]
            if select.select([leader], [], [], 1)[0]:
                seen += os.read(leader, 2**16)
        watch.send_signal(signal.SIGINT)
        while select.select([leader], [], [], 10)[0]:
            try:
                seen += os.read(leader, 2**16)
            except OSError:
                break
        assert watch.wait(20) == 130
    finally:
        if watch.poll() is None:
            watch.kill()
            watch.wait(10)
        os.close(leader)
    from rich.text import Text

    # Each look begins at the top left of the screen; Ctrl-C may cut the last in mid-character.
    screens = [
        [Text.from_ansi(line).plain.rstrip() for line in screen.replace("\r", "").split("\n")]
        for screen in seen.decode(errors="replace").split("\x1b[H")
    ]
    assert max(len(line) for screen in screens for line in screen) <= 80
    assert max(map(len, screens)) <= 50
    text = "\n".join(max(screens, key=lambda screen: len(list(screen))))
    for words in (producer.engine_id, "Engines", "Peers that we ask", "Offers", "Failures"):
        assert words in text
    Path(os.environ.get("KVDTEST_SCREEN", os.devnull)).write_text(text)


def test_doctor_leaves_no_peer_behind(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = site.daemon("d").ready()
    at = ("--json", "--socket", daemon.socket)

    def problems(*more: object) -> dict[str, str]:
        _, out, _ = run(capsys, "doctor", *at, *more)
        return {f["check"]: f["what"] for f in json.loads(out)["findings"] if f["level"] != "ok"}

    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        for tries in (1, 2):
            found = problems("--peer", address)
            assert "refuses connections" in found["transfer"]
            assert "peers" not in found
            assert status_of(daemon, capsys)["peers"] == []
            lines = [json.loads(line) for line in daemon.log.read_text().splitlines()]
            assert sum(line["event"] == "peer_down" for line in lines) == tries
    assert "peers" not in problems()
    other = site.daemon("p", listen=address).ready()
    assert str(other.address) == address
    assert "nobody there offers blocks" in problems("--peer", address)["transfer"]
    assert status_of(daemon, capsys)["peers"] == []


def test_doctor_moves_known_blocks_from_a_peer(
    pair: Pair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at = doctor.look({"socket": pair.d.socket}, None, str(pair.p.address))

    def moved() -> Finding | None:
        [found] = checks_peer.check_transfer(at)
        # A warning says that nobody offers blocks there (any more, or yet).
        return None if found.level == "warning" else found

    [before] = checks_peer.check_transfer(at)
    assert before.level == "warning"
    assert "kvd doctor --answer" in before.fix
    command = [sys.executable, "-m", "kvd", "doctor", "--socket", pair.p.socket, "--answer", "150"]
    answerer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        found = wait_for(moved, 60, what="it is offered")
        assert found.level == "ok", found
        assert f"{2 * 16 * 64 * 1024} bytes by" in found.what
        # Other bytes than were sent are an error: here those that are expected differ.
        with monkeypatch.context() as patch:
            patch.setattr(checks_peer, "_byte", lambda block, layer: 7)
            found = wait_for(moved, 60, what="it is offered again")
        assert found.level == "error"
        assert "are not those that were sent" in found.what
    finally:
        answerer.terminate()
        answerer.wait(20)
    _, out, _ = run(capsys, "doctor", "--json", "--socket", pair.d.socket, "--peer", pair.p.address)
    levels = {f["check"]: f["level"] for f in json.loads(out)["findings"]}
    assert (levels["route"], levels["hello"]) == ("ok", "ok")
