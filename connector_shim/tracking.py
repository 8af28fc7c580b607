"""Which offers, fetches and notifications are outstanding, and that each is told ended once.

    offer   -- open_offer -->  HELD     -- end_offer -->                    ended
    fetch   -- open_fetch -->  RUNNING  -- cancel_fetch -->  CANCELLING
                               RUNNING, CANCELLING  -- fetch_done, fail_fetches -->  ended
    notify  -- open_notify --> ASKED    -- notify_done, fail_notifies -->   ended

"ended" produces exactly one event and forgets the entry. Whatever the daemon says about an entry
that is not there is counted (`late` if it ended here before, `unknown` otherwise) and dropped.
An offer's fence word is dropped before its event exists, so nobody can learn of the end while
the blocks can still be read. Pure: time comes as an argument, no sockets.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from connector_shim.errors import ClientError
from connector_shim.events import Event
from connector_shim.fence import FenceTable
from kvd.protocol.codes import Code
from kvd.protocol.local import FetchDone, NotifyDone, OfferEnded
from kvd.protocol.types import NULL_BLOCK, Stages

OfferKey = tuple[str, int]
"""(transfer_id, generation)"""

_NULL = NULL_BLOCK.to_bytes(4, "little")


@dataclass(slots=True)
class _Offer:
    lease_s: float
    expires_at: float


@dataclass(slots=True)
class _Fetch:
    blocks: tuple[bytes, ...]
    overdue_at: float
    cancelling: bool = False


class Tracker:
    """`remembered`: how many ended ids are kept, to tell a late message from an unknown one."""

    def __init__(
        self,
        *,
        max_fetches: int = 4_096,
        max_notifies: int = 4_096,
        notify_timeout_s: float = 30.0,
        fetch_grace_s: float = 30.0,
        remembered: int = 8_192,
    ) -> None:
        self.fence: FenceTable | None = None
        self.counts: Counter[str] = Counter()
        self._max_fetches = max_fetches
        self._max_notifies = max_notifies
        self._notify_timeout_s = notify_timeout_s
        self._fetch_grace_s = fetch_grace_s
        self._offers: dict[OfferKey, _Offer] = {}
        self._fetches: dict[str, _Fetch] = {}
        self._notifies: deque[tuple[float, str, str]] = deque()
        self._ended: dict[OfferKey | str, None] = {}
        self._remembered = remembered
        self._next_overdue = float("inf")
        self._events: list[Event] = []

    # --- what is outstanding -------------------------------------------------------------------

    @property
    def offers(self) -> tuple[OfferKey, ...]:
        return tuple(self._offers)

    @property
    def fetches(self) -> tuple[str, ...]:
        return tuple(self._fetches)

    @property
    def num_offers(self) -> int:
        return len(self._offers)

    @property
    def num_fetches(self) -> int:
        return len(self._fetches)

    @property
    def num_notifies(self) -> int:
        return len(self._notifies)

    def tell(self, event: Event) -> None:
        self._events.append(event)

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # --- offers --------------------------------------------------------------------------------

    def open_offer(self, key: OfferKey, now: float, lease_s: float) -> tuple[int, int]:
        """Arms the fence; returns (slot, word).

        Raises ClientError: DUPLICATE for a generation that is or was offered, OVERLOADED when the
        fence table is full, NOT_REGISTERED without one.
        """
        if self.fence is None:
            raise ClientError(Code.NOT_REGISTERED, "no memory was described")
        if key in self._ended:
            # What the daemon still has to say about the first would end the second.
            raise ClientError(
                Code.DUPLICATE, f"transfer {key[0]!r} generation {key[1]} was offered before"
            )
        armed = self.fence.arm(*key)
        self._offers[key] = _Offer(lease_s, now + lease_s)
        return armed

    def holds(self, key: OfferKey) -> bool:
        return key in self._offers

    def forget_offer(self, key: OfferKey) -> None:
        """Undoes `open_offer` for an offer of which the daemon never heard: no event."""
        del self._offers[key]
        self._drop(key)

    def touch_offer(self, key: OfferKey, now: float) -> bool:
        """The producer worked on it: its lease starts again. False if it is not held."""
        offer = self._offers.get(key)
        if offer is None:
            return False
        offer.expires_at = now + offer.lease_s
        return True

    def end_offer(self, key: OfferKey, reason: str) -> bool:
        """False, and counted, if it is not held (any more)."""
        if self._offers.pop(key, None) is None:
            self._count_stray("offer", key)
            return False
        self._drop(key)
        self._remember(key)
        self._events.append(OfferEnded(transfer_id=key[0], generation=key[1], reason=reason))
        return True

    def end_all_offers(self, reason: str) -> int:
        # All words first: the events make blocks free, and one barrier does for all of them.
        if self.fence is not None:
            self.fence.drop_all()
        keys = list(self._offers)
        for key in keys:
            self.end_offer(key, reason)
        return len(keys)

    def expire_offers(self, now: float) -> list[OfferKey]:
        """Ends those whose lease has passed. Only for while the daemon, who keeps it, is silent."""
        due = [key for key, offer in self._offers.items() if offer.expires_at <= now]
        for key in due:
            self.end_offer(key, Code.EXPIRED)
        return due

    def _drop(self, key: OfferKey) -> None:
        if self.fence is not None:
            self.fence.drop(*key)

    # --- fetches -------------------------------------------------------------------------------

    def check_fetch(self, fetch_id: str) -> None:
        """Raises ClientError: DUPLICATE for an id that is or was in use, OVERLOADED when full."""
        if fetch_id in self._fetches or fetch_id in self._ended:
            raise ClientError(Code.DUPLICATE, f"fetch id {fetch_id!r} was used before")
        if len(self._fetches) >= self._max_fetches:
            raise ClientError(Code.OVERLOADED, f"{self._max_fetches} fetches are in flight already")

    def open_fetch(
        self, fetch_id: str, blocks: tuple[bytes, ...], now: float, deadline_s: float
    ) -> None:
        """`blocks`: packed destination ids of each group."""
        self.check_fetch(fetch_id)
        overdue_at = now + deadline_s + self._fetch_grace_s
        self._fetches[fetch_id] = _Fetch(blocks, overdue_at)
        self._next_overdue = min(self._next_overdue, overdue_at)

    def cancel_fetch(self, fetch_id: str) -> bool:
        """True if the daemon has to be told: it runs, and was not cancelled before."""
        fetch = self._fetches.get(fetch_id)
        if fetch is None or fetch.cancelling:
            return False
        fetch.cancelling = True
        return True

    def fetch_done(self, message: FetchDone) -> bool:
        fetch = self._fetches.pop(message.fetch_id, None)
        if fetch is None:
            self._count_stray("fetch", message.fetch_id)
            return False
        self._remember(message.fetch_id)
        self._events.append(self._sane(message, fetch))
        return True

    def fail_fetches(self, code: Code, detail: str) -> int:
        """Only once it is certain that no byte can land in their blocks any more."""
        fetches, self._fetches = self._fetches, {}
        for fetch_id, fetch in fetches.items():
            self._remember(fetch_id)
            self._events.append(_failed(fetch_id, fetch, code, detail))
        return len(fetches)

    def overdue(self, now: float) -> str | None:
        """A fetch whose end the daemon should have told long ago."""
        if now < self._next_overdue:
            return None
        self._next_overdue = float("inf")
        for fetch_id, fetch in self._fetches.items():
            if fetch.overdue_at <= now:
                self._next_overdue = fetch.overdue_at
                return fetch_id
            self._next_overdue = min(self._next_overdue, fetch.overdue_at)
        return None

    def _sane(self, message: FetchDone, fetch: _Fetch) -> FetchDone:
        """An end that contradicts itself, or does not fit the blocks, fails all of them."""
        sizes = [(len(blocks) // 4 + 7) // 8 for blocks in fetch.blocks]
        fits = [len(bitmap) for bitmap in message.bad] == sizes
        succeeded = message.code == Code.OK
        if succeeded and not any(map(any, message.bad)) and (fits or not message.bad):
            return message
        if not succeeded and fits:
            return message
        self.counts["fetch_rewritten"] += 1
        if succeeded:
            return _failed(message.fetch_id, fetch, Code.INTERNAL, "the daemon's manifest is wrong")
        code = Code(message.code) if message.code in set(Code) else Code.INTERNAL
        return _failed(message.fetch_id, fetch, code, message.detail)

    # --- notifications (Release, Renew) --------------------------------------------------------

    def check_notify(self) -> None:
        """Raises ClientError OVERLOADED when too many are unanswered."""
        if len(self._notifies) >= self._max_notifies:
            raise ClientError(
                Code.OVERLOADED, f"{self._max_notifies} notifications are unanswered already"
            )

    def open_notify(self, transfer_id: str, what: str, now: float) -> None:
        self._notifies.append((now + self._notify_timeout_s, transfer_id, what))

    def notify_done(self, message: NotifyDone) -> bool:
        for index, (_, transfer_id, what) in enumerate(self._notifies):
            if transfer_id == message.transfer_id and what == message.what:
                del self._notifies[index]
                self._events.append(message)
                return True
        self.counts["notify_unknown"] += 1
        return False

    def fail_notifies(self, code: Code) -> None:
        notifies, self._notifies = self._notifies, deque()
        self._events.extend(NotifyDone(tid, what, code) for _, tid, what in notifies)

    def expire_notifies(self, now: float) -> None:
        while self._notifies and self._notifies[0][0] <= now:
            _, transfer_id, what = self._notifies.popleft()
            self._events.append(NotifyDone(transfer_id, what, Code.DEADLINE))

    # --- strays --------------------------------------------------------------------------------

    def new_session(self) -> None:
        """Nothing that an earlier connection ended can be late on this one."""
        self._ended.clear()

    def _remember(self, key: OfferKey | str) -> None:
        self._ended[key] = None
        if len(self._ended) > self._remembered:
            del self._ended[next(iter(self._ended))]

    def _count_stray(self, kind: str, key: OfferKey | str) -> None:
        self.counts[f"{kind}_late" if key in self._ended else f"{kind}_unknown"] += 1


def _failed(fetch_id: str, fetch: _Fetch, code: Code, detail: str) -> FetchDone:
    return FetchDone(
        fetch_id=fetch_id,
        code=code,
        detail=detail,
        generation=0,
        bad=[_all_bad(blocks) for blocks in fetch.blocks],
        tokens=0,
        nbytes=0,
        transport="",
        stages=Stages(),
    )


def _all_bad(blocks: bytes) -> bytes:
    """A bitmap of all blocks that are really there."""
    bitmap = bytearray((len(blocks) // 4 + 7) // 8)
    for index in range(len(blocks) // 4):
        if blocks[4 * index : 4 * index + 4] != _NULL:
            bitmap[index // 8] |= 1 << index % 8
    return bytes(bitmap)


def bad_indices(bitmap: bytes) -> list[int]:
    """Block indices whose bit is set in one group's bitmap of `FetchDone.bad`."""
    return [
        8 * byte + bit for byte, value in enumerate(bitmap) for bit in range(8) if value >> bit & 1
    ]
