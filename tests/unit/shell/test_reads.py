"""What the data server's threads tell the core of their reads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from kvd.core.events import Event, TicketRead
from kvd.reads import Reads


async def test_threads_tell_each_ticket_once_until_the_loop_has_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard: list[tuple[Event, int]] = []
    loop = asyncio.get_running_loop()
    calls: list[Callable[[], None]] = []
    monkeypatch.setattr(loop, "call_soon_threadsafe", calls.append)
    reads = Reads(lambda event: heard.append((event, threading.get_ident())))

    def serve() -> None:
        for _ in range(1000):
            reads.note(b"one")
            reads.note(b"two")

    # The loop stands still meanwhile.
    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert heard == []
    # Nothing piles up for the loop, whatever the threads do.
    [call] = calls
    call()
    here = threading.get_ident()
    assert heard == [(TicketRead(b"one"), here), (TicketRead(b"two"), here)]
    reads.note(b"one")
    calls[1]()
    assert heard[2:] == [(TicketRead(b"one"), here)]
