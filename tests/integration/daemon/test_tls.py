"""Daemons whose data connections are inside TLS."""

from __future__ import annotations

from pathlib import Path

from kvd.protocol.codes import Code
from tests.contract.certificates import Certificate, authority, issue
from tests.integration.daemon.conftest import Site


def settings(one: Certificate) -> dict[str, str]:
    return {"transport": "tcp", "tls_cert": one.cert, "tls_key": one.key, "tls_ca": one.ca}


def test_daemons_of_one_authority_move_bytes_and_a_plain_one_gets_none(
    site: Site, tmp_path: Path
) -> None:
    ours = authority(tmp_path, "ours")
    p = site.daemon("p", **settings(issue(tmp_path, ours, "p")))
    d = site.daemon("d", **settings(issue(tmp_path, ours, "d")))
    plain = site.daemon("plain", transport="tcp")
    producer = site.engine(p.ready(), "producer", seed=3)
    consumer, other = site.engine(d.ready(), "consumer"), site.engine(plain.ready(), "other")
    at = producer.up()
    consumer.up()
    other.up()
    producer.offer("t", [1, 2])
    refused = other.fetch("t", [3, 4], remote=at, engine_id="producer", park_s=5.0)
    assert refused.code != Code.OK
    assert "TLS" in refused.detail
    assert other.wrong(3, {}) == 0
    done = consumer.fetch("t", [3, 4], remote=at, engine_id="producer", park_s=5.0)
    assert (done.code, done.transport) == (Code.OK, "tcp"), done
    assert consumer.wrong(3, {3: 1, 4: 2}) == 0


def test_a_part_of_the_settings_is_refused_at_the_start(site: Site, tmp_path: Path) -> None:
    one = issue(tmp_path, authority(tmp_path, "ours"), "p")
    p = site.daemon("p", tls_cert=one.cert, tls_key=one.key)
    assert p.wait() == 78
    assert "tls_ca" in p.tail()
    broken = site.daemon("broken", **{**settings(one), "tls_ca": "/nowhere"})
    assert broken.wait() == 78
    assert "tls_ca: cannot read /nowhere" in broken.tail()
