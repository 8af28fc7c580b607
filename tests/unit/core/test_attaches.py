"""Consumers' daemons that attach to a producer."""

from __future__ import annotations

import pytest
from msgspec import structs

from kvd.core import events as ev
from kvd.core.config import CoreConfig
from kvd.protocol import local, peer
from kvd.protocol.types import Rank
from tests.unit.core.consumer_daemon import Daemon
from tests.unit.core.engine import Engine, geometry
from tests.unit.core.world import World

ATTACH = peer.Attach("a", "P", "D", 1, Rank(), geometry((0, 0, 0)), ["shm", "tcp"])


def attach(
    producer: Engine, message: peer.Attach, *, same_host: bool = True
) -> peer.AttachOk | peer.AttachRefused:
    node = producer.node
    node.run(ev.ClientJoined(1, "c", 1, same_host))
    node.run(ev.ClientMessage(1, message))
    _, answer = node.answered[-1]
    assert isinstance(answer, peer.AttachOk | peer.AttachRefused)
    return answer


def changed(**fields: object) -> peer.Attach:
    return structs.replace(ATTACH, **fields)


@pytest.mark.parametrize(
    ("message", "code", "says"),
    [
        (changed(engine_id="Q"), "unknown_engine", "Q"),
        (changed(rank=Rank(tp_rank=1, tp_size=2)), "geometry_mismatch", "rank"),
        (changed(transports=["nccl"]), "transport_unavailable", "nccl"),
        (changed(transports=[]), "transport_unavailable", "none"),
    ],
)
def test_attach_is_refused_with_a_reason(
    producer: Engine, message: peer.Attach, code: str, says: str
) -> None:
    answer = attach(producer, message)
    assert isinstance(answer, peer.AttachRefused)
    assert answer.code == code
    assert says in answer.detail


def test_a_consumer_engine_cannot_be_attached_to(world: World) -> None:
    answer = attach(world.node("p").engine("P", role="consumer"), ATTACH)
    assert isinstance(answer, peer.AttachRefused)
    assert answer.code == "unsupported"


@pytest.mark.parametrize(
    ("transports", "same_host", "slots", "chosen"),
    [
        (["shm", "tcp"], True, 8, "shm"),
        (["tcp", "shm"], True, 8, "tcp"),
        (["shm", "tcp"], False, 8, "tcp"),
        (["shm", "tcp"], True, 0, "tcp"),
        (["nccl", "tcp"], True, 8, "tcp"),
    ],
)
def test_the_first_transport_that_is_allowed(
    world: World, transports: list[str], same_host: bool, slots: int, chosen: str
) -> None:
    producer = world.node("p").engine("P", fence_slots=slots)
    answer = attach(producer, changed(transports=transports), same_host=same_host)
    assert isinstance(answer, peer.AttachOk)
    assert answer.transport == chosen
    assert answer.memory_key == producer.session
    assert answer.num_blocks == 64
    assert answer.data_port is None


def test_a_daemon_with_one_transport_takes_no_other(world: World) -> None:
    producer = world.node("p", CoreConfig(transports=("tcp",))).engine("P")
    answer = attach(producer, changed(transports=["shm"]))
    assert isinstance(answer, peer.AttachRefused)
    assert answer.code == "transport_unavailable"


def test_the_newest_epoch_of_a_rank_is_the_engine(world: World) -> None:
    node = world.node("p")
    old = node.engine("P", epoch=1)
    daemon = Daemon(old)
    old.offer("T", tokens=32)
    new = node.engine("P", epoch=2)
    assert isinstance(daemon.hears(peer.EngineGone), peer.EngineGone)
    assert old.ended("T") == [(1, "engine_gone")]
    assert old.released
    old.alive = False
    daemon.say(changed(attach_id="b"))
    answer = daemon.hears(peer.AttachOk)
    assert (answer.engine_epoch, answer.memory_key) == (2, new.session)
    older = node.engine("P", epoch=1, register=False)
    assert older.took(local.Refused)[0].code == "stale_epoch"
    assert older.released
    assert not new.released


def test_attachments_are_bounded(world: World) -> None:
    producer = world.node("p", CoreConfig(max_attachments=1)).engine("P")
    daemon = Daemon(producer)
    daemon.say(changed(attach_id="b"))
    assert daemon.hears(peer.AttachRefused).code == "overloaded"
    daemon.say(peer.Detach("a"))
    daemon.say(changed(attach_id="b"))
    assert daemon.hears(peer.AttachOk).attach_id == "b"
