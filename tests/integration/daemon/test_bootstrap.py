"""Peers found by a bootstrap service, which tells where an engine is now, whatever its old id."""

from __future__ import annotations

import json
import urllib.request

from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr, Rank
from tests.conftest import wait_for
from tests.integration.daemon.conftest import Site
from tests.integration.daemon.engine import Engine
from tests.integration.daemon.harness import Daemon


def bootstrap_of(daemon: Daemon) -> PeerAddr:
    host, _, port = daemon.found["bootstrap"].rpartition(":")
    return PeerAddr(host, int(port), (0, 0))


def query(at: PeerAddr) -> dict[str, dict[str, object]]:
    with urllib.request.urlopen(f"http://{at.host}:{at.port}/query", timeout=10) as answer:
        found: dict[str, dict[str, object]] = json.load(answer)
        return found


def fetch(
    consumer: Engine, transfer_id: str, remote: PeerAddr, engine_id: str, target: int
) -> tuple[str, int]:
    fetch_id = consumer.start_fetch(
        transfer_id, [target], remote=remote, engine_id=engine_id, park_s=20.0
    )
    done = consumer.finish(fetch_id)
    return done.code, consumer.wrong(consumer_seed(transfer_id), {target: 1})


def consumer_seed(transfer_id: str) -> int:
    """The seed of the engine that offers this transfer in these tests."""
    return {"first": 3, "second": 4}[transfer_id]


def test_the_query_names_the_producers(site: Site) -> None:
    p = site.daemon("p", bootstrap="127.0.0.1:0").ready()
    assert query(bootstrap_of(p)) == {}
    site.engine(p, "engine-p", seed=3).up()
    address = f"tcp://{p.address}"
    assert query(bootstrap_of(p)) == {
        "0": {"engine_id": "engine-p", "worker_addr": {"0": {"0": address}}}
    }


def test_an_engine_that_restarted_is_found_by_its_old_name(site: Site) -> None:
    p = site.daemon("p", bootstrap="127.0.0.1:0").ready()
    d = site.daemon("d").ready()
    at = bootstrap_of(p)
    producer = Engine(p.socket, "engine-p-1", seed=3)
    producer.up()
    consumer = site.engine(d, "engine-d")
    consumer.up()
    alone = d.metric("kvd_mapped_bytes")
    producer.offer("first", [1])
    assert fetch(consumer, "first", at, "engine-p-1", 5) == (Code.OK, 0)

    # The engine restarts, and gets a new id; the router goes on naming the old one.
    producer.close()
    wait_for(lambda: query(at) == {}, what="the old engine is gone")
    wait_for(lambda: d.metric("kvd_mapped_bytes") == alone, what="its reader knows it")
    producer = site.engine(p, "engine-p-2", seed=4)
    producer.up()
    producer.offer("second", [1])
    consumer.fill()
    assert fetch(consumer, "second", at, "engine-p-1", 6) == (Code.OK, 0)


def test_with_two_engines_an_unknown_name_is_refused(site: Site) -> None:
    p = site.daemon("p", bootstrap="127.0.0.1:0").ready()
    d = site.daemon("d").ready()
    for number in (1, 2):
        engine = site.engine(p, f"engine-p-{number}", seed=3)
        engine.up()
        engine.offer("first", [1])
    consumer = site.engine(d, "engine-d")
    consumer.up()
    fetch_id = consumer.start_fetch("first", [5], remote=bootstrap_of(p), engine_id="engine-p-0")
    assert consumer.finish(fetch_id).code == Code.UNKNOWN_ENGINE


def test_nobody_there_is_a_typed_failure(site: Site) -> None:
    d = site.daemon("d", connect_timeout_s=0.5, attach_timeout_s=2.0).ready()
    consumer = site.engine(d, "engine-d")
    consumer.up()
    nobody = PeerAddr("127.0.0.1", 1, (0, 0))
    fetch_id = consumer.start_fetch("first", [5], remote=nobody, engine_id="engine-p")
    done = consumer.finish(fetch_id)
    assert done.code == Code.PEER_UNREACHABLE, done
    assert done.bad == [b"\x01"]


# --- an engine whose ranks have daemons of their own --------------------------------------------


def rank_of(site: Site, daemon: Daemon, engine_id: str, tp_rank: int, seed: int = 0) -> Engine:
    changes = {"tp_size": 2, "tp_rank": tp_rank}
    rank = Rank(tp_rank=tp_rank, tp_size=2)
    engine = site.engine(daemon, engine_id, seed=seed, rank=rank, changes=changes)
    engine.up()
    return engine


def test_one_address_leads_to_all_ranks(site: Site) -> None:
    """Mooncake's parameters name one bootstrap service; each rank finds its own counterpart."""
    second = site.daemon("p1", bootstrap="127.0.0.1:0").ready()
    first = site.daemon(
        "p0", bootstrap="127.0.0.1:0", bootstrap_peers=second.found["bootstrap"]
    ).ready()
    d = site.daemon("d").ready()
    producers = [rank_of(site, p, "engine-p", i, 5 + i) for i, p in enumerate((first, second))]
    consumers = [rank_of(site, d, "engine-d", i) for i in range(2)]
    at = bootstrap_of(first)
    assert query(at) == {
        "0": {
            "engine_id": "engine-p",
            "worker_addr": {
                "0": {"0": f"tcp://{first.address}"},
                "1": {"0": f"tcp://{second.address}"},
            },
        }
    }
    for i, (producer, consumer) in enumerate(zip(producers, consumers, strict=True)):
        producer.offer("t", [1, 2])
        # By the name of an earlier life, as a router has it that asked only once.
        fetch_id = consumer.start_fetch(
            "t",
            [7, 8],
            remote=PeerAddr(at.host, at.port, (0, i)),
            engine_id="engine-p-before",
            park_s=10.0,
        )
        assert consumer.finish(fetch_id).code == Code.OK
        assert consumer.wrong(5 + i, {7: 1, 8: 2}) == 0


def test_a_rank_that_is_not_there_is_a_typed_failure_of_that_rank(site: Site) -> None:
    first = site.daemon("p0", bootstrap="127.0.0.1:0", bootstrap_peers="127.0.0.1:1").ready()
    d = site.daemon("d").ready()
    producer = rank_of(site, first, "engine-p", 0, 5)
    consumers = [rank_of(site, d, "engine-d", i) for i in range(2)]
    producer.offer("t", [1])
    codes = []
    for i, consumer in enumerate(consumers):
        remote = PeerAddr(bootstrap_of(first).host, bootstrap_of(first).port, (0, i))
        fetch_id = consumer.start_fetch("t", [7], remote=remote, engine_id="engine-p", park_s=10.0)
        codes.append(consumer.finish(fetch_id).code)
    assert codes == [Code.OK, Code.PEER_UNREACHABLE]
    assert first.lines("bootstrap_peer_failed")


def test_daemons_that_name_each_other_do_not_ask_in_circles(site: Site) -> None:
    first = site.daemon("p0", bootstrap="127.0.0.1:0").ready()
    at = first.found["bootstrap"]
    second = site.daemon("p1", bootstrap="127.0.0.1:0", bootstrap_peers=f"{at},{at}").ready()
    assert query(bootstrap_of(second)) == {}
    rank_of(site, first, "engine-p", 0, 5)
    assert list(query(bootstrap_of(second))["0"]["worker_addr"]) == ["0"]  # type: ignore[call-overload]
