"""Consumer: peers and attachments, and how fetches end when they break."""

from __future__ import annotations

import pytest

from kvd.core import events as ev
from kvd.core import instructions as ins
from kvd.core.config import CoreConfig
from kvd.protocol import local, peer
from tests.unit.core.engine import NBYTES, Engine, layouts
from tests.unit.core.fetching import SMALL
from tests.unit.core.world import World


def codes(consumer: Engine) -> list[str]:
    return [message.code for message in consumer.took(local.FetchDone)]


def attaches(consumer: Engine) -> list[peer.Attach]:
    return [m for _, m in consumer.node.sent if isinstance(m, peer.Attach)]


def test_one_attachment_serves_many_fetches(
    world: World, producer: Engine, consumer: Engine
) -> None:
    for i in range(3):
        producer.offer(f"T{i}", tokens=32, slot=i)
        consumer.fetch(f"f{i}", f"T{i}", producer, end=32, blocks=[[2 * i, 2 * i + 1]])
    world.settle()
    assert codes(consumer) == ["ok"] * 3
    assert len(attaches(consumer)) == 1
    assert attaches(consumer)[0].transports == ["shm", "tcp"]


def test_a_peer_on_another_host_is_not_asked_for_shm(world: World) -> None:
    world.same_host = False
    producer = world.node("p").engine("P")
    consumer = world.node("d").engine("D")
    producer.offer("T", tokens=32)
    consumer.fetch("f", "T", producer, end=32)
    world.settle()
    assert consumer.done("f").transport == "tcp"
    only = world.node("e", CoreConfig(transports=("shm",))).engine("E")
    only.fetch("g", "T", producer, end=32)
    world.settle()
    assert only.done("g").code == "transport_unavailable"
    assert attaches(only) == []


def test_the_next_transport_is_tried_when_opening_fails(
    world: World, producer: Engine, consumer: Engine
) -> None:
    world.auto_open = False
    producer.offer("T", tokens=32)
    consumer.fetch("f", "T", producer, end=32)
    world.settle()
    ((first, opened),) = consumer.node.transports.items()
    assert opened.answer.transport == "shm"
    consumer.node.run(ev.TransportFailed(first, "transport_unavailable", "no link"))
    world.settle()
    ((second, opened),) = consumer.node.transports.items()
    assert opened.answer.transport == "tcp"
    assert second != first
    assert attaches(consumer)[1].transports == ["tcp"]
    consumer.node.run(ev.TransportOpened(first))
    assert codes(consumer) == []
    consumer.node.run(ev.TransportOpened(second))
    world.settle()
    assert consumer.done("f").transport == "tcp"
    assert producer.node.core.statistics().client_attachments == 1


def test_a_named_transport_has_no_substitute(world: World, producer: Engine) -> None:
    world.auto_open = False
    consumer = world.node("d", CoreConfig(transports=("tcp",))).engine("D")
    consumer.fetch("f", "T", producer, end=32)
    world.settle()
    (attach_id,) = consumer.node.transports
    consumer.node.run(ev.TransportFailed(attach_id, "transport_unavailable", "no route"))
    done = consumer.done("f")
    assert (done.code, done.detail) == ("transport_unavailable", "no route")
    assert consumer.node.transports == {}


def test_a_failure_is_remembered_for_a_moment(world: World, producer: Engine) -> None:
    consumer = world.node("d").engine("D", geometry_changes={"kv_dtype": "fp8"})
    for i in range(3):
        consumer.fetch(f"f{i}", "T", producer, end=32, blocks=[[2 * i, 2 * i + 1]])
        world.settle()
    assert codes(consumer) == ["geometry_mismatch"] * 3
    assert len(attaches(consumer)) == 1
    world.advance(1.1)
    consumer.fetch("g", "T", producer, end=32)
    world.settle()
    done = consumer.done("g")
    assert done.code == "geometry_mismatch"
    assert "kv_dtype" in done.detail
    assert "'bf16'" in done.detail
    assert "'fp8'" in done.detail
    assert len(attaches(consumer)) == 2


