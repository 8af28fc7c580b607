"""Bytes move between two engines through two daemons, each a process of its own."""

from __future__ import annotations

import pytest

from kvd.protocol.codes import Code
from tests.integration.daemon.conftest import Site

TRANSPORTS = ["shm", "tcp"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_daemons_two_processes(site: Site, transport: str) -> None:
    p, d = site.daemon("p", transport=transport), site.daemon("d", transport=transport)
    p.ready(), d.ready()
    producer = site.process(p, "engine-p", seed=3)
    consumer = site.process(d, "engine-d")
    at = producer.up()
    consumer.up()
    producer.ask("offer", transfer_id="t", blocks=[5, 9, 2, 40])
    done = consumer.ask(
        "fetch",
        transfer_id="t",
        blocks=[7, 8, 60, 0],
        host=at["host"],
        port=at["port"],
        engine_id="engine-p",
    )
    assert done["code"] == Code.OK, done
    assert done["transport"] == transport
    assert done["tokens"] == 64
    assert done["nbytes"] == 4 * 4 * 4096
    assert consumer.ask("wrong", seed=3, pairs={7: 5, 8: 9, 60: 2, 0: 40}) == {"wrong": 0}
    assert d.metric("kvd_fetched_bytes_total", transport=transport) == 4 * 4 * 4096
