"""The engine's end of kvd: register memory, offer it, fetch into it, and hear how that ended.

Synchronous and without threads: nothing happens but inside a call, and no call waits unless it
has a timeout. Call `poll` often (an engine: each step); it connects, reconnects, sends, reads and
watches the daemon. Not thread-safe.
"""

from __future__ import annotations

import fcntl
import secrets
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Literal, Self

from connector_shim.errors import ClientError
from connector_shim.events import Event
from connector_shim.fence import FenceTable
from connector_shim.frames import (
    DIGEST_SIZE,
    digest_frames,
    fetch_frames,
    offer_block_frames,
    pack_blocks,
    registration_frames,
)
from connector_shim.memory import MemoryDescription
from connector_shim.paths import resolve_socket
from connector_shim.session import Phase, Session
from connector_shim.tracking import OfferKey, Tracker
from connector_shim.wire import Frame, encode
from kvd.protocol import local
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr, Rank, Role
from kvd.protocol.version import PROTO_MAJOR, PROTO_MINOR

ClientState = Literal["down", "connecting", "registering", "up", "draining"]


class Client:
    """One engine rank's connection to its daemon.

    `path`: the daemon's socket (`{local_rank}` is replaced); None looks at KVD_SOCKET, /run/kvd,
    $XDG_RUNTIME_DIR/kvd and /tmp/kvd-$UID, at each attempt to connect anew. `epoch` is new at
    each start of the engine. `daemon_hang_s`: a daemon that is silent for so long is given up,
    and killed if fetches are out that it might still be writing. `fence_slots` bounds the offers,
    `max_fetches` the fetches, `max_queue_frames` and `max_queue_bytes` what waits for the socket.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        engine_id: str,
        epoch: int | None = None,
        rank: Rank = Rank(),  # noqa: B008 - frozen
        role: Role = "both",
        client: str = "connector_shim",
        local_rank: int = 0,
        connect_timeout_s: float = 5.0,
        daemon_hang_s: float = 10.0,
        fence_slots: int = 16_384,
        max_fetches: int = 4_096,
        max_queue_frames: int = 4_096,
        max_queue_bytes: int = 16 * 2**20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine_id = engine_id
        self.epoch = time.time_ns() if epoch is None else epoch
        self.rank = rank
        self.role = role
        self._name = client
        self._path = path
        self._local_rank = local_rank
        self._fence_slots = fence_slots
        self._clock = clock
        self._memory: MemoryDescription | None = None
        self._registration: list[Frame] | None = None
        self._closed = False
        self._fetch_prefix = secrets.token_hex(6)
        self._fetch_count = 0
        resolve_socket(path, local_rank=local_rank)
        self._tracker = Tracker(max_fetches=max_fetches)
        self._session = Session(
            tracker=self._tracker,
            find_path=lambda: resolve_socket(self._path, local_rank=self._local_rank),
            hello=self._hello,
            registration=lambda: self._registration,
            connect_timeout_s=connect_timeout_s,
            daemon_hang_s=daemon_hang_s,
            max_frames=max_queue_frames,
            max_bytes=max_queue_bytes,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    # --- state ---------------------------------------------------------------------------------

    @property
    def state(self) -> ClientState:
        """`up` takes offers and fetches; `draining` finishes those that it has."""
        match self._session.phase:
            case Phase.GREETING:
                return "connecting"
            case Phase.REGISTERING:
                return "registering"
            case Phase.UP:
                return "draining" if self._session.draining else "up"
            case _:
                return "down"

    @property
    def welcome(self) -> local.Welcome | None:
        """What the daemon said of itself last (its address for peers, its boot id)."""
        return self._session.welcome

    @property
    def last_error(self) -> ClientError | None:
        """Why there is no connection, or None while there is one."""
        return self._session.last_error

    @property
    def fence(self) -> FenceTable | None:
        """The fence table, once memory is described."""
        return self._tracker.fence

    @property
    def offers(self) -> tuple[OfferKey, ...]:
        """(transfer_id, generation) of every offer whose end was not told yet."""
        return self._tracker.offers

    @property
    def fetches(self) -> tuple[str, ...]:
        """Ids of every fetch whose end was not told yet."""
        return self._tracker.fetches

    def statistics(self) -> dict[str, int]:
        """Counters since the start (late and unknown messages, kills, ...) and present sizes."""
        return {
            **self._tracker.counts,
            "offers": self._tracker.num_offers,
            "fetches": self._tracker.num_fetches,
            "notifies": self._tracker.num_notifies,
            "queued": self._session.queued(),
        }

    def fileno(self) -> int | None:
        """The socket, to wait on with others; it changes at each reconnect."""
        return self._session.fileno()

    # --- memory --------------------------------------------------------------------------------

    def describe(self, memory: MemoryDescription) -> None:
        """Sets the engine's KV memory, once; it is registered at each connection from then on.

        The descriptors are duplicated: `memory` may be closed. Raises ClientError: DUPLICATE at
        a second call, UNSUPPORTED where no fence table is possible, BAD_MESSAGE if the geometry
        does not fit into a frame.
        """
        self._check_open()
        if self._memory is not None:
            raise ClientError(Code.DUPLICATE, "the memory was described already")
        fence = FenceTable(self._fence_slots)
        own = [replace(s, fd=_dup(s.fd)) if s.fd >= 0 else s for s in memory.segments]
        memory = replace(memory, segments=tuple(own))
        try:
            self._registration = registration_frames(memory, fence)
        except ClientError:
            memory.close()
            fence.close()
            raise
        self._memory = memory
        self._tracker.fence = fence
        self._session.register()

    # --- progress ------------------------------------------------------------------------------

    def poll(self, timeout: float = 0.0) -> list[Event]:
        """Does what can be done, and returns what happened; waits at most `timeout` seconds for
        something to happen. Each end of an offer or fetch is returned once, and never before no
        reader (of an offer) or writer (of a fetch) is left. Never raises for what a daemon does.
        """
        if self._closed:
            return []
        give_up_at = self._clock() + timeout
        while True:
            now = self._clock()
            self._session.advance(now)
            events = self._tracker.take_events()
            if events or now >= give_up_at:
                return events
            self._wait(min(give_up_at - now, self._session.wake_after(now)))

    def wait_up(self, timeout: float) -> None:
        """Returns once the daemon takes offers and fetches. Events are kept for `poll`.

        For scripts; an engine polls. Raises ClientError after `timeout` seconds, saying why not.
        """
        self._check_open()
        give_up_at = self._clock() + timeout
        while True:
            now = self._clock()
            self._session.advance(now)
            if self.state == "up":
                return
            if now >= give_up_at:
                raise self._unusable()
            self._wait(min(give_up_at - now, self._session.wake_after(now)))

    def _wait(self, seconds: float) -> None:
        poller = select.poll()
        for fd, writing in self._session.filenos():
            poller.register(fd, select.POLLIN | (select.POLLOUT if writing else 0))
        poller.poll(max(1, int(seconds * 1000)))

    # --- producer ------------------------------------------------------------------------------

    def offer(
        self,
        transfer_id: str,
        generation: int,
        *,
        blocks: Sequence[Sequence[int]] = (),
        digests: Mapping[int, bytes] | None = None,
        tokens: int | None = None,
        lease_s: float,
    ) -> None:
        """Promises that these blocks hold KV of the transfer, until OfferEnded or `revoke`.

        `blocks[g]`: group g's block table from its start, `digests`: 16 bytes for each token
        position. With `tokens` all layers are valid for `[0, tokens)` now and nothing will follow;
        without, `extend` and `seal` say so later. `lease_s`: how long it is held for a consumer.
        Raises ClientError and changes nothing: DAEMON_GONE, DRAINING, NOT_REGISTERED, OVERLOADED,
        DUPLICATE, BAD_MEMORY, BAD_MESSAGE.
        """
        self._check_usable()
        packed = self._pack(blocks)
        key = (transfer_id, generation)
        slot, word = self._tracker.open_offer(key, self._clock(), lease_s)
        try:
            frames = [
                encode(
                    local.Offer(
                        transfer_id=transfer_id,
                        generation=generation,
                        slot=slot,
                        word=word,
                        lease_s=lease_s,
                    )
                )
            ]
            for group, part in enumerate(packed):
                frames += offer_block_frames(transfer_id, generation, group, 0, part)
            frames += digest_frames(transfer_id, generation, digests or {})
            if tokens is not None:
                frames.append(encode(local.Seal(transfer_id, generation, tokens)))
            self._session.push(frames)
        except BaseException:
            self._tracker.forget_offer(key)
            raise

    def extend_blocks(
        self, transfer_id: str, generation: int, *, group: int, first: int, blocks: Sequence[int]
    ) -> bool:
        """More of group's block table, from index `first` on. False if the offer has ended."""
        packed = pack_blocks(blocks, group=group, num_blocks=self._num_blocks())
        frames = offer_block_frames(transfer_id, generation, group, first, packed)
        return self._say(transfer_id, generation, frames)

    def extend_digests(
        self, transfer_id: str, generation: int, digests: Mapping[int, bytes]
    ) -> bool:
        """More digests, by token position. False if the offer has ended."""
        return self._say(transfer_id, generation, digest_frames(transfer_id, generation, digests))

    def extend(
        self,
        transfer_id: str,
        generation: int,
        *,
        tokens: int,
        first_layer: int = 0,
        num_layers: int = 0,
    ) -> bool:
        """Tokens `[0, tokens)` are valid in these layers (0 layers: in all). False if it ended."""
        message = local.Extend(transfer_id, generation, tokens, first_layer, num_layers)
        return self._say(transfer_id, generation, [encode(message)])

    def seal(self, transfer_id: str, generation: int, *, tokens: int) -> bool:
        """All layers are valid for `[0, tokens)`, and no more comes. False if it has ended."""
        return self._say(
            transfer_id, generation, [encode(local.Seal(transfer_id, generation, tokens))]
        )

    def revoke(self, transfer_id: str, generation: int) -> bool:
        """Takes an offer back: when this returns, its blocks may be written. False if it ended.

        OfferEnded (revoked) is told by the next `poll`.
        """
        if not self._tracker.holds((transfer_id, generation)):
            return False
        self._tracker.end_offer((transfer_id, generation), Code.REVOKED)
        if self._session.usable:
            self._session.push([encode(local.Revoke(transfer_id, generation))], urgent=True)
        return True

    def revoke_all(self) -> int:
        """`revoke` of every offer; returns how many there were."""
        count = self._tracker.end_all_offers(Code.REVOKED)
        if count and self._session.usable:
            self._session.push([encode(local.RevokeAll())], urgent=True)
        return count

    def _say(self, transfer_id: str, generation: int, frames: Sequence[Frame]) -> bool:
        if not self._tracker.touch_offer((transfer_id, generation), self._clock()):
            return False
        self._session.push(frames)
        return True

    # --- consumer ------------------------------------------------------------------------------

    def fetch(
        self,
        transfer_id: str,
        *,
        remote: PeerAddr,
        engine_id: str,
        start: int,
        end: int,
        blocks: Sequence[Sequence[int]],
        digest: bytes,
        generation: int | None = None,
        deadline_s: float,
        park_s: float,
        fetch_id: str | None = None,
    ) -> str:
        """Asks for tokens `[start, end)` into these blocks; returns the fetch's id.

        `blocks[g][0]` is group g's block that holds token `start`; `remote` is the producer's
        daemon, `engine_id` the producer. The blocks belong to the daemon until FetchDone. Raises
        ClientError and changes nothing: DAEMON_GONE, DRAINING, NOT_REGISTERED, OVERLOADED,
        DUPLICATE, BAD_MEMORY, BAD_MESSAGE.
        """
        self._check_usable()
        packed = self._pack(blocks)
        if len(digest) != DIGEST_SIZE:
            raise ClientError(Code.BAD_MESSAGE, f"a digest has {DIGEST_SIZE} bytes")
        if fetch_id is None:
            self._fetch_count += 1
            fetch_id = f"{self._fetch_prefix}-{self._fetch_count}"
        self._tracker.check_fetch(fetch_id)
        message = local.Fetch(
            fetch_id=fetch_id,
            transfer_id=transfer_id,
            generation=generation,
            remote=remote,
            engine_id=engine_id,
            start=start,
            end=end,
            digest=digest,
            deadline_s=deadline_s,
            park_s=park_s,
        )
        self._session.push(fetch_frames(message, packed))
        self._tracker.open_fetch(fetch_id, packed, self._clock(), deadline_s)
        return fetch_id

    def cancel(self, fetch_id: str) -> bool:
        """Asks for the end of a fetch; FetchDone still comes. False if it ended or was asked."""
        if not self._tracker.cancel_fetch(fetch_id):
            return False
        if self._session.usable:
            self._session.push([encode(local.Cancel(fetch_id))], urgent=True)
        return True

    def release(
        self,
        transfer_id: str,
        *,
        remote: PeerAddr,
        engine_id: str,
        generation: int | None = None,
    ) -> None:
        """Tells the producer that this transfer is not needed (any more). Answer: NotifyDone.

        Raises ClientError DAEMON_GONE, NOT_REGISTERED or OVERLOADED; the producer's lease frees
        the blocks then.
        """
        self._notify("release", local.Release(transfer_id, generation, remote, engine_id))

    def renew(
        self,
        transfer_id: str,
        *,
        remote: PeerAddr,
        engine_id: str,
        generation: int | None = None,
    ) -> None:
        """Starts the producer's lease again. Answer: NotifyDone. Raises as `release` does."""
        self._notify("renew", local.Renew(transfer_id, generation, remote, engine_id))

    def _notify(self, what: str, message: local.Release | local.Renew) -> None:
        if not self._session.usable:
            raise self._unusable()
        frame = encode(message)
        self._tracker.check_notify()
        self._session.push([frame])
        self._tracker.open_notify(message.transfer_id, what, self._clock())

    # --- the end -------------------------------------------------------------------------------

    def close(self, timeout: float = 2.0) -> bool:
        """Drops every fence word, says goodbye, and waits (only if fetches are out) for the daemon
        to stop writing. True if it has: False means that the blocks of fetches must not be used
        by anyone else. Nothing is told after it; calling it again does nothing.
        """
        if self._closed:
            return True
        self._tracker.end_all_offers(Code.CANCELLED)
        now = self._clock()
        self._session.leave(now, Code.CANCELLED, "the engine closes")
        give_up_at = now + timeout
        while self._tracker.num_fetches and now < give_up_at:
            self._wait(min(give_up_at - now, self._session.wake_after(now)))
            now = self._clock()
            self._session.advance(now)
        quiet = not self._tracker.num_fetches
        self._closed = True
        self._session.drop()
        self._tracker.take_events()
        if self._tracker.fence is not None:
            self._tracker.fence.close()
        if self._memory is not None:
            self._memory.close()
        return quiet

    # --- helpers -------------------------------------------------------------------------------

    def _hello(self) -> local.Hello:
        return local.Hello(
            proto_major=PROTO_MAJOR,
            proto_minor=PROTO_MINOR,
            engine_id=self.engine_id,
            epoch=self.epoch,
            rank=self.rank,
            role=self.role,
            client=self._name,
        )

    def _check_open(self) -> None:
        if self._closed:
            raise ClientError(Code.CANCELLED, "the client is closed")

    def _check_usable(self) -> None:
        self._check_open()
        if not self._session.usable:
            raise self._unusable()
        if self._session.draining:
            raise ClientError(Code.DRAINING, "the daemon is draining and takes nothing new")

    def _unusable(self) -> ClientError:
        if self.state == "registering" and self._memory is None:
            return ClientError(Code.NOT_REGISTERED, "no memory was described yet")
        return self.last_error or ClientError(
            Code.DAEMON_GONE, f"the daemon does not take work: {self.state}"
        )

    def _num_blocks(self) -> int:
        return self._memory.num_blocks if self._memory is not None else 0

    def _pack(self, blocks: Sequence[Sequence[int]]) -> tuple[bytes, ...]:
        assert self._memory is not None
        if len(blocks) > self._memory.num_groups:
            raise ClientError(
                Code.BAD_MEMORY,
                f"{len(blocks)} groups of blocks, but the memory has {self._memory.num_groups}",
            )
        return tuple(
            pack_blocks(ids, group=group, num_blocks=self._memory.num_blocks)
            for group, ids in enumerate(blocks)
        )


def _dup(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
