"""The client against a scripted daemon: what is sent, what is told, and what is refused."""

from __future__ import annotations

import array
import mmap
import os
import struct
from collections.abc import Callable

import pytest

from connector_shim.client import Client
from connector_shim.errors import ClientError
from connector_shim.events import Down, Up
from connector_shim.memory import shared_blocks
from kvd.protocol import local
from kvd.protocol.codes import Code
from kvd.protocol.types import NULL_BLOCK
from tests.unit.client.fake import (
    DIGEST,
    NUM_BLOCKS,
    REMOTE,
    FakeDaemon,
    describe,
    fetch,
    fetch_done,
    of_type,
    offer,
    outstanding,
    state,
    welcome,
)


def words(blocks: bytes) -> list[int]:
    return array.array("I", blocks).tolist()


def test_registration_describes_the_memory_with_its_descriptors(
    client: Client, daemon: FakeDaemon
) -> None:
    client.poll()
    daemon.accept()
    (hello,) = daemon.read()
    assert isinstance(hello, local.Hello)
    assert (hello.engine_id, hello.epoch, hello.role) == ("engine", client.epoch, "both")
    daemon.say_raw(welcome())
    assert client.poll() == []
    assert state(client) == "registering"
    segment, fence, layers, register = daemon.read()
    assert isinstance(segment, local.AddSegment)
    assert isinstance(fence, local.AddFence)
    assert isinstance(layers, local.AddLayers)
    assert isinstance(register, local.Register)
    assert segment.nbytes == os.fstat(daemon.fds[0]).st_size == 2 * NUM_BLOCKS * 64
    assert fence.slots * 8 == os.fstat(daemon.fds[1]).st_size
    assert [layer.name for layer in layers.layers] == ["layer.0", "layer.1"]
    assert register.num_blocks == NUM_BLOCKS
    daemon.say(local.Registered(segment.nbytes))
    (up,) = client.poll()
    assert isinstance(up, Up)
    assert not up.restarted
    assert state(client) == "up"
    assert client.welcome == up.welcome
    assert client.daemon_pid == os.getpid()


def test_memory_may_be_described_after_connecting_and_only_once(
    path: os.PathLike[str], daemon: FakeDaemon
) -> None:
    with Client(str(path), engine_id="engine") as client:
        client.poll()
        daemon.accept()
        daemon.say_raw(welcome())
        client.poll()
        with pytest.raises(ClientError, match="no memory") as caught:
            client.release("t", remote=REMOTE, engine_id="p")
        assert caught.value.code is Code.NOT_REGISTERED
        describe(client)
        client.poll()
        assert isinstance(daemon.read()[-1], local.Register)
        with pytest.raises(ClientError) as caught:
            describe(client)
        assert caught.value.code is Code.DUPLICATE


def test_an_offer_arms_its_word_and_arrives_whole(up: Client, daemon: FakeDaemon) -> None:
    up.offer("t", 7, blocks=[[3, NULL_BLOCK, 5]], digests={16: b"a" * 16, 8: b"b" * 16}, lease_s=9)
    opened, blocks, digests = daemon.read()
    assert isinstance(opened, local.Offer)
    assert isinstance(blocks, local.OfferBlocks)
    assert isinstance(digests, local.OfferDigests)
    assert (opened.transfer_id, opened.generation, opened.lease_s) == ("t", 7, 9.0)
    assert words(blocks.blocks) == [3, NULL_BLOCK, 5]
    assert words(digests.positions) == [8, 16]
    assert digests.digests == b"b" * 16 + b"a" * 16
    with mmap.mmap(daemon.fds[1], 0, prot=mmap.PROT_READ) as table:
        assert struct.unpack_from("<Q", table, 8 * opened.slot) == (opened.word,)
    assert up.extend("t", 7, tokens=20, first_layer=1, num_layers=1)
    assert up.extend_blocks("t", 7, group=0, first=3, blocks=[6])
    assert up.extend_digests("t", 7, {48: DIGEST})
    assert up.seal("t", 7, tokens=50)
    assert daemon.read() == [
        local.Extend("t", 7, 20, 1, 1),
        local.OfferBlocks("t", 7, 0, 3, struct.pack("<I", 6)),
        local.OfferDigests("t", 7, struct.pack("<I", 48), DIGEST),
        local.Seal("t", 7, 50),
    ]
    assert up.offers == (("t", 7),)