def test_a_peer_that_never_came_up(world: World, consumer: Engine, producer: Engine) -> None:
    del world.nodes[producer.node.addr]
    consumer.fetch("f", "T", producer, end=32)
    world.settle()
    assert consumer.done("f").code == "peer_unreachable"
    consumer.fetch("g", "T", producer, end=32)
    assert consumer.done("g").code == "peer_unreachable"
    world.nodes[producer.node.addr] = producer.node
    world.connect(consumer.node, producer.node.addr)
    producer.offer("T", tokens=32)
    consumer.fetch("h", "T", producer, end=32)
    world.settle()
    assert consumer.done("h").code == "ok"


def peers(engine: Engine) -> dict[str, int]:
    return engine.node.core.statistics().peers


NONE = {"up": 0, "down": 0}


def test_a_probe_that_failed_leaves_no_peer(world: World, producer: Engine) -> None:
    del world.nodes[producer.node.addr]
    node = world.node("d")
    for number in range(3):
        doctor = node.engine(f"doctor-{number}", probe=True)
        doctor.fetch("f", "T", producer, end=32)
        assert peers(doctor) == {"up": 0, "down": 1}
        # Not because it was said to fail: each is connected to before it fails.
        assert not doctor.took(local.FetchDone)
        world.settle()
        assert doctor.done("f").code == "peer_unreachable"
        assert peers(doctor) == NONE
        assert node.core.statistics().attachments["failed"] == 0
        assert node.connected == set()
        doctor.close()


def test_a_probe_that_went_well_leaves_no_peer(world: World, producer: Engine) -> None:
    doctor = world.node("d").engine("doctor", probe=True)
    producer.offer("T", tokens=32)
    doctor.fetch("f", "T", producer, end=32)
    world.settle()
    assert doctor.done("f").code == "ok"
    assert peers(doctor) == NONE
    assert doctor.node.transports == {}
    assert producer.node.core.statistics().client_attachments == 0
    doctor.fetch("g", "U", producer, end=32, park=0.0)
    world.settle()
    assert doctor.done("g").code == "unknown_transfer"
    assert peers(doctor) == NONE


def test_a_probe_that_gives_up_leaves_no_peer(world: World, producer: Engine) -> None:
    world.auto_connect = False
    doctor = world.node("d").engine("doctor", probe=True)
    doctor.fetch("f", "T", producer, end=32)
    doctor.close()
    assert peers(doctor) == NONE
    assert doctor.node.connected == set()


def test_a_probe_tries_a_peer_that_is_known_to_be_down(
    world: World, consumer: Engine, producer: Engine
) -> None:
    del world.nodes[producer.node.addr]
    consumer.fetch("f", "T", producer, end=32)
    world.settle()
    assert consumer.done("f").code == "peer_unreachable"
    world.nodes[producer.node.addr] = producer.node
    producer.offer("T", tokens=32)
    consumer.fetch("g", "T", producer, end=32)
    assert consumer.done("g").code == "peer_unreachable"
    doctor = consumer.node.engine("doctor", probe=True)
    doctor.fetch("f", "T", producer, end=32)
    world.settle()
    assert doctor.done("f").code == "ok"
    # An engine asked for it too: it stays.
    assert peers(consumer) == {"up": 1, "down": 0}
    world.advance(CoreConfig().peer_idle_s + 0.1)
    assert peers(consumer) == NONE


def test_a_peer_that_an_engine_came_to_use_outlives_the_probe(
    world: World, consumer: Engine, producer: Engine
) -> None:
    doctor = consumer.node.engine("doctor", probe=True)
    doctor.fetch("f", "T", producer, end=32, park=30.0)
    world.settle()
    consumer.say(local.Renew("T", 1, producer.node.addr, "P"))
    world.settle()
    doctor.close()
    assert peers(consumer) == {"up": 1, "down": 0}


def test_attaching_has_a_deadline(world: World, producer: Engine, consumer: Engine) -> None:
    for stage in ("connect", "answer", "open"):
        world = World()
        world.auto_connect = stage != "connect"
        world.auto_open = stage != "open"
        producer = world.node("p").engine("P")
        consumer = world.node("d").engine("D")
        consumer.fetch("f", "T", producer, end=32, park=30.0)
        if stage == "answer":
            world.step()
            world.queue.clear()
        world.settle()
        world.advance(CoreConfig().attach_timeout_s + 0.1)
        assert consumer.done("f").code == "peer_unreachable"
        world.advance(CoreConfig().failure_cache_s + 0.1)
        assert consumer.node.transports == {}
        assert consumer.node.core.statistics().attachments["failed"] == 0


