"""The calls of an engine that fetches KV."""

from __future__ import annotations

from collections.abc import Sequence

from connector_shim.calls import Calls
from connector_shim.errors import ClientError
from connector_shim.frames import DIGEST_SIZE, fetch_frames
from connector_shim.wire import encode
from kvd.protocol import local
from kvd.protocol.codes import Code
from kvd.protocol.types import PeerAddr


class ConsumerCalls(Calls):
    """Part of `Client`."""

    _fetch_prefix: str
    _fetch_count: int

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
        traceparent: str = "",
        sole: bool = False,
    ) -> str:
        """Asks for tokens `[start, end)` into these blocks; returns the fetch's id.

        `blocks[g][0]` is group g's block that holds token `start`; `remote` is the producer's
        daemon, `engine_id` the producer. The blocks belong to the daemon until FetchDone. With
        `sole`, for who knows of no other fetch of this transfer, the producer's blocks are free
        once this one has come through. Otherwise its daemon holds them for `release_linger_s`,
        for other fetches to come. Raises ClientError and changes nothing: DAEMON_GONE, DRAINING,
        NOT_REGISTERED, OVERLOADED, DUPLICATE, BAD_MEMORY, BAD_MESSAGE.
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
            traceparent=traceparent,
            sole=sole,
        )
        welcome = self._session.welcome
        assert welcome is not None
        self._session.push(fetch_frames(message, packed, minor=welcome.proto_minor))
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
        self._check_connected()
        frame = encode(message)
        self._tracker.check_notify()
        self._session.push([frame])
        self._tracker.open_notify(message.transfer_id, what, self._clock())
