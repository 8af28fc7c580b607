"""All communicators of this daemon: made when first needed, capped, and ended when least used.

Consumer's ends are kept by the address of the producer's daemon, producer's ends by client and
name. Communicators are made one at a time on each side; a producer's turn never waits for a
consumer's, so that two daemons which ask each other cannot wait in a circle.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable

import structlog

from kvd.core import events
from kvd.errors import KvdError
from kvd.memory.cuda.device import Gpu
from kvd.memory.cuda.memory import DeviceMemory
from kvd.protocol import peer as wire
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr
from kvd.transport.base import TicketView, TransportError
from kvd.transport.gpu_thread import GpuThread
from kvd.transport.nccl_comm import Comm
from kvd.transport.nccl_lib import Nccl
from kvd.transport.nccl_link import Link
from kvd.transport.nccl_puller import NcclPuller
from kvd.transport.nccl_serving import Serving
from kvd.transport.options import TransportOptions

log = structlog.get_logger("kvd.nccl")

MAX_ABANDONED = 3
"""Threads left behind in a call of NCCL before the daemon gives up."""
MAX_JOINING = 64
"""Daemons that may wait for their turn to be joined."""


class NcclTransport:
    """`copier`: see `Comm`. `send_peer`, `send_client`: messages to a producer's daemon, and to a
    consumer's. `on_read(ticket)` hears of each chunk that was sent."""

    def __init__(
        self,
        gpu: Gpu,
        lib: Nccl,
        options: TransportOptions,
        *,
        copier: GpuThread,
        send_peer: Callable[[PeerAddr, wire.NcclToProducer], None],
        send_client: Callable[[int, wire.NcclToConsumer], None],
        on_read: Callable[[bytes], None],
    ) -> None:
        self._gpu = gpu
        self._lib = lib
        self._copier = copier
        self._options = options
        self._send_peer = send_peer
        self._send_client = send_client
        self._on_read = on_read
        self._tickets: dict[bytes, TicketView] = {}
        self._links: dict[PeerAddr, Link] = {}
        self._leaving: list[Link] = []
        """Failed ones, replaced already, that are being ended."""
        self._opening: dict[PeerAddr, asyncio.Task[Link]] = {}
        self._serving: dict[tuple[int, str], Serving] = {}
        self._joining: dict[tuple[int, str], asyncio.Task[None]] = {}
        self._turn_to_open = asyncio.Lock()
        self._turn_to_join = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._boot = secrets.token_hex(8)
        self._abandoned = 0
        self._lost = ""
        self._closed = False

    # --- the consumer's side --------------------------------------------------------------------

    async def puller(self, local: DeviceMemory, addr: PeerAddr, remote_blocks: int) -> NcclPuller:
        """A puller from the daemon at `addr`, ready. Raises TransportError."""
        puller = NcclPuller(local, remote_blocks, lambda: self.link(addr))
        await puller.open()
        return puller

    async def link(self, addr: PeerAddr) -> Link:
        """The communicator with that daemon, made if there is none. Raises TransportError."""
        if self._closed:
            raise TransportError(Code.CANCELLED, "the daemon is stopping")
        link = self._links.get(addr)
        if link is not None and link.up:
            return link
        opening = self._opening.get(addr)
        if opening is None:
            opening = asyncio.ensure_future(self._open(addr))
            self._opening[addr] = opening
            opening.add_done_callback(lambda done: self._opened(addr, done))
        return await asyncio.shield(opening)

    def _opened(self, addr: PeerAddr, opening: asyncio.Task[Link]) -> None:
        if self._opening.get(addr) is opening:
            del self._opening[addr]
        if not opening.cancelled():
            opening.exception()  # told to those who wait, if anybody still does

    async def _open(self, addr: PeerAddr) -> Link:
        async with self._turn_to_open:
            await self._make_room()
            name = f"c{next(self._numbers)}"
            link = Link(
                f"{self._boot}-{name}",
                addr,
                self._comm(name),
                self._options,
                lambda message: self._send_peer(addr, message),
            )
            old = self._links.get(addr)
            if old is not None and not old.comm.ended:
                self._leaving.append(old)
            self._links[addr] = link
            try:
                unique_id = self._lib.unique_id()
            except KvdError as exc:
                error = TransportError(exc.code, exc.detail)
                link.fail(error)
                raise error from None
            await link.open(unique_id)
            log.info("nccl_up", peer=str(addr), comm=link.comm_id)
            return link

    async def _make_room(self) -> None:
        """Ends the least recently used one while there are too many. Raises TransportError."""
        self._forget_ended()
        while len(self._everyone()) >= self._options.nccl_max_comms:
            idle = [one for one in self._links.values() if not one.busy]
            if not idle:
                raise TransportError(
                    Code.OVERLOADED, f"{self._options.nccl_max_comms} communicators are in use"
                )
            oldest = min(idle, key=lambda one: one.used_at)
            log.info("nccl_evicted", peer=str(oldest.addr))
            await oldest.close()
            self._forget_ended()

    def _everyone(self) -> list[Link | Serving]:
        return [*self._links.values(), *self._leaving, *self._serving.values()]

    def _forget_ended(self) -> None:
        self._leaving = [link for link in self._leaving if not link.comm.ended]
        for addr, link in list(self._links.items()):
            if link.failure is not None and link.comm.ended:
                del self._links[addr]
        for key, serving in list(self._serving.items()):
            if serving.failure is not None and serving.comm.ended:
                del self._serving[key]

    # --- the producer's side --------------------------------------------------------------------

    def open_ticket(self, ticket: bytes, view: TicketView) -> None:
        self._tickets[ticket] = view

    def close_ticket(self, ticket: bytes) -> None:
        self._tickets.pop(ticket, None)

    def _join(self, client: int, message: wire.NcclOpen) -> None:
        key = (client, message.comm)
        self._forget_ended()
        problem = ""
        if key in self._serving or key in self._joining:
            problem = "there is one of that name"
        elif len(self._joining) >= MAX_JOINING:
            problem = "too many wait for their turn"
        elif len(self._everyone()) >= self._options.nccl_max_comms:
            problem = f"{self._options.nccl_max_comms} communicators are in use here"
        if problem or self._closed:
            code = Code.CANCELLED if self._closed else Code.OVERLOADED
            self._send_client(client, wire.NcclOpened(message.comm, str(code), problem))
            return
        serving = Serving(
            message,
            self._comm(f"p{next(self._numbers)}"),
            self._options,
            ticket=self._tickets.get,
            send=lambda answer: self._send_client(client, answer),
            on_read=self._on_read,
        )
        self._serving[key] = serving
        task = asyncio.ensure_future(self._joined(serving))
        self._joining[key] = task
        task.add_done_callback(lambda _: self._joining.pop(key, None))

    async def _joined(self, serving: Serving) -> None:
        async with self._turn_to_join:
            if serving.failure is None:
                await serving.join()

    # --- what the daemon hears ------------------------------------------------------------------

    def takes(self, event: events.Event) -> bool:
        """Whether the event is for us alone."""
        match event:
            case events.PeerMessage(
                peer=addr, message=wire.NcclOpened() | wire.NcclReady() | wire.NcclClosed() as said
            ):
                link = self._links.get(addr)
                if link is not None and link.comm_id == said.comm:
                    link.hear(said)
                return True
            case events.ClientMessage(client=client, message=wire.NcclOpen() as asked):
                self._join(client, asked)
                return True
            case events.ClientMessage(
                client=client, message=wire.NcclWant() | wire.NcclGo() | wire.NcclClose() as asked
            ):
                serving = self._serving.get((client, asked.comm))
                if serving is not None:
                    serving.hear(asked)
                return True
            case events.PeerDown():
                link = self._links.get(event.peer)
                if link is not None:
                    link.fail(TransportError(Code.PEER_LOST, event.detail))
            case events.ClientLeft():
                for (client, _), serving in list(self._serving.items()):
                    if client == event.client:
                        serving.fail(TransportError(Code.PEER_LOST, "its daemon left"))
            case _:
                pass
        return False

    # --- watch and end --------------------------------------------------------------------------

    def stuck(self) -> str:
        """Why only a new process can help, "" while it cannot be known or is not so."""
        if self._lost:
            return self._lost
        if self._abandoned > MAX_ABANDONED:
            return f"{self._abandoned} threads hang in calls of NCCL"
        options = self._options
        # By then a communicator that hangs has been ended, if it can be.
        limit = options.gpu_hang_s + options.data_timeout_s + 3 * options.nccl_abort_timeout_s
        for one in self._everyone():
            if one.comm.stuck_for > limit and not one.comm.ended:
                return f"communicator {one.comm_id} has hung for {one.comm.stuck_for:.0f} s"
        return ""

    def statistics(self) -> dict[str, int]:
        """comms: alive on both sides. abandoned: threads left behind. staging_bytes: of GPU
        memory."""
        self._forget_ended()
        everyone = self._everyone()
        return {
            "comms": len(everyone),
            "abandoned": self._abandoned,
            "staging_bytes": sum(one.comm.staging_bytes for one in everyone),
        }

    async def aclose(self) -> None:
        """Ends all; returns when they are gone, or were given up."""
        self._closed = True
        self._tickets.clear()
        closing = [one.close() for one in self._everyone()]
        await asyncio.gather(*closing, return_exceptions=True)
        waiting = [*self._opening.values(), *self._joining.values()]
        if waiting:
            await asyncio.wait(waiting)

    def _comm(self, name: str) -> Comm:
        return Comm(
            self._gpu,
            self._lib,
            self._options,
            name,
            copier=self._copier,
            on_lost=self._on_lost,
            on_abandoned=self._on_abandoned,
        )

    def _on_lost(self, why: str) -> None:
        log.error("nccl_lost", detail=why)
        self._lost = why

    def _on_abandoned(self) -> None:
        self._abandoned += 1
