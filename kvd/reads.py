"""What peers were sent under which ticket, told from the data server's threads to the core."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from kvd.core.events import Event, TicketRead


class Reads:
    """However many requests its threads serve, each open ticket waits here once."""

    def __init__(self, feed: Callable[[Event], None]) -> None:
        """Make it on the loop; `feed` is called there."""
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._tickets: dict[bytes, None] = {}

    def note(self, ticket: bytes) -> None:
        """A request under the ticket was served; from any thread, while the loop is there."""
        with self._lock:
            first = not self._tickets
            self._tickets[ticket] = None
        if first:
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        with self._lock:
            tickets, self._tickets = self._tickets, {}
        for ticket in tickets:
            self._feed(TicketRead(ticket))
