"""`verify = crc` in whole daemons: damage fails the fetch with its blocks, and is counted."""

from __future__ import annotations

import pytest

from kvd.protocol.codes import Code
from tests.integration.daemon.conftest import TRANSPORTS, Site
from tests.integration.daemon.engine import Engine

DAMAGED = "tests.integration.daemon.damaged"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_daemon_that_checks_tells_damage_from_bytes(site: Site, transport: str) -> None:
    whole = site.daemon("whole", transport=transport, verify="crc")
    bad = site.daemon("bad", transport=transport, verify="crc", module=DAMAGED)
    trusting = site.daemon("trusting", transport=transport, module=DAMAGED)

    def engine(name: str, seed: int = 0) -> Engine:
        daemon = {"whole": whole, "bad": bad, "trusting": trusting}[name.split("-")[0]]
        made = site.engine(daemon, name, seed=seed)
        made.up()
        return made

    # Over shm the daemon that copies does the damage, over tcp the one that sends.
    source = "whole" if transport == "shm" else "bad"
    producer = engine(f"{source}-p", seed=7)
    at = producer.up()
    producer.offer("t", [3, 4, 5, 6])
    how = {"remote": at, "engine_id": producer.engine_id}

    checks = bad if transport == "shm" else whole
    consumer = engine("bad-d" if transport == "shm" else "whole-d")
    done = consumer.fetch("t", [10, 11, 12, 13], **how)
    assert (done.code, done.transport) == (Code.INTEGRITY, transport), done
    assert done.bad == [b"\x0f"], "the blocks that did not count are named"
    assert "checksum" in done.detail
    labels = {"code": "integrity", "transport": transport}
    assert checks.metric("kvd_fetches_total", **labels) == 1
    assert checks.metric("kvd_fetched_bytes_total") == 0

    # Without it, the same damage is taken for KV: it was there, and nothing else sees it.
    trusts = engine("trusting-d")
    assert trusts.fetch("t", [10, 11, 12, 13], **how).code == Code.OK
    assert trusts.wrong(7, {10: 3, 11: 4, 12: 5, 13: 6}) > 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_whole_passes(site: Site, transport: str) -> None:
    p = site.daemon("p", transport=transport)
    d = site.daemon("d", transport=transport, verify="crc")
    producer, consumer = site.engine(p, "p", seed=3), site.engine(d, "d")
    at = producer.up()
    consumer.up()
    producer.offer("t", [9, 1, 33])
    done = consumer.fetch("t", [2, 5, 4], remote=at, engine_id="p")
    assert (done.code, done.transport) == (Code.OK, transport), done
    assert consumer.wrong(3, {2: 9, 5: 1, 4: 33}) == 0
