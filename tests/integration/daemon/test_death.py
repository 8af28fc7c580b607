"""Case 9: an engine or a daemon dies, or stops, at any moment."""

from __future__ import annotations

import os
import signal
import time

import pytest

from connector_shim.events import Down, Up
from kvd.protocol import local
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr
from tests.conftest import wait_for
from tests.integration.daemon.conftest import TRANSPORTS, Site
from tests.integration.daemon.engine import Engine
from tests.integration.daemon.harness import Daemon

CYCLES = 100


def test_a_killed_engine_gives_its_memory_back_within_a_second(site: Site) -> None:
    p = site.daemon("p").ready()
    base = p.mapped()
    engine = site.process(p, "e", seed=1)
    engine.up()
    assert p.mapped() > base
    killed = time.monotonic()
    engine.kill(signal.SIGKILL)
    wait_for(lambda: p.mapped() == base, 10.0, what="unmapped", every=0.005)
    took = time.monotonic() - killed
    assert took < 1.0
    (line,) = wait_for(lambda: p.lines("memory_unmapped"), what="logged")
    assert line["nbytes"] == 4 * 64 * 4096


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_producer_is_unmapped_by_its_peer_too(site: Site, transport: str) -> None:
    p, d = site.daemon("p", transport=transport), site.daemon("d", transport=transport)
    consumer = site.engine(d, "consumer")
    consumer.up()
    base = d.mapped()
    producer = site.process(p, "producer", seed=1)
    at = producer.up()
    producer.ask("offer", transfer_id="t", blocks=[1, 2])
    remote = PeerAddr(at["host"], at["port"])
    assert consumer.fetch("t", [1, 2], remote=remote, engine_id="producer").code == Code.OK
    if transport == "shm":
        assert d.mapped() > base
    producer.kill(signal.SIGKILL)
    killed = time.monotonic()
    wait_for(lambda: p.mapped() == 0, 10.0, what="its daemon unmaps it", every=0.005)
    wait_for(lambda: d.mapped() == base, 10.0, what="the peer unmaps it", every=0.005)
    assert time.monotonic() - killed < 1.0
    done = consumer.fetch("t", [3, 4], remote=remote, engine_id="producer")
    assert done.code in (Code.UNKNOWN_ENGINE, Code.ENGINE_GONE), done
    assert consumer.wrong(1, {1: 1, 2: 2}) == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_engines_that_come_and_die_leave_nothing_in_either_daemon(
    site: Site, transport: str
) -> None:
    p, d = site.daemon("p", transport=transport), site.daemon("d", transport=transport)
    consumer = site.engine(d, "consumer")
    consumer.up()

    def cycle(number: int) -> None:
        producer = Engine(p.socket, f"producer-{number}", seed=1 + number)
        try:
            remote = producer.up()
            producer.offer("t", [number % 64])
            done = consumer.fetch("t", [number % 64], remote=remote, engine_id=producer.engine_id)
            assert done.code == Code.OK, done
            # As the kernel does it at SIGKILL: the descriptor closes, nothing is said.
            producer.client._session.drop()
        finally:
            producer.close()

    def fds() -> tuple[int, int]:
        return p.fds(), d.fds()

    def quiet() -> bool:
        consumer.poll()
        return p.mapped() == 0 and d.mapped() == one

    one = d.mapped()
    cycle(0)
    wait_for(quiet, what="unmapped")
    before = fds()
    for number in range(1, CYCLES + 1):
        cycle(number)
    wait_for(quiet, what="unmapped")
    wait_for(lambda: fds() == before, what=f"descriptors are as before: {before}")
    assert consumer.wrong(0, {}) > 0  # it did receive


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_producer_daemon_fails_the_fetch_and_is_found_again(
    site: Site, transport: str
) -> None:
    p, d = site.daemon("p", transport=transport), site.daemon("d", transport=transport)
    producer = site.engine(p, "producer", seed=5)
    consumer = site.engine(d, "consumer")
    remote = producer.up()
    consumer.up()
    first_boot = producer.client.welcome
    fetch = consumer.start_fetch(
        "late", [1], remote=remote, engine_id="producer", park_s=30.0, deadline_s=60.0
    )
    wait_for(lambda: consumer.poll() or p.metric("kvd_parked") == 1, what="it waits at p")
    killed = time.monotonic()
    p.kill(signal.SIGKILL)
    assert p.wait() == -signal.SIGKILL
    done = consumer.finish(fetch)
    assert done.code in (Code.PEER_LOST, Code.PEER_UNREACHABLE), done
    # The broken connection says so; nobody waits for heartbeats to stop.
    assert time.monotonic() - killed < 5.0
    producer.wait(lambda: producer.seen(Down), "the engine sees its daemon go")
    assert consumer.state() == "up"

    again = site.daemon("p", transport=transport, listen=str(remote)).ready()
    assert again.address == remote
    producer.wait(lambda: len(producer.seen(Up)) == 2, "the engine registers with the new one")
    assert producer.client.welcome is not None
    assert first_boot is not None
    assert producer.client.welcome.boot_id != first_boot.boot_id
    producer.offer("t", [7])

    def moved() -> bool:
        # The consumer's daemon may still be waiting to try again.
        done = consumer.fetch("t", [9], remote=remote, engine_id="producer", park_s=0.0)
        return done.code == Code.OK

    wait_for(moved, 20.0, what="bytes move through the new daemon")
    assert consumer.wrong(5, {9: 7}) == 0


