"""OpenTelemetry: one span for each fetch, joined to its request's trace. Optional.

What was served to a peer has none: its request's trace is not known here.
Without `otlp_endpoint` nothing of it is imported; with it, the extra `otel` must be installed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvd import __version__
from kvd.core.instructions import Record
from kvd.errors import ConfigError
from kvd.protocol.codes import Code
from kvd.protocol.types import Stages

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

MAX_QUEUED = 2048
EXPORT_TIMEOUT_S = 5.0
FLUSH_MS = 2000
"""How long a stopping daemon waits for its last spans to leave."""
EVENTS = ("parked", "granted", "first_byte", "last_byte")


class Spans:
    """Makes spans of the core's records and hands them to the provider, which must not block."""

    def __init__(self, provider: TracerProvider, clock: Callable[[], int] = time.time_ns) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("kvd", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._clock = clock

    def record(self, record: Record) -> None:
        """A span for a fetch that ended; other records are not for here."""
        if record.kind == "fetch_done":
            self._fetch(record.fields)

    def close(self) -> None:
        """Sends what is left, for FLUSH_MS at most."""
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()

    def _fetch(self, fields: Mapping[str, Any]) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        end = self._clock()
        start = end - int(1e9 * float(fields.get("seconds", 0.0)))
        # Made by a stranger's client, perhaps: what is no traceparent begins a trace of its own.
        carrier = {"traceparent": str(fields.get("traceparent", ""))}
        span = self._tracer.start_span(
            "kvd.fetch",
            context=self._propagator.extract(carrier),
            kind=SpanKind.CLIENT,
            start_time=start,
            attributes={
                "kvd.transfer_id": str(fields.get("transfer_id", "")),
                "kvd.fetch_id": str(fields.get("fetch_id", "")),
                "kvd.engine_id": str(fields.get("engine_id", "")),
                "kvd.transport": str(fields.get("transport", "")),
                "kvd.code": str(fields.get("code", "")),
                "kvd.tokens": int(fields.get("tokens") or 0),
                "kvd.bytes": int(fields.get("nbytes") or 0),
                "server.address": str(fields.get("peer", "")),
            },
        )
        stages = fields.get("stages")
        if isinstance(stages, Stages):
            for name in EVENTS:
                after = getattr(stages, name)
                if after >= 0:
                    span.add_event(name, timestamp=start + int(1e9 * after))
        if fields.get("code") != Code.OK:
            span.set_status(Status(StatusCode.ERROR, str(fields.get("detail", ""))[:500]))
        span.end(end_time=end)


def open_spans(endpoint: str) -> Spans | None:
    """Spans that go to an OTLP endpoint over HTTP; None for no endpoint. Raises ConfigError."""
    if not endpoint:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as e:
        raise ConfigError(
            f"otlp_endpoint: {e.name} is missing; install it: pip install 'vllm-kvd[otel]'"
        ) from None
    resource = Resource.create({"service.name": "kvd", "service.version": __version__})
    provider = TracerProvider(resource=resource)
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_QUEUED))
    return Spans(provider)
