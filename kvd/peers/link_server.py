"""The producer's end of same-host links: proves the host, passes memory, notices death."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
from collections.abc import Callable
from typing import Protocol

import msgspec
import structlog

from kvd.drops import Drops
from kvd.errors import KvdError
from kvd.local.listener import Listener
from kvd.local.seqpacket import End, FrameSocket, uid_refusal
from kvd.peers.link import (
    FDS_PER_FRAME,
    MAX_QUEUE,
    LinkHello,
    LinkMemory,
    LinkProof,
    LinkWant,
    decoder,
    encode,
    link_proof,
    nonce_memfd,
)
from kvd.protocol.codes import Code

log = structlog.get_logger("kvd.link")

HELLO_TIMEOUT_S = 5.0


class Clients(Protocol):
    """The daemons that said hello over ZMQ; `kvd.peers.server.PeerServer` is one."""

    def nonce_of(self, daemon_id: str, boot_id: int) -> tuple[int, bytes] | None:
        """The client's number and the nonce of its welcome."""

    def leave(self, client: int, code: Code, detail: str) -> None: ...


class LinkServer:
    """Accepts links. `share(memory_key)` gives fds that it owns, or raises KvdError."""

    def __init__(
        self,
        listener: Listener,
        *,
        clients: Clients,
        share: Callable[[int], list[int]],
        drops: Drops,
        max_links: int,
    ) -> None:
        self._listener = listener
        self._clients = clients
        self._share = share
        self._drops = drops
        self._max_links = max_links
        self._loop = asyncio.get_running_loop()
        self._links: set[_Link] = set()
        self._accepting = False

    @property
    def path(self) -> str:
        return self._listener.path

    def start(self) -> None:
        if not self._accepting:
            self._accepting = True
            self._loop.add_reader(self._listener.sock.fileno(), self._accept)

    def close(self) -> None:
        """Closes the listener and every link."""
        self._pause()
        self._listener.close()
        for link in list(self._links):
            link.close()

    def close_client(self, client: int) -> None:
        """The client left: its link goes too."""
        for link in list(self._links):
            if link.client == client:
                link.close()

    def __len__(self) -> int:
        return len(self._links)

    def _pause(self) -> None:
        if self._accepting:
            self._accepting = False
            self._loop.remove_reader(self._listener.sock.fileno())

    def _accept(self) -> None:
        for _ in range(16):
            try:
                sock, _ = self._listener.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._drops.drop("link", "accept")
                self._pause()
                self._loop.call_later(1.0, self._accept_again)
                return
            if len(self._links) >= self._max_links:
                self._drops.drop("link", "max_links", limit=self._max_links)
                sock.close()
                continue
            self._links.add(_Link(self, sock))

    def _accept_again(self) -> None:
        if self._listener.sock.fileno() >= 0:
            self.start()

    # --- for one link ---------------------------------------------------------------------

    def admit(self, hello: LinkHello) -> tuple[int, bytes] | None:
        """Client number and nonce, if the hello proves who it is."""
        known = self._clients.nonce_of(hello.daemon_id, hello.boot_id)
        if known is None or not hmac.compare_digest(link_proof(known[1]), hello.proof):
            return None
        return known

    def shared(self, memory_key: int) -> list[int]:
        return self._share(memory_key)

    def ended(self, link: _Link, reason: str, detail: str, *, foreign: bool) -> None:
        self._links.discard(link)
        if foreign:
            self._drops.drop("link", reason, detail=detail)
        if link.client is not None:
            self._clients.leave(link.client, Code.PEER_LOST, f"its link closed: {detail}")


class _Link:
    def __init__(self, server: LinkServer, sock: socket.socket) -> None:
        self._server = server
        loop = asyncio.get_running_loop()
        self.client: int | None = None
        self._frames = FrameSocket(
            loop,
            sock,
            on_frame=self._on_frame,
            on_end=self._on_end,
            max_fds=1,
            max_queue=MAX_QUEUE,
        )
        self._timer = loop.call_later(HELLO_TIMEOUT_S, self._break, "no_hello", "no hello in time")
        self._frames.start()

    def close(self) -> None:
        self._timer.cancel()
        self._frames.close()
        self._server.ended(self, "closed", "", foreign=False)

    def _on_frame(self, data: bytes, _fds: list[int]) -> None:
        try:
            message = decoder.decode(data)
        except msgspec.MsgspecError as e:
            self._break("undecodable", str(e)[:200])
            return
        match message:
            case LinkHello() if self.client is None:
                self._hello(message)
            case LinkWant() if self.client is not None:
                self._send_memory(message)
            case _:
                self._break("bad_message", f"{type(message).__name__} does not belong here")

    def _hello(self, message: LinkHello) -> None:
        refusal = uid_refusal(self._frames.peercred()[1], "the other daemon")
        if refusal is not None:
            self._break("uid", refusal)
            return
        known = self._server.admit(message)
        if known is None:
            self._break("unproven", f"{message.daemon_id[:100]} said no such hello")
            return
        self._timer.cancel()
        self.client, nonce = known
        self._frames.send(encode(LinkProof()), [nonce_memfd(nonce)])

    def _send_memory(self, want: LinkWant) -> None:
        try:
            fds = self._server.shared(want.memory_key)
        except KvdError as e:
            self._frames.send(encode(LinkMemory(want.seq, False, e.code, e.detail[:500])))
            return
        while True:
            part, fds = fds[:FDS_PER_FRAME], fds[FDS_PER_FRAME:]
            if not self._frames.send(encode(LinkMemory(want.seq, bool(fds))), part):
                for fd in fds:
                    with contextlib.suppress(OSError):
                        os.close(fd)
                return
            if not fds:
                return

    def _on_end(self, end: End, detail: str) -> None:
        self._break(str(end), detail, foreign=end is not End.EOF)

    def _break(self, reason: str, detail: str, *, foreign: bool = True) -> None:
        self._timer.cancel()
        self._frames.close()
        self._server.ended(self, reason, detail, foreign=foreign)
