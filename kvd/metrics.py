"""What an operator can count. Every series is there, at 0, from the start.

Nothing here raises: a metric that cannot be updated is logged once and left as it is, since no
transfer may fail for the sake of its statistics.
"""

from __future__ import annotations

import contextlib
import functools
import platform
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from typing import Any, Concatenate, ParamSpec

import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder

from kvd import __version__
from kvd.core.instructions import Record
from kvd.logging import OncePerKind
from kvd.protocol.codes import Code
from kvd.protocol.version import PROTO_MAJOR, PROTO_MINOR

P = ParamSpec("P")

OTHER = "other"
"""Stands for a label value that is not on the list: the number of series stays bounded."""
NO_TRANSPORT = "none"
"""A fetch that ended before a transport was chosen."""

TRANSPORTS = ("shm", "tcp", "cuda_ipc", "nccl", NO_TRANSPORT)
CODES = tuple(str(c) for c in Code)
OFFER_STATES = ("leased", "serving", "lingering")
PEER_STATES = ("connecting", "up", "down")
_ENDS = ("frame_too_long", "too_many_fds", "queue_full", "os_error")
DROPS: Mapping[str, tuple[str, ...]] = {
    "accept": ("EMFILE", "ENFILE", "ENOBUFS", "ENOMEM"),
    "session": (
        "undecodable", "bad_message", "not_registered", "version_mismatch", "bad_memory",
        "no_hello", "uid", "max_sessions", "no_space", "deadline", "internal", *_ENDS,
    ),
    "peer_server": (
        "multipart", "bad_message", "version_mismatch", "overloaded", "stale_epoch",
        "peer_not_allowed", "max_clients", "max_clients_per_peer", "queue_full",
        "daemon_id_taken", "no_hello",
    ),
    "curve": (
        "unknown_key", "wrong_server_key", "mechanism_mismatch", "bad_handshake", "key_removed",
    ),
    "curve_client": ("no_key_fits",),
    "peer_client": ("bad_message", "version_mismatch", "overloaded", "queue_full"),
    "link": (
        "accept", "max_links", "undecodable", "bad_message", "uid", "unproven", "no_hello", *_ENDS,
    ),
    "data": (
        "not_allowed", "too_many", "too_many_of_peer", "first_frame", "bad_frame", "idle",
        "stalled", "broken", "tls", "accept", "unknown_transfer", "engine_gone", "bad_message",
        "range_not_held", "fenced", "internal",
    ),
    "http": ("timeout", "max_connections", "bad_request", "refused"),
    "metrics": ("internal",),
}  # fmt: skip
"""Known places and reasons of dropped input; others appear once they happen."""
MAX_DROP_SERIES = 512

SECONDS_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip

_once = OncePerKind(structlog.get_logger("kvd.metrics"))


