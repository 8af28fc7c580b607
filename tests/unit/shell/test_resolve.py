"""Addresses, and the envelope."""

from __future__ import annotations

import asyncio

import pytest

from kvd.addresses import parse_network
from kvd.peers.resolve import AddressRefused, candidates, in_networks
from kvd.peers.wire import decode_to_producer, encode_to_producer
from kvd.protocol import peer
from kvd.protocol.codes import Code
from tests.unit.shell.ends import LOOPBACK


async def test_names_are_checked_by_what_they_resolve_to() -> None:
    assert "127.0.0.1" in await candidates("localhost", 1, LOOPBACK, 5.0)
    with pytest.raises(AddressRefused) as error:
        await candidates("localhost", 1, (parse_network("10.0.0.0/8"),), 5.0)
    assert error.value.code == Code.PEER_NOT_ALLOWED
    with pytest.raises(AddressRefused) as error:
        await candidates("no-such-host.invalid", 1, LOOPBACK, 5.0)
    assert error.value.code == Code.PEER_UNREACHABLE


async def test_resolving_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()

    async def forever(*_args: object, **_kwargs: object) -> None:
        await asyncio.Event().wait()

    class Slow:
        getaddrinfo = staticmethod(forever)

    monkeypatch.setattr("kvd.peers.resolve.asyncio.get_running_loop", lambda: Slow)
    with pytest.raises(AddressRefused, match=r"0\.05"):
        await candidates("somewhere", 1, LOOPBACK, 0.05)
    assert loop.is_running()


@pytest.mark.parametrize(
    ("host", "inside"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.5", True),
        ("10.1.2.3", False),
        ("::2", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_networks(host: str, inside: bool) -> None:
    assert in_networks(host, LOOPBACK) is inside


async def test_wire_keeps_what_it_is_given() -> None:
    hello = peer.PeerHello("d", "1", "h")
    assert decode_to_producer(encode_to_producer(77, hello)) == (77, hello)