@pytest.mark.parametrize("how", ["peer", "restart", "transport", "engine"])
def test_a_break_in_the_middle(world: World, producer: Engine, how: str) -> None:
    world.auto_pull = world.auto_stop = False
    consumer = world.node("d", SMALL).engine("D")
    node = consumer.node
    producer.offer("T", tokens=48)
    consumer.fetch("f", "T", producer, end=48)
    consumer.fetch("waits", "U", producer, end=32, blocks=[[8, 9]], park=30.0)
    world.settle()
    (attach_id,) = node.transports
    jobs = sorted(node.pulls)
    world.finish_pull(node, jobs[0])
    match how:
        case "peer":
            world.cut(node, producer.node)
        case "restart":
            node.run(ev.PeerUp(producer.node.addr, "p", 2, True))
        case "transport":
            node.run(ev.TransportFailed(attach_id, "transport_error", "reset"))
        case "engine":
            producer.close()
            world.settle()
    code = {"peer": "peer_lost", "restart": "peer_lost", "transport": "transport_error"}.get(
        how, "engine_gone"
    )
    assert consumer.done("waits").code == code
    assert consumer.took(local.FetchDone) == [], "told while jobs are in flight"
    assert attach_id in node.transports
    for job in jobs[1:]:
        world.fail_pull(node, job, "transport_error", 0.5)
    done = consumer.done("f")
    # An engine that left took its generation with it; else what arrived was valid and stays so.
    assert (done.code, done.bad) == (code, [b"\7"] if how == "engine" else [b"\6"])
    assert attach_id not in node.transports


def test_the_next_fetch_attaches_anew(world: World, producer: Engine, consumer: Engine) -> None:
    producer.offer("T", tokens=32, lease=600.0)
    consumer.fetch("f", "T", producer, end=32)
    world.settle()
    (first,) = consumer.node.transports
    consumer.node.run(ev.TransportFailed(first, "transport_error", "reset"))
    world.settle()
    assert producer.node.core.statistics().client_attachments == 0
    consumer.fetch("g", "T", producer, end=32)
    world.settle()
    assert codes(consumer) == ["ok", "ok"]
    (second,) = consumer.node.transports
    world.cut(consumer.node, producer.node)
    world.connect(consumer.node, producer.node.addr)
    producer.offer("T", 2, tokens=32)
    consumer.fetch("h", "T", producer, end=32)
    world.settle()
    assert codes(consumer) == ["ok"]
    assert len({first, second, *consumer.node.transports}) == 3


def test_closes_reach_a_producer_that_was_away_for_a_moment(
    world: World, producer: Engine, consumer: Engine
) -> None:
    """It may not have noticed, and would hold the offer for the longest time a fetch may take."""
    producer.offer("T", tokens=32, lease=1.0)
    world.auto_pull = False
    consumer.fetch("f", "T", producer, end=32)
    world.settle()
    client = world.links[consumer.node.addr, producer.node.addr]
    consumer.node.run(ev.PeerDown(producer.node.addr, "peer_lost", "no heartbeat"))
    assert codes(consumer) == []
    world.settle()
    assert codes(consumer) == ["peer_lost"]
    assert producer.node.core.statistics().requests == 1
    consumer.node.run(ev.PeerUp(producer.node.addr, "p", 1, True))
    world.settle()
    assert world.links[consumer.node.addr, producer.node.addr] == client
    assert producer.node.core.statistics().requests == 0
    assert producer.node.core.statistics().client_attachments == 0


def test_an_attachment_that_the_producer_forgot_is_made_again(
    world: World, producer: Engine, consumer: Engine
) -> None:
    producer.offer("T", tokens=32)
    consumer.fetch("f", "T", producer, end=32)
    world.settle()
    (client,) = producer.node.clients
    (attach_id,) = consumer.node.transports
    producer.node.run(ev.ClientMessage(client, peer.Detach(attach_id)))
    consumer.fetch("g", "T", producer, end=32)
    world.settle()
    consumer.fetch("h", "T", producer, end=32)
    world.settle()
    assert codes(consumer) == ["ok", "stale_epoch", "ok"]