def _never_raises(
    method: Callable[Concatenate[Metrics, P], None],
) -> Callable[Concatenate[Metrics, P], None]:
    @functools.wraps(method)
    def guarded(self: Metrics, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as e:
            self._failed(method.__name__, e)

    return guarded


class Metrics:
    """All series of one daemon, in a registry of its own."""

    def __init__(self) -> None:
        # When a series was made tells an operator nothing here, and doubles their number.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)
        self._fetches = self._counter(
            "kvd_fetches", "Fetches of local consumers that ended, by outcome; sum over ranks",
            code=CODES, transport=TRANSPORTS,
        )  # fmt: skip
        self._fetched_bytes = self._counter(
            "kvd_fetched_bytes", "Bytes of KV copied into local consumers; sum over ranks",
            transport=TRANSPORTS,
        )  # fmt: skip
        self._fetched_tokens = self._counter(
            "kvd_fetched_tokens",
            "Tokens that local consumers got KV of; every rank counts all of them, so take the "
            "maximum over ranks",
            transport=TRANSPORTS,
        )  # fmt: skip
        self._served = self._counter(
            "kvd_served_fetches", "Fetches from local producers that ended; sum over ranks",
            code=CODES, transport=TRANSPORTS,
        )  # fmt: skip
        self._served_bytes = self._counter(
            "kvd_served_bytes", "Bytes of KV read from local producers; sum over ranks",
            transport=TRANSPORTS,
        )  # fmt: skip
        self._offers_ended = self._counter(
            "kvd_offers", "Offers of local producers that ended, by reason; sum over ranks",
            reason=CODES,
        )  # fmt: skip
        self._refused = self._counter(
            "kvd_refused", "Requests of engines and peers that were refused; sum", code=CODES
        )
        self._attaches = self._counter(
            "kvd_attaches", "Attempts to bind a local engine to a remote one; sum",
            code=CODES, transport=TRANSPORTS,
        )  # fmt: skip
        self._late = self._counter(
            "kvd_late", "Messages that came after what they were about had ended; sum"
        )
        self._late_bytes = self._counter(
            "kvd_late_bytes", "Bytes that came after their fetch had ended, thrown away; sum"
        )
        self._dropped = Counter(
            "kvd_dropped", "Input that was thrown away, by place and reason; sum",
            ["where", "reason"], registry=self.registry,
        )  # fmt: skip
        self._drop_series: set[tuple[str, str]] = set()
        for where, reasons in DROPS.items():
            for reason in reasons:
                self._drop_series.add((where, reason))
                self._dropped.labels(where, reason)

        self._fetch_seconds = Histogram(
            "kvd_fetch_seconds",
            "Seconds from an engine's request to its answer, of fetches that succeeded",
            ["transport"], registry=self.registry, buckets=SECONDS_BUCKETS,
        )  # fmt: skip
        for transport in TRANSPORTS:
            self._fetch_seconds.labels(transport)

        self._offers = self._gauge(
            # Not kvd_offers: a counter's name without _total cannot be a gauge's as well.
            "kvd_open_offers", "Offers that hold blocks of local producers now; sum over ranks",
            state=OFFER_STATES,
        )  # fmt: skip
        self._fetches_in_flight = self._gauge(
            "kvd_fetches_in_flight", "Fetches of local consumers that are open now; sum over ranks"
        )
        self._parked = self._gauge(
            "kvd_parked", "Fetches of peers that wait for their offer now; sum over ranks"
        )
        self._sessions = self._gauge("kvd_sessions", "Engine ranks connected now; sum")
        self._clients = self._gauge("kvd_clients", "Daemons that are connected to ask us; sum")
        self._peers = self._gauge(
            "kvd_peers", "Daemons that we ask, by state of the connection; sum", state=PEER_STATES
        )
        self._mapped_bytes = self._gauge(
            "kvd_mapped_bytes", "Bytes of engine memory mapped now, own and peers'; sum"
        )
        self._nccl_comms = self._gauge(
            "kvd_nccl_communicators", "Communicators of NCCL that are there now, both sides; sum"
        )
        self._nccl_staging = self._gauge(
            "kvd_nccl_staging_bytes", "GPU memory of their staging buffers, without NCCL's own; sum"
        )
        self._nccl_abandoned = self._gauge(
            "kvd_nccl_abandoned_threads", "Threads left behind in a call of NCCL that hangs; sum"
        )
        self._loop_lag = self._gauge(
            "kvd_loop_lag_seconds", "Seconds by which the event loop was late last; maximum"
        )
        info = Gauge(
            "kvd_build_info", "Always 1; the labels say what runs",
            ["version", "protocol", "python"], registry=self.registry,
        )  # fmt: skip
        info.labels(__version__, f"{PROTO_MAJOR}.{PROTO_MINOR}", platform.python_version()).set(1)

    # --- counting ---------------------------------------------------------------------------

    @_never_raises
    def record(self, record: Record) -> None:
        """Counts one of the core's records; kinds that are not counted are ignored."""
        get = record.fields.get
        code, transport = _code(get("code")), _transport(get("transport"))
        match record.kind:
            case "fetch_done":
                self._fetches.labels(code, transport).inc()
                self._fetched_bytes.labels(transport).inc(_amount(get("nbytes")))
                if code == Code.OK:
                    self._fetched_tokens.labels(transport).inc(_amount(get("tokens")))
                    self._fetch_seconds.labels(transport).observe(_amount(get("seconds")))
            case "fetch_served":
                self._served.labels(code, transport).inc()
                self._served_bytes.labels(transport).inc(_amount(get("nbytes")))
            case "offer_ended":
                self._offers_ended.labels(_code(get("reason"))).inc()
            case "refused":
                self._refused.labels(code).inc()
            case "attached":
                self._attaches.labels(str(Code.OK), transport).inc()
            case "attach_failed":
                self._attaches.labels(code, transport).inc()
            case "late":
                self._late.inc()
                self._late_bytes.inc(_amount(get("nbytes")))
            case _:
                pass

    @_never_raises
    def dropped(self, where: str, reason: str, count: int = 1) -> None:
        """Counts input that was thrown away. New places and reasons get a series, to a bound."""
        key = (where, reason)
        if key not in self._drop_series:
            if len(self._drop_series) >= MAX_DROP_SERIES:
                key = (OTHER, OTHER)
            self._drop_series.add(key)
        self._dropped.labels(*key).inc(_amount(count))

    @_never_raises
    def late_bytes(self, nbytes: int) -> None:
        """Counts bytes that came for a fetch which had ended."""
        self._late_bytes.inc(_amount(nbytes))

    # --- states -----------------------------------------------------------------------------

    @_never_raises
    def set_offers(self, by_state: Mapping[str, int]) -> None:
        """Open offers by state (OFFER_STATES); states that are not named are 0."""
        _set_states(self._offers, OFFER_STATES, by_state)

    @_never_raises
    def set_peers(self, by_state: Mapping[str, int]) -> None:
        """Peers by state (PEER_STATES); states that are not named are 0."""
        _set_states(self._peers, PEER_STATES, by_state)

    @_never_raises
    def set_fetches_in_flight(self, count: int) -> None:
        self._fetches_in_flight.set(count)

    @_never_raises
    def set_parked(self, count: int) -> None:
        self._parked.set(count)

    @_never_raises
    def set_sessions(self, count: int) -> None:
        self._sessions.set(count)

    @_never_raises
    def set_clients(self, count: int) -> None:
        self._clients.set(count)

    @_never_raises
    def set_mapped_bytes(self, nbytes: int) -> None:
        self._mapped_bytes.set(nbytes)

    @_never_raises
    def set_nccl(self, comms: int, staging_bytes: int, abandoned: int) -> None:
        self._nccl_comms.set(comms)
        self._nccl_staging.set(staging_bytes)
        self._nccl_abandoned.set(abandoned)

    @_never_raises
    def set_loop_lag(self, seconds: float) -> None:
        self._loop_lag.set(seconds)

    # --- reading ----------------------------------------------------------------------------

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """All series as text, in the format that the Accept header asks for: (body, type)."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def value(self, name: str, **labels: str) -> float | None:
        """One sample by its exposed name (`kvd_fetches_total`), or None where there is none."""
        for family in self.registry.restricted_registry([name]).collect():
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return float(sample.value)
        return None

    # --- making -----------------------------------------------------------------------------

    def _counter(self, name: str, text: str, **labels: Iterable[str]) -> Counter:
        counter = Counter(name, text, list(labels), registry=self.registry)
        for values in product(*labels.values()) if labels else ():
            counter.labels(*values)
        return counter

    def _gauge(self, name: str, text: str, **labels: Iterable[str]) -> Gauge:
        gauge = Gauge(name, text, list(labels), registry=self.registry)
        for values in product(*labels.values()) if labels else ():
            gauge.labels(*values)
        return gauge

    def _failed(self, method: str, error: Exception) -> None:
        with contextlib.suppress(Exception):
            _once.warning(method, "metric_failed", method=method, error=repr(error))
            self._dropped.labels("metrics", str(Code.INTERNAL)).inc()


def _code(value: object) -> str:
    return str(value) if value in _KNOWN_CODES else OTHER


def _transport(value: object) -> str:
    if not value:
        return NO_TRANSPORT
    return str(value) if value in TRANSPORTS else OTHER


def _amount(value: Any) -> float:
    """A number that a counter takes: a missing or negative one is nothing."""
    return max(0.0, float(value)) if value is not None else 0.0


def _set_states(gauge: Gauge, states: Iterable[str], by_state: Mapping[str, int]) -> None:
    for state in states:
        gauge.labels(state).set(by_state.get(state, 0))


_KNOWN_CODES = frozenset(CODES)
