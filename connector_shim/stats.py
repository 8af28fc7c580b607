"""The shim's counters, as vLLM carries and shows them. Nothing here may raise into the engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from connector_shim.telemetry import Telemetry, empty, is_empty, merge, summary

log = logging.getLogger("vllm.kvd.stats")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass
class KvdStats(KVConnectorStats):
    """What one worker, or all of them together, did since the last step that told of anything."""

    data: dict[str, Any] = field(default_factory=empty)

    def __post_init__(self) -> None:
        self.data = merge(empty(), self.data)

    @classmethod
    def build(cls, data: Any) -> KvdStats:
        """From a payload that travelled; unknown or bad parts of it are left out."""
        return cls(data=data if isinstance(data, dict) else {})

    @classmethod
    def take(cls, telemetry: Telemetry) -> KvdStats | None:
        """The counts since the last call; None when nothing happened."""
        data = telemetry.take()
        return None if data is None else cls(data=data)

    def reset(self) -> None:
        self.data = empty()

    def aggregate(self, other: KVConnectorStats) -> KvdStats:
        self.data = merge(self.data, getattr(other, "data", {}))
        return self

    def reduce(self) -> dict[str, int | float]:
        return summary(self.data)

    def is_empty(self) -> bool:
        return is_empty(self.data)


class KvdPromMetrics(KVConnectorPromMetrics):
    """vllm:kvd_* series in the engine's own /metrics; a failure here only costs the series."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        by_code = [*labelnames, "code"]
        self._fetches = self._counter_cls(
            name="vllm:kvd_fetches",
            documentation="Fetches of KV from prefill engines, by how they ended.",
            labelnames=by_code,
        )
        self._offers = self._counter_cls(
            name="vllm:kvd_offers_ended",
            documentation="Offers of KV to decode engines, by how they ended.",
            labelnames=by_code,
        )
        self._bytes = self._counter_cls(
            name="vllm:kvd_fetched_bytes",
            documentation="Bytes of KV fetched from prefill engines.",
            labelnames=labelnames,
        )
        self._tokens = self._counter_cls(
            name="vllm:kvd_fetched_tokens",
            documentation="Tokens whose KV was fetched from prefill engines.",
            labelnames=labelnames,
        )
        self._seconds = self._histogram_cls(
            name="vllm:kvd_fetch_seconds",
            documentation="Seconds from asking for KV to having it.",
            buckets=list(_SECONDS),
            labelnames=labelnames,
        )
        for values in per_engine_labelvalues.values():
            self._fetches.labels(*values, "ok")
            self._offers.labels(*values, "released")
            for metric in (self._bytes, self._tokens, self._seconds):
                metric.labels(*values)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        try:
            self._observe(merge(empty(), transfer_stats_data), engine_idx)
        except Exception:
            log.exception("kvd: some counts were not recorded")

    def _observe(self, data: dict[str, Any], engine_idx: int) -> None:
        values = self.per_engine_labelvalues[engine_idx]
        for metric, counts in ((self._fetches, data["fetches"]), (self._offers, data["offers"])):
            for code, count in counts.items():
                metric.labels(*values, code).inc(count)
        self._bytes.labels(*values).inc(data["nbytes"])
        self._tokens.labels(*values).inc(data["tokens"])
        for seconds in data["seconds"]:
            self._seconds.labels(*values).observe(seconds)
