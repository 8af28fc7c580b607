"""Spans of transfers: by the SDK's own exporter in memory, and over HTTP from a real daemon."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from connector_shim.readings import traceparent
from kvd.core.instructions import Record
from kvd.errors import ConfigError
from kvd.protocol.types import Stages
from kvd.spans import Spans, open_spans
from tests.conftest import wait_for
from tests.integration.daemon.conftest import Site, site
from tests.integration.daemon.engine import digest

__all__ = ["site"]

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADER = f"00-{TRACE}-{PARENT}-01"
SECOND = 10**9


def done(**changes: Any) -> Record:
    fields = {
        "code": "ok", "fetch_id": "f", "transfer_id": "t", "engine_id": "d", "transport": "tcp",
        "tokens": 32, "nbytes": 4096, "seconds": 2.0, "peer": "127.0.0.1:7", "detail": "",
        "stages": Stages(1.0, 1.25, 1.5, 0.5), "traceparent": HEADER,
    }  # fmt: skip
    return Record("fetch_done", {**fields, **changes})


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def made(exporter: InMemorySpanExporter) -> Iterator[Spans]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    one = Spans(provider, clock=lambda: 10 * SECOND)
    yield one
    one.close()


def test_a_fetch_is_a_span_of_its_requests_trace(
    made: Spans, exporter: InMemorySpanExporter
) -> None:
    made.record(done())
    [span] = exporter.get_finished_spans()
    assert (span.name, span.kind) == ("kvd.fetch", SpanKind.CLIENT)
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == PARENT
    assert (span.start_time, span.end_time) == (8 * SECOND, 10 * SECOND)
    assert {e.name: e.timestamp / SECOND for e in span.events} == {
        "parked": 8.5, "granted": 9.0, "first_byte": 9.25, "last_byte": 9.5,
    }  # fmt: skip
    assert span.attributes is not None
    assert (span.attributes["kvd.bytes"], span.attributes["kvd.code"]) == (4096, "ok")
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("header", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_without_a_trace_a_fetch_begins_its_own(
    made: Spans, exporter: InMemorySpanExporter, header: str
) -> None:
    made.record(done(traceparent=header, stages=Stages()))
    [span] = exporter.get_finished_spans()
    assert span.parent is None
    assert span.events == ()


def test_a_failed_fetch_is_an_error_and_nothing_else_is_a_span(
    made: Spans, exporter: InMemorySpanExporter
) -> None:
    made.record(done(code="deadline", detail="too late"))
    made.record(Record("offer_ended", {"reason": "expired"}))
    # Its request's trace is not known at the producer.
    made.record(Record("fetch_served", {"code": "ok", "stages": Stages(0.0), "seconds": 1.0}))
    [span] = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "too late"


def test_off_without_an_endpoint_and_named_without_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert open_spans("") is None
    import builtins

    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError("no", name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"vllm-kvd\[otel\]"):
        open_spans("http://127.0.0.1:1/v1/traces")


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({"traceparent": HEADER, "tracestate": "a=b"}, HEADER),
        (None, ""),
        ({}, ""),
        ("traceparent", ""),
        ({"traceparent": 5}, ""),
        ({"traceparent": "x" * 65}, ""),
        ({"traceparent": "é"}, ""),
    ],
)
def test_what_vllm_passes_on_is_read(headers: object, found: str) -> None:
    assert traceparent(SimpleNamespace(trace_headers=headers)) == found
    assert traceparent(object()) == ""


class Collector(HTTPServer):
    """Takes OTLP over HTTP; `bodies` is what came."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_daemon_sends_them_and_bears_a_collector_that_is_gone(site: Site) -> None:
    collector = Collector()
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    try:
        at = f"http://127.0.0.1:{collector.server_address[1]}/v1/traces"
        env = {"OTEL_BSP_SCHEDULE_DELAY": "100"}
        d = site.daemon("d", otlp_endpoint=at, env=env)
        gone = site.daemon("gone", otlp_endpoint="http://127.0.0.1:9/v1/traces", env=env)
        for daemon, name in ((d.ready(), "one"), (gone.ready(), "two")):
            producer, consumer = site.engine(daemon, f"p-{name}", seed=1), site.engine(daemon, name)
            remote = producer.up()
            consumer.up()
            producer.offer("t", [1])
            fetch = consumer.client.fetch(
                "t", remote=remote, engine_id=f"p-{name}", start=0, end=16, blocks=[[2]],
                digest=digest("t"), deadline_s=10.0, park_s=5.0, traceparent=HEADER,
            )  # fmt: skip
            assert consumer.finish(fetch).code == "ok"
        wait_for(
            lambda: any(bytes.fromhex(TRACE) in body for body in collector.bodies), 30,
            what="the span comes with the request's trace id",
        )  # fmt: skip
        assert any(b"kvd.fetch" in body for body in collector.bodies)
        assert gone.metric("kvd_fetches_total", code="ok") == 1
    finally:
        collector.shutdown()
        thread.join(10)
        collector.server_close()