def test_long_lists_are_split_into_frames(path: os.PathLike[str], daemon: FakeDaemon) -> None:
    count = 20_000
    memory, mapping = shared_blocks(1, count, 1)
    with Client(str(path), engine_id="engine") as client:
        client.describe(memory)
        memory.close()
        mapping.close()
        daemon.take_in(client)
        ids = list(range(count))
        digests = {position: position.to_bytes(16, "little") for position in range(5_000)}
        client.offer("t", 1, blocks=[ids], digests=digests, tokens=1, lease_s=5)
        messages = daemon.read()
        while not isinstance(messages[-1], local.Seal):
            client.poll()
            messages += daemon.read()
        got: list[int] = []
        for part in of_type(messages, local.OfferBlocks):
            assert part.first == len(got)
            got += words(part.blocks)
        assert got == ids
        told: dict[int, bytes] = {}
        for piece in of_type(messages, local.OfferDigests):
            for index, position in enumerate(words(piece.positions)):
                told[position] = piece.digests[16 * index : 16 * index + 16]
        assert told == digests
        fetch(client, blocks=tuple(ids))  # more than one frame holds
        messages = daemon.read()
        while not isinstance(messages[-1], local.FetchGo):
            client.poll()
            messages += daemon.read()
        parts = of_type(messages, local.FetchBlocks)
        assert b"".join(part.blocks for part in parts) == array.array("I", ids).tobytes()
        assert [part.first for part in parts] == [0, 8192, 16384]


@pytest.mark.parametrize("sole", [False, True])
def test_a_fetch_is_told_when_the_daemon_says_so(
    up: Client, daemon: FakeDaemon, sole: bool
) -> None:
    fetch_id = fetch(up, blocks=(4, 9), sole=sole)
    (asked,) = daemon.read()
    assert isinstance(asked, local.Fetch)
    assert (asked.fetch_id, asked.remote, asked.engine_id) == (fetch_id, REMOTE, "producer")
    assert (asked.start, asked.end, asked.generation, asked.sole) == (0, 32, None, sole)
    assert asked.blocks is not None
    assert [words(blocks) for blocks in asked.blocks] == [[4, 9]]
    assert up.poll() == []
    assert outstanding(up) == ({fetch_id}, set())
    done = fetch_done(fetch_id, nbytes=256)
    daemon.say(done)
    assert up.poll() == [done]
    assert outstanding(up) == (set(), set())


def test_an_older_daemon_gets_a_fetch_in_parts(path: os.PathLike[str], daemon: FakeDaemon) -> None:
    """A field that it does not know would be dropped, and the fetch would never start."""
    with Client(str(path), engine_id="engine") as client:
        describe(client)
        client.poll()
        daemon.accept()
        daemon.say_raw(welcome(minor=2))
        client.poll()
        daemon.say(local.Registered(1))
        client.poll()
        daemon.read()
        fetch_id = fetch(client, blocks=(4, 9))
        asked, blocks, go = daemon.read()
        assert isinstance(asked, local.Fetch)
        assert (asked.fetch_id, asked.blocks) == (fetch_id, None)
        assert isinstance(blocks, local.FetchBlocks)
        assert words(blocks.blocks) == [4, 9]
        assert go == local.FetchGo(fetch_id)


def test_late_double_and_unknown_completions_are_told_once(up: Client, daemon: FakeDaemon) -> None:
    """Case 6: done twice, done after a cancel, failed after done, both kinds in one poll."""
    first, second = fetch(up), fetch(up)
    offer(up, "held")
    assert up.cancel(second)
    assert not up.cancel(second)
    assert of_type(daemon.read(), local.Cancel) == [local.Cancel(second)]
    daemon.say(
        fetch_done(first),
        fetch_done(first),
        fetch_done(first, "transport_error", [b"\3"]),
        fetch_done(second),
        fetch_done(second, "cancelled", [b"\3"]),
        fetch_done("never asked"),
        local.OfferEnded("held", 1, "released"),
        local.OfferEnded("held", 1, "expired"),
        local.OfferEnded("never made", 1, "expired"),
        local.NotifyDone("never sent", "release", "ok"),
    )
    assert up.poll() == [
        fetch_done(first),
        fetch_done(second),
        local.OfferEnded("held", 1, "released"),
    ]
    assert up.poll() == []
    assert state(up) == "up"
    counts = up.statistics()
    assert [
        counts[name]
        for name in ("fetch_late", "fetch_unknown", "offer_late", "offer_unknown", "notify_unknown")
    ] == [3, 1, 1, 1, 1]
    assert not up.cancel(first)