def test_what_nobody_uses_is_dropped(world: World) -> None:
    config = CoreConfig(peer_idle_s=50.0)
    producer = world.node("p").engine("P")
    consumer = world.node("d", config).engine("D")
    producer.offer("T", tokens=32, lease=600.0)
    consumer.fetch("f", "T", producer, end=32)
    world.settle()
    world.advance(40.0)
    producer.offer("U", tokens=32, slot=1)
    consumer.fetch("g", "U", producer, end=32)
    world.settle()
    world.advance(49.0)
    assert len(consumer.node.transports) == 1
    world.advance(2.0)
    assert consumer.node.transports == {}
    assert producer.node.core.statistics().client_attachments == 0
    world.advance(51.0)
    assert consumer.node.connected == set()
    assert producer.node.core.statistics().clients == 0


@pytest.mark.parametrize("change", ["transport", "layers", "blocks"])
def test_an_answer_that_does_not_fit(
    world: World, producer: Engine, consumer: Engine, change: str
) -> None:
    consumer.fetch("f", "T", producer, end=32)
    for _ in range(2):
        world.step()
    world.queue.clear()
    (attach,) = attaches(consumer)
    fields = {
        "attach_id": attach.attach_id,
        "engine_epoch": 1,
        "transport": "nccl" if change == "transport" else "shm",
        "num_blocks": 0 if change == "blocks" else 64,
        "segments": [],
        "layers": list(layouts((0, 0, 0), 512 if change == "layers" else NBYTES)),
        "fence_slots": 8,
        "memory_key": 1,
    }
    consumer.node.run(ev.PeerMessage(producer.node.addr, peer.AttachOk(**fields)))  # type: ignore[arg-type]
    code = {
        "transport": "transport_unavailable",
        "layers": "geometry_mismatch",
        "blocks": "bad_message",
    }[change]
    assert codes(consumer) == [code]
    assert consumer.node.transports == {}


def test_peers_and_attachments_are_bounded(world: World, producer: Engine) -> None:
    consumer = world.node("d", CoreConfig(max_peers=1, max_attachments=1)).engine("D")
    other = world.node("q").engine("Q")
    consumer.fetch("f", "T", producer, end=32, park=30.0)
    consumer.fetch("g", "T", other, end=32, blocks=[[4, 5]])
    assert consumer.done("g").code == "overloaded"
    more = producer.node.engine("R")
    consumer.fetch("h", "T", more, end=32, blocks=[[4, 5]])
    assert consumer.done("h").code == "overloaded"


def test_each_opening_has_one_closing(world: World, producer: Engine, consumer: Engine) -> None:
    world.auto_open = False
    consumer.fetch("f", "T", producer, end=32)
    world.settle()
    consumer.close()
    log = consumer.node.log
    opened = [one.attach_id for one in log if isinstance(one, ins.OpenTransport)]
    closed = [one.attach_id for one in log if isinstance(one, ins.CloseTransport)]
    assert opened == closed
    assert len(opened) == 1


def draining(world: World, producer: Engine) -> tuple[Engine, list[int]]:
    """A fetch of three blocks of which one has arrived, whose peer has restarted meanwhile."""
    world.auto_pull = world.auto_stop = False
    consumer = world.node("d", SMALL).engine("D")
    producer.offer("T", tokens=48)
    consumer.fetch("f", "T", producer, end=48)
    world.settle()
    first, *rest = sorted(consumer.node.pulls)
    world.finish_pull(consumer.node, first)
    consumer.node.run(ev.PeerUp(producer.node.addr, "p", 2, True))
    assert codes(consumer) == []
    return consumer, rest


def test_a_new_life_of_a_peer_has_no_say_about_the_old(world: World, producer: Engine) -> None:
    consumer, jobs = draining(world, producer)
    revoked = peer.FetchRevoked("f", 1, "revoked", False)
    consumer.node.run(ev.PeerMessage(producer.node.addr, revoked))
    assert consumer.node.recorded("late")[-1]["what"] == "FetchRevoked"
    for job in jobs:
        world.fail_pull(consumer.node, job, "transport_error")
    done = consumer.done("f")
    assert (done.code, done.bad) == ("peer_lost", [b"\6"])


def test_a_dead_word_voids_a_fetch_that_had_failed_before(world: World, producer: Engine) -> None:
    consumer, jobs = draining(world, producer)
    producer.fence[0] = 0
    world.finish_pull(consumer.node, jobs[0])
    world.fail_pull(consumer.node, jobs[1], "transport_error")
    done = consumer.done("f")
    assert (done.code, done.bad) == ("peer_lost", [b"\7"])
