"""Two or more cores joined by an in-memory network, with shims, fences and memory played here.

No bytes move. A block of a layer holds a *tag*, (transfer, generation, block index), which a
copy carries from one engine's memory to the other's; whatever reaches a consumer can be told
apart by its tag.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from kvd.core import events as ev
from kvd.core import instructions as ins
from kvd.core.config import CoreConfig
from kvd.core.machine import Core
from kvd.core.packed import NULL, unpack
from kvd.protocol import local, peer
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr, Rank, Role
from tests.unit.core.engine import Engine, geometry, layouts


@dataclass(eq=False)
class Ticket:
    session: int
    slot: int
    word: int
    opened: ins.OpenTicket
    blocks: list[bytes]
    valid: dict[int, int]


class Node:
    """One daemon: a core, and a shell that does as it is told."""

    def __init__(self, world: World, name: str, config: CoreConfig, boot: int = 1) -> None:
        self.world = world
        self.name = name
        self.addr = PeerAddr(name, 7000)
        self.boot = boot
        tickets = count(1)
        self.core = Core(
            config,
            boot,
            name,
            self.addr,
            "test",
            token=lambda: f"{name}{boot}-{next(tickets)}".encode().ljust(16, b"-")[:16],
        )
        self.engines: dict[int, Engine] = {}
        self.records: list[ins.Record] = []
        self.pulls: dict[int, ins.StartPull] = {}
        self.tickets: dict[bytes, Ticket] = {}
        self.closed_tickets: set[bytes] = set()
        self.transports: dict[str, ins.OpenTransport] = {}
        self.connected: set[PeerAddr] = set()
        self.clients: dict[int, Node] = {}
        self.sent: list[tuple[PeerAddr, peer.ToProducer]] = []
        self.answered: list[tuple[int, peer.ToConsumer]] = []
        self.started: list[ins.StartPull] = []
        self.stopped: list[str] = []
        self.log: list[ins.Instruction] = []

    def run(self, event: ev.Event) -> list[ins.Instruction]:
        out = self.core.handle(event, self.world.now)
        self.core.validate()
        self.log.extend(out)
        for instruction in out:
            self._carry_out(instruction)
        return out

    def engine(
        self,
        engine_id: str,
        *,
        groups: Sequence[int] = (0, 0, 0),
        num_blocks: int = 64,
        role: Role = "both",
        epoch: int = 1,
        rank: Rank | None = None,
        fence_slots: int = 64,
        geometry_changes: dict[str, object] | None = None,
        register: bool = True,
        probe: bool = False,
    ) -> Engine:
        session = next(self.world.sessions)
        engine = Engine(self, session, engine_id, tuple(groups), num_blocks, epoch)
        self.engines[session] = engine
        self.world.engines[session] = engine
        self.run(ev.SessionOpened(session, engine_id, epoch, rank or Rank(), role, probe))
        if register:
            self.run(
                ev.SessionRegistered(
                    session,
                    geometry(groups, **(geometry_changes or {})),
                    num_blocks,
                    (),
                    layouts(groups),
                    fence_slots,
                )
            )
        return engine

    def recorded(self, kind: str) -> list[dict[str, object]]:
        return [record.fields for record in self.records if record.kind == kind]

    def _carry_out(self, one: ins.Instruction) -> None:
        world = self.world
        match one:
            case ins.SendShim(session, message):
                engine = self.engines[session]
                assert engine.alive, "a message to a shim that is gone"
                assert not engine.released
                engine.inbox.append(message)
                if isinstance(message, local.OfferEnded):
                    world.offer_ended(engine, message)
                if isinstance(message, local.FetchDone):
                    world.fetch_done(engine, message)
            case ins.ReleaseSession(session):
                assert not any(pull.session == session for pull in self.pulls.values())
                assert not self.engines[session].released, "released twice"
                self.engines[session].released = True
            case ins.ConnectPeer(addr):
                self.connected.add(addr)
                if world.auto_connect:
                    world.post(lambda: world.connect(self, addr))
            case ins.DisconnectPeer(addr):
                self.connected.remove(addr)
                world.disconnect(self, addr)
            case ins.SendPeer(addr, message):
                self.sent.append((addr, message))
                world.to_producer(self, addr, message)
            case ins.SendClient(client, message):
                self.answered.append((client, message))
                world.to_consumer(self, client, message)
            case ins.OpenTransport(attach_id):
                assert attach_id not in self.transports
                self.transports[attach_id] = one
                if world.auto_open:
                    world.post(lambda: self._open_transport(attach_id))
            case ins.CloseTransport(attach_id):
                assert not any(pull.attach_id == attach_id for pull in self.pulls.values())
                del self.transports[attach_id]
            case ins.StartPull(job):
                assert one.attach_id in self.transports
                assert one.nbytes > 0
                self.pulls[job] = one
                self.started.append(one)
                if world.auto_pull:
                    world.post(lambda: world.finish_pull(self, job))
            case ins.StopPulls(fetch_id):
                self.stopped.append(fetch_id)
                if world.auto_stop:
                    for job, pull in list(self.pulls.items()):
                        if pull.fetch_id == fetch_id:
                            world.post(partial(world.fail_pull, self, job, Code.CANCELLED))
            case ins.OpenTicket(ticket):
                assert ticket not in self.tickets
                assert ticket not in self.closed_tickets
                self.tickets[ticket] = Ticket(
                    one.session, one.fence_slot, one.fence_word, one, list(one.blocks), {}
                )
                self._admit(ticket, one.valid)
            case ins.ExtendTicket(ticket, blocks, valid):
                held = self.tickets[ticket]
                held.blocks = [a + b for a, b in zip(held.blocks, blocks, strict=True)]
                held.valid = {}
                self._admit(ticket, valid)
            case ins.CloseTicket(ticket):
                del self.tickets[ticket]
                self.closed_tickets.add(ticket)
            case ins.Record():
                self.records.append(one)

    def _admit(self, ticket: bytes, valid: Sequence[object]) -> None:
        held = self.tickets[ticket]
        for mark in valid:
            for layer in range(mark.first_layer, mark.first_layer + mark.num_layers):  # type: ignore[attr-defined]
                held.valid[layer] = mark.tokens  # type: ignore[attr-defined]

    def _open_transport(self, attach_id: str) -> None:
        if attach_id in self.transports:
            self.run(ev.TransportOpened(attach_id))


class World:
    """The clock, the network, and the copies."""

    def __init__(self) -> None:
        self.now = 100.0
        self.nodes: dict[PeerAddr, Node] = {}
        self.engines: dict[int, Engine] = {}
        self.queue: deque[Callable[[], None]] = deque()
        self.sessions = count(1)
        self.client_ids = count(1)
        self.words = count(1000)
        self.links: dict[tuple[PeerAddr, PeerAddr], int] = {}
        self.auto_connect = True
        self.auto_open = True
        self.auto_pull = True
        self.auto_stop = True
        self.same_host = True
        self.offer_ended: Callable[[Engine, local.OfferEnded], None] = lambda engine, m: None
        self.fetch_done: Callable[[Engine, local.FetchDone], None] = lambda engine, m: None

    def node(self, name: str, config: CoreConfig | None = None, boot: int = 1) -> Node:
        node = Node(self, name, config or CoreConfig(), boot)
        self.nodes[node.addr] = node
        return node

    def post(self, action: Callable[[], None]) -> None:
        self.queue.append(action)

    def settle(self) -> None:
        """Deliver everything that is on its way."""
        for _ in range(100_000):
            if not self.queue:
                return
            self.queue.popleft()()
        raise AssertionError("the world does not come to rest")

    def step(self) -> None:
        if self.queue:
            self.queue.popleft()()

    def advance(self, seconds: float) -> None:
        """Let time pass; every core ticks at each of its deadlines on the way."""
        target = self.now + seconds
        for _ in range(10_000):
            times = [
                (when, node)
                for node in self.nodes.values()
                if (when := node.core.next_deadline()) is not None and when <= target
            ]
            if not times:
                self.now = target
                return
            when, node = min(times, key=lambda pair: pair[0])
            self.now = max(self.now, when)
            node.run(ev.Tick())
            self.settle()
        raise AssertionError("deadlines that never pass")

    # --- the network ------------------------------------------------------------------------

    def connect(self, consumer: Node, addr: PeerAddr) -> None:
        producer = self.nodes.get(addr)
        if producer is None or addr not in consumer.connected:
            if addr in consumer.connected:
                consumer.run(ev.PeerDown(addr, "peer_unreachable", "nobody listens"))
            return
        if (consumer.addr, addr) in self.links:
            return
        client = next(self.client_ids)
        self.links[consumer.addr, addr] = client
        producer.clients[client] = consumer
        producer.run(ev.ClientJoined(client, consumer.name, consumer.boot, self.same_host))
        consumer.run(ev.PeerUp(addr, producer.name, producer.boot, self.same_host))

    def disconnect(self, consumer: Node, addr: PeerAddr) -> None:
        client = self.links.pop((consumer.addr, addr), None)
        if client is not None:
            producer = self.nodes[addr]
            del producer.clients[client]
            self.post(lambda: self.client_left(producer, client))

    def client_left(self, producer: Node, client: int) -> None:
        producer.run(ev.ClientLeft(client, "peer_lost"))

    def cut(self, consumer: Node, producer: Node, *, both: bool = True) -> None:
        """The connection breaks; what was on its way is lost."""
        client = self.links.pop((consumer.addr, producer.addr), None)
        if client is None:
            return
        del producer.clients[client]
        consumer.run(ev.PeerDown(producer.addr, "peer_lost", "the link broke"))
        if both:
            self.client_left(producer, client)

    def to_producer(self, consumer: Node, addr: PeerAddr, message: peer.ToProducer) -> None:
        client = self.links.get((consumer.addr, addr))
        if client is None:
            return

        def deliver() -> None:
            if self.links.get((consumer.addr, addr)) == client:
                self.nodes[addr].run(ev.ClientMessage(client, message))

        self.post(deliver)

    def to_consumer(self, producer: Node, client: int, message: peer.ToConsumer) -> None:
        consumer = producer.clients.get(client)
        if consumer is None:
            return

        def deliver() -> None:
            if self.links.get((consumer.addr, producer.addr)) == client:
                consumer.run(ev.PeerMessage(producer.addr, message))

        self.post(deliver)

    # --- copies -----------------------------------------------------------------------------

    def source_of(self, node: Node, pull: ins.StartPull) -> Engine:
        return self.engines[node.transports[pull.attach_id].answer.memory_key]

    def valid(self, node: Node, pull: ins.StartPull) -> bool:
        """Whether the fence word is the grant's, now."""
        source = self.source_of(node, pull)
        return source.alive and source.fence.get(pull.fence_slot) == pull.fence_word

    def write(self, node: Node, pull: ins.StartPull, fraction: float = 1.0) -> None:
        """Copy (a part of) a job's tags as they are now."""
        consumer, source = node.engines[pull.session], self.source_of(node, pull)
        fetch = node.core.fetches.by_id.get(pull.fetch_id)
        assert fetch is not None, "a job of a fetch that was told"
        assert not consumer.released
        for piece in pull.pieces:
            sources, targets = unpack(piece.src), unpack(piece.dst)
            assert len(sources) == len(targets) == len(piece.indices) // 4
            assert NULL not in sources
            assert NULL not in targets
            layers = [
                layer
                for layer in range(piece.first_layer, piece.first_layer + piece.num_layers)
                if consumer.groups[layer] == piece.group
            ]
            assert layers
            upto = max(1, round(len(sources) * fraction))
            for layer in layers:
                for a, b in list(zip(sources, targets, strict=True))[:upto]:
                    tag = source.memory.get((piece.group, layer, a), ("garbage", -1, -1))
                    consumer.memory[piece.group, layer, b] = tag

    def finish_pull(self, node: Node, job: int, *, copied: bool = False) -> None:
        """Copy, unless that was done before, then look at the fence word, and answer."""
        pull = node.pulls.get(job)
        if pull is None:
            return
        if not copied:
            self.write(node, pull)
        del node.pulls[job]
        if self.valid(node, pull):
            node.run(ev.PullDone(job, pull.nbytes))
        else:
            node.run(ev.PullFailed(job, "fenced", "the word was another"))

    def answer_later(self, node: Node, job: int, *, copied: bool = False) -> Callable[[], None]:
        """Copy and look at the fence word now; returns what brings the answer."""
        pull = node.pulls[job]
        if not copied:
            self.write(node, pull)
        valid = self.valid(node, pull)

        def answer() -> None:
            if node.pulls.pop(job, None) is None:
                return
            if valid:
                node.run(ev.PullDone(job, pull.nbytes))
            else:
                node.run(ev.PullFailed(job, "fenced", "the word was another"))

        return answer

    def fail_pull(self, node: Node, job: int, code: str, fraction: float = 0.0) -> None:
        pull = node.pulls.get(job)
        if pull is None:
            return
        if fraction:
            self.write(node, pull, fraction)
        del node.pulls[job]
        node.run(ev.PullFailed(job, str(code), "as the test wants"))
