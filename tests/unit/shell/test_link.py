"""The link between daemons on one host: proofs, memory, and its end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvd.core import events
from kvd.errors import KvdError
from kvd.local.listener import bind
from kvd.local.seqpacket import connect
from kvd.peers import link as link_module
from kvd.peers.link import LinkClient, LinkHello, link_proof
from kvd.peers.link_server import LinkServer
from kvd.protocol.codes import Code
from tests.unit.shell.ends import Bench, Consumer, Producer, identity
from tests.unit.shell.fakes import memfd


async def linked(bench: Bench) -> tuple[Producer, Consumer, LinkClient]:
    producer = bench.producer()
    consumer = bench.consumer(producer.address)
    await consumer.hears(events.PeerUp)
    assert consumer.client.link is not None
    return producer, consumer, consumer.client.link


def inode(fd: int) -> int:
    return os.fstat(fd).st_ino


@asynccontextmanager
async def passing(link: LinkClient, key: int) -> AsyncIterator[list[int]]:
    fds = await link.memory(key, 5.0)
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize("count", [1, 2, 200, 201, 450])
async def test_memory_comes_over_the_link_in_order(bench: Bench, count: int) -> None:
    producer, _, link = await linked(bench)
    files = [memfd(1) for _ in range(count)]
    producer.memory[7] = files
    before = len(os.listdir("/proc/self/fd"))
    async with passing(link, 7) as fds:
        assert [inode(fd) for fd in fds] == [inode(fd) for fd in files]
        assert not any(os.get_inheritable(fd) for fd in fds)
    assert len(os.listdir("/proc/self/fd")) == before
    for fd in files:
        os.close(fd)


async def test_unknown_memory_is_answered_with_a_code(bench: Bench) -> None:
    _, _, link = await linked(bench)
    with pytest.raises(KvdError) as error:
        await link.memory(99, 5.0)
    assert error.value.code == Code.ENGINE_GONE


async def test_what_waits_on_a_link_fails_when_it_breaks(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, _, link = await linked(bench)
    assert producer.links is not None
    (one,) = producer.links._links
    monkeypatch.setattr(type(one), "_send_memory", lambda _self, _want: one.close())
    with pytest.raises(KvdError) as error:
        await link.memory(1, 30.0)
    assert error.value.code == Code.PEER_LOST


async def test_an_unanswered_request_ends_at_its_deadline(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, _, link = await linked(bench)
    assert producer.links is not None
    (one,) = producer.links._links
    monkeypatch.setattr(type(one), "_send_memory", lambda _self, _want: None)
    with pytest.raises(KvdError) as error:
        await link.memory(1, 0.1)
    assert error.value.code == Code.DEADLINE


async def test_a_stranger_on_the_link_is_turned_away(bench: Bench) -> None:
    producer, _, _ = await linked(bench)
    assert producer.links is not None
    for nonce in (b"", b"n" * 16):
        sock = connect(producer.links.path)
        sock.send(link_module.encode(LinkHello("consumer", 9, link_proof(nonce))))
        sock.setblocking(True)
        sock.settimeout(5)
        assert await asyncio.to_thread(sock.recv, 100) == b""
        sock.close()
    assert producer.drops.counts["link", "unproven"] == 2
    assert len(producer.links) == 1


async def test_memory_is_not_given_before_the_hello(bench: Bench) -> None:
    producer, _, _ = await linked(bench)
    assert producer.links is not None
    producer.memory[1] = [0]
    sock = connect(producer.links.path)
    sock.send(link_module.encode(link_module.LinkWant(1, 1)))
    sock.setblocking(True)
    sock.settimeout(5)
    assert await asyncio.to_thread(sock.recv, 100) == b""
    sock.close()
    assert producer.drops.counts["link", "bad_message"] == 1


async def test_a_path_that_another_daemon_answers_at_is_no_proof(bench: Bench) -> None:
    """Stale or copied paths: whoever listens there does not know the nonce."""
    impostor = bench.producer(identity=identity("impostor"))
    await impostor.close()
    impostor = bench.producer(identity=identity("impostor"))
    assert impostor.links is not None

    class Yes(LinkServer):
        def admit(self, hello: LinkHello) -> tuple[int, bytes] | None:
            return 1, b"something else!!"

    yes = Yes(
        bind(str(bench.folder / "yes")),
        clients=impostor.server,
        share=lambda _key: [],
        drops=impostor.drops,
        max_links=4,
    )
    yes.start()
    link = LinkClient(lambda _detail: None)
    with pytest.raises(KvdError, match="another daemon"):
        await link.open(yes.path, daemon_id="c", boot_id=1, nonce=b"n" * 16, timeout_s=5.0)
    yes.close()


def test_the_proof_does_not_give_the_nonce_away() -> None:
    assert link_proof(b"n" * 16) != b"n" * 16
    assert link_proof(b"n" * 16) == link_proof(b"n" * 16)
    assert link_proof(b"n" * 16) != link_proof(b"m" * 16)


def test_a_proof_that_is_no_memfd_is_refused(tmp_run_dir: Path) -> None:
    path = tmp_run_dir / "file"
    path.write_bytes(b"n" * 16)
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(KvdError, match="no memfd"):
            link_module.read_nonce(fd)
    finally:
        os.close(fd)
