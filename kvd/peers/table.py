"""The peers that the core wants to be connected to, each with a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq.asyncio

from kvd.core import events
from kvd.drops import Drops
from kvd.peers.client import PeerClient, PeerOptions
from kvd.protocol import peer
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr
from kvd.tasks import TaskSet


class PeerTable:
    """By address. How many there may be is bounded by the core, which asks for each."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        options: PeerOptions,
        *,
        feed: Callable[[events.Event], None],
        tasks: TaskSet,
        drops: Drops,
    ) -> None:
        self._context = context
        self._options = options
        self._feed = feed
        self._tasks = tasks
        self._drops = drops
        self._peers: dict[PeerAddr, tuple[PeerClient, asyncio.Task[None]]] = {}

    def connect(self, address: PeerAddr) -> None:
        """Starts to connect; one that is known and down is tried again at once."""
        known = self._peers.get(address)
        if known is not None:
            known[0].ask()
            return
        client = PeerClient(
            self._context, address, self._options, feed=self._feed, drops=self._drops
        )
        self._peers[address] = (client, self._tasks.start(client.run(), f"peer-{address}"))

    def disconnect(self, address: PeerAddr) -> None:
        """Closes the connection and stops trying. No PeerDown follows."""
        known = self._peers.pop(address, None)
        if known is not None:
            known[0].retire()
            known[1].cancel()

    def get(self, address: PeerAddr) -> PeerClient | None:
        known = self._peers.get(address)
        return None if known is None else known[0]

    def send(self, address: PeerAddr, message: peer.ToProducer) -> None:
        """Nothing is sent to one that is down: PeerDown is, or will be, an event."""
        client = self.get(address)
        if client is not None:
            client.send(message)

    def fail(self, address: PeerAddr, code: Code, detail: str) -> None:
        """Ends the present connection to a peer; it is connected anew."""
        client = self.get(address)
        if client is not None:
            client.fail(code, detail)

    def by_state(self) -> dict[str, int]:
        """How many peers are up, connecting and down."""
        counts = {"up": 0, "connecting": 0, "down": 0}
        for client, _ in self._peers.values():
            counts[client.state] += 1
        return counts

    def views(self) -> list[dict[str, object]]:
        """Each peer for `kvd status`: address, state, who and where it is, seconds of RTT."""
        return [
            {
                "address": str(client.address),
                "state": client.state,
                "daemon_id": client.daemon_id,
                "ip": client.ip,
                "key": client.key,
                "same_host": client.link is not None,
                "rtt_s": client.rtt_s if client.up else -1.0,
                "problem": "" if client.up else client.problem,
            }
            for client, _ in self._peers.values()
        ]

    def close(self) -> None:
        for address in list(self._peers):
            self.disconnect(address)
