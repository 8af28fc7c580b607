"""A daemon of which every callback on its loop is measured: `python -m ... serve ...`.

A callback that uses more than `CPU_S` of its thread's CPU time, or that is seen blocked in a system
call for longer than `BLOCKED_S`, is a line of JSON in the file that `REPORT` names. CPU time is the
thread's own, so a busy machine finds nobody guilty; waits for a futex are left out of the second
kind up to `LOCKED_S`, since that is also how a thread waits for the interpreter's lock.

Seen are all callbacks that go through the loop's own methods: steps of tasks, futures, timers,
readers and writers, and what other threads hand over. Not seen are protocols of uvloop's own
transports (HTTP requests), which it calls by itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from contextvars import Context
from pathlib import Path
from typing import Any

import uvloop

from kvd.lifecycle import DiscoveryFile

REPORT = "KVD_TEST_LOOP_REPORT"
CPU_S = 0.05
SAMPLE_S = 0.01
BLOCKED_S = 0.02
LOCKED_S = 1.0
FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine(), "")


class Watch:
    """Runs callbacks one after the other, and watches from a thread of its own."""

    def __init__(self, report: Path) -> None:
        self._report = report
        self._running: tuple[int, Callable[..., object]] | None = None
        self._count = 0
        self.armed = True
        self._syscall = Path(f"/proc/self/task/{threading.get_native_id()}/syscall")
        self._syscall.read_text()  # where this cannot be read, nothing would ever be seen
        threading.Thread(target=self._sample, name="watch", daemon=True).start()

    def run(self, callback: Callable[..., object], *arguments: object) -> object:
        # Or it is a callback of the loop's own, from within another.
        if not self.armed or self._running is not None:
            return callback(*arguments)
        self._count += 1
        self._running = (self._count, callback)
        before = time.thread_time()
        try:
            return callback(*arguments)
        finally:
            used = time.thread_time() - before
            self._running = None
            if used > CPU_S:
                self._found("cpu", callback, used)

    def _sample(self) -> None:
        seen: tuple[int, str] | None = None
        since = 0.0
        told = 0
        last = time.monotonic()
        while True:
            time.sleep(SAMPLE_S)
            slept, last = time.monotonic() - last, time.monotonic()
            if slept > 10 * SAMPLE_S:
                # The process was stopped, or got no CPU: what was seen before says nothing.
                seen = None
                continue
            running = self._running
            where = self._syscall.read_text().partition(" ")[0].strip()
            if running is None or running is not self._running or where in ("running", "-1"):
                seen = None
                continue
            now = time.monotonic()
            if seen != (running[0], where):
                seen, since = (running[0], where), now
                continue
            limit = LOCKED_S if where == FUTEX else BLOCKED_S
            if now - since > limit and told != running[0]:
                told = running[0]
                self._found(f"blocked in system call {where}", running[1], now - since)

    def _found(self, what: str, callback: Callable[..., object], seconds: float) -> None:
        whose = getattr(callback, "__self__", None)
        name = repr(whose) if isinstance(whose, asyncio.Task) else repr(callback)
        line = json.dumps({"what": what, "seconds": round(seconds, 4), "callback": name[:600]})
        with self._report.open("a") as out:
            out.write(line + "\n")


class WatchedLoop(uvloop.Loop):
    """The loop that daemons run on, with each callback handed to a `Watch`."""

    watch: Watch

    def _through(self, callback: Callable[..., object]) -> tuple[Callable[..., object], ...]:
        ours = getattr(callback, "__self__", None) is self.watch
        return (callback,) if ours else (self.watch.run, callback)

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> Any:  # type: ignore[override]
        return super().call_soon(*self._through(callback), *args, context=context)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        return super().call_soon_threadsafe(*self._through(callback), *args, context=context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        return super().call_later(delay, *self._through(callback), *args, context=context)

    def add_reader(self, fd: Any, callback: Any, *args: Any) -> Any:  # type: ignore[override]
        return super().add_reader(fd, *self._through(callback), *args)

    def add_writer(self, fd: Any, callback: Any, *args: Any) -> Any:  # type: ignore[override]
        return super().add_writer(fd, *self._through(callback), *args)


def install(report: Path) -> Watch:
    """From here on `uvloop.new_event_loop` makes watched loops, for the thread that calls this."""
    watch = Watch(report)

    def new_event_loop() -> WatchedLoop:
        loop = WatchedLoop()
        loop.watch = watch
        return loop

    uvloop.new_event_loop = new_event_loop
    return watch


def serve_watched(report: Path) -> None:
    """Watch a daemon while it serves: before that it imports, after that it closes its sockets, and
    nobody waits for it."""
    watch = install(report)
    watch.armed = False
    write, remove = DiscoveryFile.write, DiscoveryFile.remove

    def written(self: DiscoveryFile, content: dict[str, Any]) -> None:
        write(self, content)
        watch.armed = True

    def removed(self: DiscoveryFile) -> None:
        watch.armed = False
        remove(self)

    DiscoveryFile.write = written  # type: ignore[method-assign]
    DiscoveryFile.remove = removed  # type: ignore[method-assign]


if __name__ == "__main__":
    from kvd.cli import main

    if os.environ.get("KVD_REEXEC"):  # else this process is about to be replaced by itself
        serve_watched(Path(os.environ[REPORT]))
    sys.exit(main(sys.argv[1:]))