def test_a_word_is_dead_in_the_daemons_mapping_before_the_end_is_told(
    up: Client, daemon: FakeDaemon
) -> None:
    offer(up)
    (opened,) = of_type(daemon.read(), local.Offer)
    with mmap.mmap(daemon.fds[1], 0, prot=mmap.PROT_READ) as table:
        assert struct.unpack_from("<Q", table, 8 * opened.slot) == (opened.word,)
        daemon.say(local.OfferEnded("t", 1, "expired"))
        (ended,) = up.poll()
        assert isinstance(ended, local.OfferEnded)
        assert struct.unpack_from("<Q", table, 8 * opened.slot) == (0,)


def test_a_revoked_offer_is_dead_at_once_and_told_once(up: Client, daemon: FakeDaemon) -> None:
    assert up.fence is not None
    offer(up)
    (opened,) = of_type(daemon.read(), local.Offer)
    assert up.revoke("t", 1)
    assert up.fence.word(opened.slot) == 0
    assert not up.revoke("t", 1)
    assert not up.seal("t", 1, tokens=1)
    assert not up.extend("t", 1, tokens=1)
    assert daemon.read() == [local.Revoke("t", 1)]
    daemon.say(local.OfferEnded("t", 1, "revoked"))
    assert up.poll() == [local.OfferEnded("t", 1, "revoked")]
    assert up.poll() == []


def test_revoke_all(up: Client, daemon: FakeDaemon) -> None:
    offer(up, "a")
    offer(up, "b")
    daemon.read()
    assert up.revoke_all() == 2
    assert up.fence is not None
    assert len(up.fence) == 0
    assert daemon.read() == [local.RevokeAll()]
    assert [event.transfer_id for event in of_type(up.poll(), local.OfferEnded)] == ["a", "b"]
    assert up.revoke_all() == 0
    assert daemon.read() == []


def test_release_and_renew_are_answered_once(up: Client, daemon: FakeDaemon) -> None:
    up.release("t", remote=REMOTE, engine_id="p", generation=3)
    up.renew("t", remote=REMOTE, engine_id="p")
    assert daemon.read() == [
        local.Release("t", 3, REMOTE, "p"),
        local.Renew("t", None, REMOTE, "p"),
    ]
    answers = [local.NotifyDone("t", "renew", "unknown_transfer")]
    daemon.say(*answers, *answers)
    assert up.poll() == answers
    daemon.hang_up()
    assert of_type(up.poll(), local.NotifyDone) == [local.NotifyDone("t", "release", "daemon_gone")]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"transfer_id": "x" * 600}, Code.BAD_MESSAGE),
        ({"transfer_id": ""}, Code.BAD_MESSAGE),
        ({"transfer_id": "\ud800"}, Code.BAD_MESSAGE),
        ({"generation": -1}, Code.BAD_MESSAGE),
        ({"generation": 2**63}, Code.BAD_MESSAGE),
        ({"lease_s": -1.0}, Code.BAD_MESSAGE),
        ({"lease_s": float("nan")}, Code.BAD_MESSAGE),
        ({"lease_s": 1e9}, Code.BAD_MESSAGE),
        ({"tokens": -5}, Code.BAD_MESSAGE),
        ({"digests": {3: b"short"}}, Code.BAD_MESSAGE),
        ({"digests": {-3: DIGEST}}, Code.BAD_MESSAGE),
        ({"blocks": [[NUM_BLOCKS]]}, Code.BAD_MEMORY),
        ({"blocks": [[-1]]}, Code.BAD_MEMORY),
        ({"blocks": [[2**32]]}, Code.BAD_MEMORY),
        ({"blocks": [["1"]]}, Code.BAD_MEMORY),
        ({"blocks": [[1], [1]]}, Code.BAD_MEMORY),
    ],
)
def test_a_bad_offer_fails_alone(
    up: Client, daemon: FakeDaemon, change: dict[str, object], code: Code
) -> None:
    good: dict[str, object] = {
        "transfer_id": "t",
        "generation": 1,
        "blocks": [[1]],
        "digests": {16: DIGEST},
        "tokens": 16,
        "lease_s": 5.0,
    }
    with pytest.raises(ClientError) as caught:
        up.offer(**(good | change))  # type: ignore[arg-type]
    assert caught.value.code is code
    assert daemon.read() == []
    assert up.offers == ()
    assert up.fence is not None
    assert len(up.fence) == 0
    up.offer(**good)  # type: ignore[arg-type]
    assert len(daemon.read()) == 4


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"transfer_id": "x" * 600}, Code.BAD_MESSAGE),
        ({"engine_id": ""}, Code.BAD_MESSAGE),
        ({"start": -1}, Code.BAD_MESSAGE),
        ({"digest": b"short"}, Code.BAD_MESSAGE),
        ({"deadline_s": float("inf")}, Code.BAD_MESSAGE),
        ({"generation": -1}, Code.BAD_MESSAGE),
        ({"blocks": [[NUM_BLOCKS]]}, Code.BAD_MEMORY),
    ],
)
def test_a_bad_fetch_fails_alone(
    up: Client, daemon: FakeDaemon, change: dict[str, object], code: Code
) -> None:
    good: dict[str, object] = {
        "transfer_id": "t",
        "remote": REMOTE,
        "engine_id": "p",
        "start": 0,
        "end": 16,
        "blocks": [[1]],
        "digest": DIGEST,
        "deadline_s": 5.0,
        "park_s": 1.0,
        "fetch_id": "f",
    }
    with pytest.raises(ClientError) as caught:
        up.fetch(**(good | change))  # type: ignore[arg-type]
    assert caught.value.code is code
    assert daemon.read() == []
    assert up.fetches == ()
    assert up.fetch(**good) == "f"  # type: ignore[arg-type]
    with pytest.raises(ClientError) as caught:
        up.fetch(**good)  # type: ignore[arg-type]
    assert caught.value.code is Code.DUPLICATE


