"""Lines that machines and people can read, and that never stop the daemon."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

import kvd.logging as kvd_logging
from kvd.logging import OncePerKind
from tests.conftest import wait_for


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    kvd_logging.shutdown()
    kvd_logging.unbind("daemon_id", "rank")
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    kvd_logging.shutdown()
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines_carry_fields() -> None:
    out = io.StringIO()
    kvd_logging.setup("json", "info", stream=out)
    kvd_logging.bind(daemon_id="d-1")
    structlog.get_logger("kvd.x").info("fetch_done", code="ok", blob=b"\x00")
    [line] = lines(out)
    assert line["event"] == "fetch_done"
    assert line["code"] == "ok"
    assert line["daemon_id"] == "d-1"
    assert line["level"] == "info"
    assert line["logger"] == "kvd.x"
    assert line["timestamp"].endswith("Z")


def test_loggers_made_before_the_setup_follow_it() -> None:
    log = structlog.get_logger("kvd.early", session=3)
    out = io.StringIO()
    kvd_logging.setup("json", "info", stream=out)
    log.warning("late_start")
    [line] = lines(out)
    assert (line["event"], line["session"]) == ("late_start", 3)


def test_the_standard_module_takes_the_same_way() -> None:
    out = io.StringIO()
    kvd_logging.setup("json", "info", stream=out)
    kvd_logging.bind(daemon_id="d-1")
    logging.getLogger("some.library").warning("took %d s", 3, extra={"peer": "p"})
    [line] = lines(out)
    assert line["event"] == "took 3 s"
    assert (line["peer"], line["daemon_id"], line["logger"]) == ("p", "d-1", "some.library")


def test_levels() -> None:
    out = io.StringIO()
    kvd_logging.setup("json", "warning", stream=out)
    structlog.get_logger("kvd.x").info("quiet")
    logging.getLogger("lib").info("quiet")
    structlog.get_logger("kvd.x").error("loud")
    assert [line["event"] for line in lines(out)] == ["loud"]


def test_an_exception_is_one_json_line() -> None:
    out = io.StringIO()
    kvd_logging.setup("json", "info", stream=out)
    try:
        raise ValueError("inner")
    except ValueError:
        structlog.get_logger("kvd.x").exception("broken")
    [line] = lines(out)
    assert "ValueError: inner" in line["exception"]


def test_auto_is_json_where_nobody_watches() -> None:
    out = io.StringIO()
    kvd_logging.setup("auto", "info", stream=out)
    structlog.get_logger("kvd.x").info("hello")
    assert lines(out)[0]["event"] == "hello"


def test_auto_is_console_on_a_terminal_and_shows_no_local_variables() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    kvd_logging.setup("auto", "info", stream=out)
    secret = "prompt" + "-of-a-user"
    try:
        int(secret[:0])
    except ValueError:
        structlog.get_logger("kvd.x").exception("broken")
    kvd_logging.shutdown()
    text = out.getvalue()
    assert "broken" in text
    assert "ValueError" in text
    assert not text.startswith("{")
    assert secret not in text


def test_the_latest_setup_wins() -> None:
    first, second = io.StringIO(), io.StringIO()
    kvd_logging.setup("json", "info", stream=first)
    kvd_logging.setup("json", "info", stream=second)
    structlog.get_logger("kvd.x").info("once")
    assert [line["event"] for line in lines(second)] == ["once"]
    assert first.getvalue() == ""


def test_a_reader_that_stopped_holds_nobody_up() -> None:
    read_end, write_end = os.pipe()
    pipe = os.fdopen(write_end, "w")
    os.set_blocking(read_end, True)
    kvd_logging.setup("json", "info", stream=pipe, queue_lines=8)
    log = structlog.get_logger("kvd.x")
    finished = threading.Event()

    def chat() -> None:
        for i in range(500):
            log.info("chatter", number=i, padding="x" * 1000)
        finished.set()

    talker = threading.Thread(target=chat, name="talker", daemon=True)
    talker.start()
    # A pipe holds 64 KiB; were logging to wait for it, this would never be set.
    stuck = not finished.wait(20)
    received: list[bytes] = []
    drained = threading.Thread(target=lambda: received.extend(_read_all(read_end)))
    drained.start()
    talker.join(20)
    assert not stuck
    wait_for(lambda: b"log_lines_dropped" in b"".join(received), what="the count of lost lines")
    kvd_logging.shutdown()
    pipe.close()
    drained.join(10)
    os.close(read_end)
    events = [json.loads(line) for line in b"".join(received).splitlines()]
    lost = sum(e["count"] for e in events if e["event"] == "log_lines_dropped")
    assert lost > 0
    assert lost + sum(e["event"] == "chatter" for e in events) == 500


def _read_all(fd: int) -> Iterator[bytes]:
    while chunk := os.read(fd, 65536):
        yield chunk


def test_a_closed_stream_is_survived() -> None:
    out = io.StringIO()
    kvd_logging.setup("json", "info", stream=out)
    out.close()
    structlog.get_logger("kvd.x").info("into the void")
    kvd_logging.shutdown()
    assert not any(t.name == "kvd-log" for t in threading.enumerate())


class Recorder:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, object]]] = []

    def warning(self, event: str, **fields: object) -> None:
        self.lines.append((event, fields))


def test_once_per_kind() -> None:
    recorder = Recorder()
    once = OncePerKind(recorder)
    assert once.warning("a", "odd_frame", size=1)
    assert not once.warning("a", "odd_frame", size=2)
    assert once.warning("b", "odd_frame", size=3)
    assert recorder.lines == [("odd_frame", {"size": 1}), ("odd_frame", {"size": 3})]


def test_again_after_a_while_with_what_was_kept() -> None:
    recorder = Recorder()
    now = [0.0]
    once = OncePerKind(recorder, every_s=60, clock=lambda: now[0])
    for now[0] in (0.0, 1.0, 59.0, 60.0, 61.0):
        once.warning("a", "odd_frame")
    assert recorder.lines == [("odd_frame", {}), ("odd_frame", {"suppressed": 2})]


def test_kinds_are_bounded() -> None:
    recorder = Recorder()
    once = OncePerKind(recorder, max_kinds=10)
    for i in range(1000):
        once.warning(f"kind{i}", "odd_frame")
    assert len(recorder.lines) == 11
    assert len(once._kinds) == 11