def test_a_killed_consumer_daemon_ends_its_fetches_and_is_replaced(site: Site) -> None:
    p, d = site.daemon("p"), site.daemon("d")
    producer = site.engine(p, "producer", seed=5)
    consumer = site.process(d, "consumer")
    at = producer.up()
    consumer.up()
    how = {"host": at.host, "port": at.port, "engine_id": "producer"}
    consumer.ask("start", transfer_id="late", blocks=[1], park_s=30.0, deadline_s=60.0, **how)
    wait_for(lambda: p.metric("kvd_parked") == 1, what="it waits at p")
    d.kill(signal.SIGKILL)
    d.wait()
    # Its link is gone, so the producer's daemon knows at once.
    wait_for(lambda: p.metric("kvd_parked") == 0, what="p forgets its fetch")
    state = wait_for(lambda: (s := consumer.ask("state"))["downs"] and s, what="the engine sees it")
    assert state["statistics"]["fetches"] == 0
    site.daemon("d").ready()
    wait_for(lambda: consumer.ask("state")["state"] == "up", what="registered with the new one")
    producer.offer("t", [3])
    done = consumer.ask("fetch", transfer_id="t", blocks=[2], **how)
    assert done["code"] == Code.OK, done
    assert consumer.ask("wrong", seed=5, pairs={2: 3}) == {"wrong": 0}
    assert consumer.popen.poll() is None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stopped_producer_daemon_is_lost_within_the_bound(site: Site, transport: str) -> None:
    bound = {"heartbeat_s": 0.2, "peer_timeout_s": 1.0, "transport": transport}
    p, d = site.daemon("p", **bound), site.daemon("d", **bound)
    producer, consumer = site.engine(p, "producer", seed=5), site.engine(d, "consumer")
    remote = producer.up()
    consumer.up()
    how = {"remote": remote, "engine_id": "producer"}
    producer.offer("before", [1])
    assert consumer.fetch("before", [1], **how).code == Code.OK
    p.kill(signal.SIGSTOP)
    stopped = time.monotonic()
    done = consumer.fetch("never", [2], park_s=30.0, deadline_s=60.0, **how)
    took = time.monotonic() - stopped
    assert done.code in (Code.PEER_LOST, Code.PEER_UNREACHABLE), done
    # peer_timeout_s and one heartbeat, and room for a busy machine; far below the deadline.
    assert took < 10.0
    p.kill(signal.SIGCONT)
    producer.offer("after", [3])

    def moved() -> bool:
        producer.poll()
        return consumer.fetch("after", [4], park_s=0.0, **how).code == Code.OK

    wait_for(moved, 20.0, what="bytes move again")
    assert consumer.wrong(5, {1: 1, 4: 3}) == 0


def test_a_stopped_consumer_daemon_does_not_hold_the_producer(site: Site) -> None:
    bound = {"heartbeat_s": 0.2, "peer_timeout_s": 1.0}
    # An offer that is still growing is bounded by lease_max_s: its own lease begins at its end.
    p, d = site.daemon("p", lease_max_s=2.0, **bound), site.daemon("d", **bound)
    producer, consumer = site.engine(p, "producer", seed=5), site.engine(d, "consumer")
    remote = producer.up()
    consumer.up()
    producer.offer("t", [1], sealed=False, tokens=16, lease_s=2.0)
    consumer.start_fetch("t", [1], remote=remote, engine_id="producer", deadline_s=60.0)
    wait_for(
        lambda: consumer.poll() or p.metric("kvd_clients") == 1, what="the consumer's daemon joins"
    )
    d.kill(signal.SIGSTOP)
    try:
        # The client is taken for dead, and then the lease runs as if nobody had asked.
        producer.wait(lambda: producer.seen(local.OfferEnded), "the offer ends")
        assert producer.offers() == 0
    finally:
        d.kill(signal.SIGCONT)


def test_a_daemon_survives_the_engine_that_started_it_only_if_told(site: Site) -> None:
    """KVD_DIE_WITH_PARENT: the harness sets it; a stranger's pid means the parent is dead."""
    d = site.daemon("d", env={})
    d.ready()
    assert d.popen.poll() is None
    # A pid that is not its parent's: it must not serve at all.
    stranger = str(os.getpid() + 1)

    class Orphan(Daemon):
        parent = stranger

    orphan = Orphan("orphan", site.folder)
    site._ends.append(orphan.stop)
    assert orphan.wait() == 0
    assert not orphan.discovery.exists()