def test_a_daemon_that_does_not_read_costs_neither_memory_nor_time(
    make_client: Callable[..., Client], daemon: FakeDaemon
) -> None:
    client = make_client(max_queue_frames=40)
    daemon.take_in(client)

    def offer_without_end() -> None:
        for index in range(100_000):
            offer(client, f"t{index}")

    with pytest.raises(ClientError, match="wait for the daemon") as caught:
        offer_without_end()
    made = len(client.offers)
    assert made > 10
    assert caught.value.code is Code.OVERLOADED
    assert client.statistics()["queued"] <= 40
    assert client.fence is not None
    assert len(client.fence) == made
    # What must not be refused is not.
    assert client.revoke("t0", 1)
    assert client.poll() == [local.OfferEnded("t0", 1, "revoked")]
    messages = daemon.read()
    while client.statistics()["queued"]:
        client.poll()
        messages += daemon.read()
    messages += daemon.read()
    assert [message.transfer_id for message in of_type(messages, local.Offer)] == [
        f"t{index}" for index in range(made)
    ]
    assert len(of_type(messages, local.Seal)) == made
    assert messages[-1] == local.Revoke("t0", 1)
    offer(client, "again")


def test_wrong_arguments_are_told_at_once(tmp_path: os.PathLike[str]) -> None:
    with pytest.raises(ClientError, match="107") as caught:
        Client("/tmp/" + "x" * 120, engine_id="engine")
    assert caught.value.code is Code.UNSUPPORTED
    with pytest.raises(ClientError) as caught:
        Client("/tmp/kvd.sock", engine_id="")
    assert caught.value.code is Code.BAD_MESSAGE


def test_a_refusal_is_passed_on(client: Client, daemon: FakeDaemon) -> None:
    client.poll()
    daemon.accept()
    daemon.say(local.Refused("peer_not_allowed", "the shim runs as uid 7, the daemon as uid 8"))
    daemon.hang_up()
    (down,) = client.poll()
    assert isinstance(down, Down)
    assert down.code is Code.PEER_NOT_ALLOWED
    assert "uid 7" in down.detail
    with pytest.raises(ClientError, match="uid 8") as caught:
        offer(client)
    assert caught.value.code is Code.PEER_NOT_ALLOWED


@pytest.mark.parametrize(("major", "minor", "fine"), [(1, 9, True), (2, 0, False), (0, 0, False)])
def test_another_major_version_is_refused_and_another_minor_is_fine(
    client: Client, daemon: FakeDaemon, major: int, minor: int, fine: bool
) -> None:
    client.poll()
    daemon.accept()
    daemon.say_raw(welcome(major=major, minor=minor))
    events = client.poll()
    if fine:
        assert state(client) == "registering"
    else:
        (down,) = of_type(events, Down)
        assert down.code is Code.VERSION_MISMATCH
        assert f"protocol {major}" in down.detail
