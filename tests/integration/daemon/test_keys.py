"""Daemons that know each other by key: real ones, over both transports and with strangers."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import zmq

from kvd import keys
from kvd.protocol.codes import Code
from tests.conftest import wait_for
from tests.integration.daemon.conftest import TRANSPORTS, Site
from tests.integration.daemon.engine import Engine
from tests.integration.daemon.harness import Daemon


@pytest.fixture
def rings(tmp_path: Path) -> dict[str, Path]:
    """Keys folders: p and d trust each other; stranger trusts p, and nobody trusts it."""
    made = {name: tmp_path / name for name in ("p", "d", "stranger")}
    public = {name: keys.init(folder).public for name, folder in made.items()}
    keys.add(made["p"], "d", public["d"])
    keys.add(made["d"], "p", public["p"], ("127.0.0.1",))
    keys.add(made["stranger"], "p", public["p"])
    return made


class Keyed:
    """A producer behind its daemon, that consumers of other daemons ask."""

    def __init__(self, site: Site, p: Daemon) -> None:
        self.site, self.p = site, p
        self.producer = site.engine(p, "producer", seed=4)
        self.at = self.producer.up()
        self.number = 0

    def fetch(self, consumer: Engine) -> tuple[str, str]:
        """(code, detail); the bytes are checked."""
        self.number += 1
        self.producer.offer(f"t{self.number}", [1, 2])
        done = consumer.fetch(
            f"t{self.number}", [5, 6], remote=self.at, engine_id="producer", deadline_s=8.0
        )
        assert consumer.wrong(4, {5: 1, 6: 2} if done.code == Code.OK else {}) == 0
        consumer.fill()
        return done.code, done.detail


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_daemons_that_trust_each_other_move_bytes(
    site: Site, rings: dict[str, Path], transport: str
) -> None:
    p, d = (site.daemon(n, keys=rings[n], transport=transport) for n in "pd")
    keyed, consumer = Keyed(site, p.ready()), site.engine(d.ready(), "consumer")
    consumer.up()
    assert keyed.fetch(consumer) == (Code.OK, "")
    assert p.metric("kvd_dropped_total", where="curve") == 0
    [joined] = p.lines("client_joined")
    assert joined["key"] == "d"


def test_a_daemon_that_serves_both_sides_knows_itself(site: Site, rings: dict[str, Path]) -> None:
    p = site.daemon("p", keys=rings["p"]).ready()
    keyed, consumer = Keyed(site, p), site.engine(p, "consumer")
    consumer.up()
    assert keyed.fetch(consumer)[0] == Code.OK


def test_strangers_are_refused_and_counted_and_a_good_peer_is_served(
    site: Site, rings: dict[str, Path], tmp_path: Path
) -> None:
    # One that takes p for somebody with another key.
    wrong = tmp_path / "wrong"
    keys.init(wrong)
    keys.add(wrong, "p", zmq.curve_keypair()[0], ("127.0.0.1",))
    p = site.daemon("p", keys=rings["p"])
    ways = {
        "good": {"keys": rings["d"]},
        "stranger": {"keys": rings["stranger"]},
        "wrong": {"keys": wrong},
        "none": {},
    }
    daemons = {name: site.daemon(name, **how) for name, how in ways.items()}
    keyed = Keyed(site, p.ready())
    consumers = {n: site.engine(d.ready(), f"consumer-{n}") for n, d in daemons.items()}
    for consumer in consumers.values():
        consumer.up()

    def counted(reason: str, before: float) -> bool:
        return p.metric("kvd_dropped_total", where="curve", reason=reason) > before

    assert keyed.fetch(consumers["good"])[0] == Code.OK
    for name, reason, says in (
        ("stranger", "unknown_key", "does not know our key"),
        ("wrong", "wrong_server_key", "none of the keys that are trusted"),
        ("none", "mechanism_mismatch", "keys (CURVE)"),
    ):
        before = p.metric("kvd_dropped_total", where="curve", reason=reason)
        code, detail = keyed.fetch(consumers[name])
        # Without keys of its own it may hear no more than that the connection was closed.
        allowed = {Code.PEER_NOT_ALLOWED} | ({Code.PEER_UNREACHABLE} if name == "none" else set())
        assert code in allowed, (name, code, detail)
        assert says in detail
        wait_for(partial(counted, reason, before), what=f"{name} is counted as {reason}")
        assert keyed.fetch(consumers["good"])[0] == Code.OK
    assert p.metric("kvd_clients") <= 1
    assert {line["daemon_id"] for line in p.lines("client_joined")} == {
        line["daemon_id"] for line in daemons["good"].lines("started")
    }


def test_a_daemon_with_keys_does_not_talk_to_one_without(
    site: Site, rings: dict[str, Path]
) -> None:
    """No way back to plain text: the consumer refuses, too."""
    p, d = site.daemon("p"), site.daemon("d", keys=rings["d"])
    keyed, consumer = Keyed(site, p.ready()), site.engine(d.ready(), "consumer")
    consumer.up()
    code, detail = keyed.fetch(consumer)
    assert code == Code.PEER_NOT_ALLOWED, detail
    assert "has no keys" in detail  # known, or one of the guesses
    assert p.metric("kvd_clients") == 0


def test_a_key_that_is_removed_ends_the_connection_and_one_that_is_added_counts(
    site: Site, rings: dict[str, Path]
) -> None:
    p, d = (site.daemon(n, keys=rings[n]) for n in "pd")
    keyed, consumer = Keyed(site, p.ready()), site.engine(d.ready(), "consumer")
    consumer.up()
    assert keyed.fetch(consumer)[0] == Code.OK
    held = (rings["p"] / "peers" / "d.pub").read_bytes()
    keys.remove(rings["p"], "d")
    wait_for(
        lambda: p.metric("kvd_dropped_total", where="curve", reason="key_removed") == 1,
        what="its client is thrown out",
    )
    wait_for(lambda: keyed.fetch(consumer)[0] == Code.PEER_NOT_ALLOWED, what="it is refused")
    restored = rings["p"] / "peers" / "d.pub"
    restored.write_bytes(held)
    wait_for(lambda: keyed.fetch(consumer)[0] == Code.OK, what="it is served again")


def test_a_bad_keys_folder_stops_the_daemon_by_name(site: Site, rings: dict[str, Path]) -> None:
    (rings["p"] / "kvd.key").chmod(0o644)
    p = site.daemon("p", keys=rings["p"])
    assert p.wait() == 78
    assert "chmod 600" in p.tail()
