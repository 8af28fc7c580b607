"""A consumer's daemon as its producer's meets it."""

from __future__ import annotations

from typing import TypeVar

from kvd.core import events as ev
from kvd.core import instructions as ins
from kvd.protocol import peer
from kvd.protocol.types import Rank
from tests.unit.core.engine import Engine, digest, geometry

M = TypeVar("M")


class Daemon:
    """A consumer's daemon, word by word."""

    def __init__(
        self,
        producer: Engine,
        number: int = 900,
        groups: tuple[int, ...] = (0, 0, 0),
        peer_name: str = "",
    ):
        self.producer = producer
        self.number = number
        producer.node.run(ev.ClientJoined(number, f"c{number}", 1, True, peer_name))
        self.say(peer.Attach("a", "P", "D", 1, Rank(), geometry(groups), ["shm", "tcp"]))
        assert isinstance(self.heard()[-1], peer.AttachOk)

    def say(self, message: peer.ToProducer) -> list[ins.Instruction]:
        return self.producer.node.run(ev.ClientMessage(self.number, message))

    def heard(self) -> list[peer.ToConsumer]:
        mine = [m for client, m in self.producer.node.answered if client == self.number]
        self.producer.node.answered = [
            pair for pair in self.producer.node.answered if pair[0] != self.number
        ]
        return mine

    def ask(
        self,
        fetch_id: str,
        transfer: str,
        start: int,
        end: int,
        *,
        generation: int | None = None,
        park: float = 0.0,
        prompt: str = "",
        attach_id: str = "a",
    ) -> list[peer.ToConsumer]:
        self.say(
            peer.FetchReq(
                fetch_id=fetch_id,
                attach_id=attach_id,
                transfer_id=transfer,
                generation=generation,
                start=start,
                end=end,
                digest=digest(prompt or transfer, end),
                park_s=park,
            )
        )
        return self.heard()

    def hears(self, kind: type[M]) -> M:
        heard = self.heard()
        assert len(heard) == 1, heard
        assert isinstance(heard[0], kind), heard
        return heard[0]


def granted(daemon: Daemon) -> peer.Grant:
    """The one grant among what was heard; the offer may have grown after it."""
    found = [message for message in daemon.heard() if isinstance(message, peer.Grant)]
    assert len(found) == 1
    return found[0]


def code_of(heard: list[peer.ToConsumer]) -> str:
    assert len(heard) == 1, heard
    assert isinstance(heard[0], peer.FetchRefused), heard
    return heard[0].code
