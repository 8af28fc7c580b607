"""`kvd serve` with a copy thread that can be made to hang: SIGUSR1 hangs it, SIGUSR2 lets it go."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable

from kvd.cli import main
from kvd.transport import registry
from kvd.transport.copy_pool import CopyPool


class Stuck:
    """Work whose only batch waits for as long as it is told."""

    owner = -1

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self._batches = [self.go_on.wait]

    def next_batch(self) -> Callable[[], object] | None:
        return self._batches.pop() if self._batches else None

    def finish(self) -> None:
        pass


class Pool(CopyPool):
    """The daemon's own, within reach."""

    made: CopyPool | None = None

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        Pool.made = self


def serve() -> int:
    setattr(registry, "CopyPool", Pool)  # noqa: B010 - seen by nobody else
    stuck: list[Stuck] = []

    def hang(*_: object) -> None:
        assert Pool.made is not None
        stuck.append(Stuck())
        Pool.made.submit(stuck[-1])  # type: ignore[arg-type]

    signal.signal(signal.SIGUSR1, hang)
    signal.signal(signal.SIGUSR2, lambda *_: stuck.pop().go_on.set())
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(serve())
