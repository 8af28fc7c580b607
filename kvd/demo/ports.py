"""Ports for servers that cannot report which one the system gave them."""

from __future__ import annotations

import random
import socket
from types import TracebackType

LOW, HIGH = 20_000, 30_000  # below the range from which the kernel takes ports for connections


class Ports:
    """Reserves loopback ports for as long as it is open.

    A reserved port stays bound, without listening, with SO_REUSEADDR: a server that sets that
    option too (vLLM and the router do) can bind and listen, anybody who looks for a free port
    without it cannot.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def __enter__(self) -> Ports:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives all of them back."""
        for held in self._held:
            held.close()

    def reserve(self) -> int:
        """A port that nobody uses. Raises OSError when none is found."""
        for _ in range(200):
            port = random.randint(LOW, HIGH)
            try:
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
                held = socket.socket()
                held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                held.bind(("127.0.0.1", port))
            except OSError:
                continue
            self._held.append(held)
            return port
        raise OSError(f"no free port on 127.0.0.1 between {LOW} and {HIGH}")
