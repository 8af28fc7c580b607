"""Structured logs on stderr: JSON for machines, columns for people, one line an event.

What libraries log through the standard module takes the same way. Lines are written by a thread
behind a bounded queue, so that a reader of stderr that has stopped never stops the event loop;
lines that do not fit are counted, and the count is logged once there is room again.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, Literal, TextIO

import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

LogFormat = Literal["auto", "json", "console"]

QUEUE_LINES = 10_000
CLOSE_TIMEOUT_S = 2.0
MAX_KINDS = 256

_bound: dict[str, object] = {}
_installed: LineHandler | None = None


class LineHandler(logging.Handler):
    """Formats where it is called, and writes from a thread of its own."""

    def __init__(self, stream: TextIO, queue_lines: int = QUEUE_LINES) -> None:
        super().__init__()
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(queue_lines)
        self._closing = threading.Event()
        self.dropped = 0
        """Lines that did not fit, in all. Counted under the handler's own lock."""
        self._reported = 0
        self._thread = threading.Thread(target=self._write, name="kvd-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues one line; never waits, never raises."""
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped += 1

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            # stderr may be closed, or its reader gone: then there is nobody left to tell.
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(f"{line}\n")
                if self._lines.empty():
                    self._report()
                    self._stream.flush()
        with contextlib.suppress(OSError, ValueError):
            self._report()
            self._stream.flush()

    def _report(self) -> None:
        total = self.dropped
        if total == self._reported:
            return
        # Not through the queue, where this line could be lost as well.
        record = logging.LogRecord(
            "kvd.logging", logging.WARNING, __file__, 0, "log_lines_dropped", None, None
        )
        record.count = total - self._reported
        self._stream.write(f"{self.format(record)}\n")
        self._reported = total

    def close(self) -> None:
        """Writes what is queued, for at most CLOSE_TIMEOUT_S. Harmless when repeated."""
        super().close()
        if self._closing.is_set():
            return
        self._closing.set()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        try:
            self._lines.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))


def setup(
    log_format: LogFormat = "auto",
    level: str = "info",
    *,
    stream: TextIO | None = None,
    queue_lines: int = QUEUE_LINES,
) -> None:
    """Sends structlog's and the standard module's events to `stream` (stderr).

    `auto` is console on a terminal and json elsewhere. May be called again: the latest wins.
    """
    global _installed
    shutdown()
    out = sys.stderr if stream is None else stream
    console = log_format == "console" or (log_format == "auto" and out.isatty())
    shared: list[Processor] = [
        _add_bound,
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    renderer: list[Processor]
    if console:
        renderer = [
            structlog.dev.ConsoleRenderer(
                colors=out.isatty(),
                # The default one shows local variables, and with them other people's prompts.
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
    else:
        renderer = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=str),
        ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.stdlib.PositionalArgumentsFormatter(),
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = LineHandler(out, queue_lines)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
        )
    )
    root = logging.getLogger()
    for other in root.handlers[:]:
        root.removeHandler(other)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    # These tell of every request and every selector; only their warnings concern an operator.
    for noisy in ("asyncio", "aiohttp"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
    _installed = handler
    atexit.register(shutdown)


def shutdown() -> None:
    """Writes what is queued and ends the writing thread, within CLOSE_TIMEOUT_S."""
    global _installed
    atexit.unregister(shutdown)
    if _installed is None:
        return
    handler, _installed = _installed, None
    logging.getLogger().removeHandler(handler)
    handler.close()
    logging.captureWarnings(False)
    structlog.reset_defaults()


def bind(**fields: object) -> None:
    """Adds fields to every line of this process from now on, of all threads (`daemon_id`)."""
    _bound.update(fields)


def unbind(*names: str) -> None:
    """Takes fields of `bind` away again; unknown ones are ignored."""
    for name in names:
        _bound.pop(name, None)


def _add_bound(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    for name, value in _bound.items():
        event.setdefault(name, value)
    return event


class OncePerKind:
    """Logs the first event of each kind, and again only after `every_s`, with how many it kept.

    At most `max_kinds` kinds are remembered; those beyond share one.
    """

    def __init__(
        self,
        logger: Any,
        *,
        every_s: float = float("inf"),
        max_kinds: int = MAX_KINDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._every_s = every_s
        self._max_kinds = max_kinds
        self._clock = clock
        self._kinds: dict[Hashable, tuple[float, int]] = {}

    def log(self, level: str, kind: Hashable, event: str, **fields: object) -> bool:
        """Logs `event`, or only counts it; says whether it logged."""
        if kind not in self._kinds and len(self._kinds) >= self._max_kinds:
            kind = _OTHER
        now = self._clock()
        last, kept = self._kinds.get(kind, (None, 0))
        if last is not None and now - last < self._every_s:
            self._kinds[kind] = (last, kept + 1)
            return False
        self._kinds[kind] = (now, 0)
        if kept:
            fields["suppressed"] = kept
        getattr(self._logger, level)(event, **fields)
        return True

    def warning(self, kind: Hashable, event: str, **fields: object) -> bool:
        """`log` at level warning."""
        return self.log("warning", kind, event, **fields)


_OTHER = object()
