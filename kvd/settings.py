"""The one settings tree: names, types, bounds, units and what each is for.

`kvd.config` fills it from flags, environment and file; flags and documentation are made from it.
"""

from __future__ import annotations

import os
import re
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from kvd.addresses import (
    HostPort,
    Network,
    check_socket_path,
    default_socket_path,
    group_id,
    parse_bind,
    parse_host_port,
    parse_network,
)
from kvd.core.config import CoreConfig
from kvd.settings_gpu import GpuSettings
from kvd.settings_gpu import setting as _setting

AUTO_TRANSPORTS = ("shm", "tcp")
"""What `transport = auto` may use for KV in host memory, best first."""
GPU_TRANSPORTS = ("cuda_ipc", "nccl")
"""What it may use besides, and first, for KV in memory of a GPU."""

_CORE = CoreConfig()
_DEVICE = re.compile(r"cuda:(?:[0-9]{1,3}|GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")


def _core(name: str, description: str, *, unit: str = "", **bounds: Any) -> Any:
    """A field whose default is the core's own."""
    return _setting(
        getattr(_CORE, name), description, group="Limits and times", unit=unit, **bounds
    )


def _split(value: object) -> object:
    """A list may be one text with commas, since flags and the environment know only text."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


class Settings(GpuSettings):
    """All settings of the daemon. Building it reads neither environment nor files."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # --- where it is reached
    socket: str = _setting(
        "",
        "Unix socket for the engines on this host",
        group="Addresses",
        shown="/run/kvd/kvd.sock, else $XDG_RUNTIME_DIR/kvd/kvd.sock, else /tmp/kvd-UID/kvd.sock",
        validate_default=True,
    )
    socket_group: str = _setting(
        "",
        "group (name or number) whose members may use that socket too, which is then of mode "
        '0660; "" is this user alone',
        group="Addresses",
    )
    listen: str = _setting(
        "127.0.0.1:0",
        "host:port for other daemons' control messages; port 0 takes a free one",
        group="Addresses",
    )
    advertise: str = _setting(
        "",
        "host or host:port that other daemons are told to connect to",
        group="Addresses",
        shown="the address that listen is bound to",
    )
    data_listen: str = _setting(
        "",
        "host:port for the data connections of the tcp transport",
        group="Addresses",
        shown="the host of listen, port 0",
    )
    metrics: str = _setting(
        "127.0.0.1:0",
        'host:port of /metrics, /healthz, /readyz and /v1; "" serves none',
        group="Addresses",
    )
    bootstrap: str = _setting(
        "",
        'host:port where routers ask for the engines of this daemon (/query); "" serves none',
        group="Addresses",
    )
    bootstrap_peers: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = _setting(
        (),
        "bootstrap addresses, with commas between, of the daemons of this engine's other ranks, "
        "which /query then tells of too",
        group="Addresses",
        shown='""',
    )
    discovery_file: str = _setting(
        "",
        'JSON file that says pid and bound addresses, written once the daemon is ready; "" is none',
        group="Addresses",
    )

    # --- who may
    allow_peers: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = _setting(
        ("127.0.0.0/8", "::1/128"),
        "networks, with commas between, that other daemons may be in, to ask or to be asked",
        group="Security",
    )
    keys: str = _setting(
        "",
        "folder of this daemon's keys and its peers' (kvd keys init); with it, daemons encrypt "
        'what they say and know each other by key; "" is none',
        group="Security",
    )
    insecure: bool = _setting(
        False,
        "allow addresses that other hosts can reach, although there are no keys",
        group="Security",
    )

    control_token_file: str = _setting(
        "",
        "file with the token that POST requests to the metrics address need; without one they are "
        "taken on loopback and on the Unix socket only",
        group="Security",
        shown='""',
    )

    tls_cert: str = _setting(
        "",
        "PEM file of this daemon's certificate: data connections of the tcp transport are inside "
        'TLS 1.3; "" is none',
        group="Security",
    )
    tls_key: str = _setting("", "PEM file of the certificate's key", group="Security")
    tls_ca: str = _setting(
        "",
        "PEM file of the authority that peers' certificates must be of; one for kvd alone",
        group="Security",
    )

    # --- how bytes move
    device: str = _setting(
        "cpu",
        "memory that the engines' KV cache lies in: cpu, cuda:N (as CUDA_VISIBLE_DEVICES counts), "
        "or cuda:GPU-UUID",
        group="Data",
    )
    transport: Literal["auto", "shm", "tcp", "cuda_ipc", "nccl"] = _setting(
        "auto",
        "how KV moves: shm (same host), tcp, cuda_ipc (GPUs of one host), nccl (between any two "
        "GPUs), or auto (the best of these that works for each pair)",
        group="Data",
    )
    shm_threads: int = _setting(
        2, "copying threads of the shm transport", group="Data", ge=1, le=64
    )
    tcp_streams: int = _setting(
        2, "connections of the tcp transport to each peer", group="Data", ge=1, le=64
    )
    tcp_congestion: str = _setting(
        "",
        'congestion control of data connections; "" leaves the system\'s',
        group="Data",
        pattern=r"^[a-z0-9_-]{0,15}$",
    )
    data_timeout_s: float = _setting(
        10.0, "a data transfer without progress for this long fails", group="Data", unit="s",
        gt=0, le=3600,
    )  # fmt: skip

    verify: Literal["off", "crc"] = _setting(
        "off",
        "crc compares checksums of every copy that this daemon makes before it counts: see "
        "docs/runbook.md#integrity for what that catches",
        group="Data",
    )

    # --- peers and life
    heartbeat_s: float = _setting(
        1.0, "time between heartbeats to a peer", group="Peers and life", unit="s", ge=0.05, le=60
    )
    peer_timeout_s: float = _setting(
        5.0, "a peer that is silent for this long is taken for dead", group="Peers and life",
        unit="s", ge=0.1, le=600,
    )  # fmt: skip
    connect_timeout_s: float = _setting(
        5.0, "how long connecting to a peer may take", group="Peers and life", unit="s",
        gt=0, le=600,
    )  # fmt: skip
    drain_timeout_s: float = _setting(
        30.0, "how long SIGTERM lets running transfers go on", group="Peers and life", unit="s",
        ge=0, le=3600,
    )  # fmt: skip

    # --- logs
    log_format: Literal["auto", "json", "console"] = _setting(
        "auto", "auto is console on a terminal and json elsewhere", group="Logs"
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info", "least level that is logged", group="Logs"
    )

    # --- traces
    otlp_endpoint: str = _setting(
        "",
        "URL that spans of fetches are sent to by OTLP over HTTP, such as "
        'http://127.0.0.1:4318/v1/traces; needs the extra otel; "" sends none',
        group="Logs",
        pattern=r"^(https?://\S+)?$",
    )

    # --- limits of the shell
    max_frame_queue: int = _setting(
        1024, "frames that may wait for one engine or peer that does not read",
        group="Limits and times", ge=16, le=2**20,
    )  # fmt: skip
    max_clients: int = _setting(
        1024, "daemons that may be connected to this one", group="Limits and times", ge=1, le=2**16
    )
    max_clients_per_peer: int = _setting(
        128,
        "of them, those from one address, or with one key where there are keys",
        group="Limits and times", ge=1, le=2**16,
    )  # fmt: skip
    max_data_connections: int = _setting(
        1024, "data connections that may be open", group="Limits and times", ge=1, le=2**16
    )
    max_data_connections_per_peer: int = _setting(
        256, "of them, those from one address", group="Limits and times", ge=1, le=2**16
    )

    # --- limits of the core
    release_linger_s: float = _core(
        "release_linger_s", "an offer waits this long for further fetches", unit="s", ge=0, le=600
    )
    lease_max_s: float = _core(
        "lease_max_s",
        "longest lease that an engine may ask for, and that renewals come to",
        unit="s",
        gt=0,
        le=86_400,
    )
    park_max_s: float = _core(
        "park_max_s", "longest wait for a transfer that is not offered yet", unit="s", ge=0,
        le=3600,
    )  # fmt: skip
    fetch_max_s: float = _core(
        "fetch_max_s", "longest time that a fetch may take", unit="s", gt=0, le=86_400
    )
    attach_timeout_s: float = _core(
        "attach_timeout_s", "how long two engines may take to agree on their memory", unit="s",
        gt=0, le=600,
    )  # fmt: skip
    tombstone_ttl_s: float = _core(
        "tombstone_ttl_s", "how long an ended transfer is remembered by name", unit="s", ge=0,
        le=86_400,
    )  # fmt: skip
    early_release_ttl_s: float = _core(
        "early_release_ttl_s", "how long a release that came before its offer is remembered",
        unit="s", ge=0, le=3600,
    )  # fmt: skip
    failure_cache_s: float = _core(
        "failure_cache_s", "how long a failed attempt to reach an engine is not repeated",
        unit="s", ge=0, le=600,
    )  # fmt: skip
    fence_grace_s: float = _core(
        "fence_grace_s", "how long a fetch whose source was revoked waits to hear why",
        unit="s", ge=0, le=60,
    )  # fmt: skip
    peer_idle_s: float = _core(
        "peer_idle_s", "a peer that nothing used for this long is disconnected", unit="s",
        gt=0, le=86_400,
    )  # fmt: skip
    max_sessions: int = _core("max_sessions", "engine ranks that may be connected", ge=1, le=4096)
    max_peers: int = _core("max_peers", "daemons that this one may ask", ge=1, le=2**16)
    max_attachments: int = _core(
        "max_attachments", "pairs of engines, asking and asked each", ge=1, le=2**20
    )
    max_notifies: int = _core(
        "max_notifies", "releases and renewals on their way to peers", ge=1, le=2**20
    )
    max_offers: int = _core("max_offers", "offers that may be open", ge=1, le=2**20)
    max_fetches: int = _core("max_fetches", "fetches that may be open", ge=1, le=2**20)
    max_parked: int = _core("max_parked", "fetches that may wait for their offer", ge=0, le=2**20)
    max_parked_per_peer: int = _core(
        "max_parked_per_peer", "of them, those of one peer (by key, else by address)", ge=0,
        le=2**20,
    )  # fmt: skip
    max_bytes_per_peer: int = _core(
        "max_bytes_per_peer", "KV that one peer may be reading at once", unit="bytes",
        ge=1, le=2**60,
    )  # fmt: skip
    max_tombstones: int = _core(
        "max_tombstones", "ended transfers that are remembered", ge=0, le=2**24
    )
    max_early_releases: int = _core(
        "max_early_releases", "early releases that are remembered", ge=0, le=2**20
    )
    max_blocks: int = _core("max_blocks", "KV blocks of one offer", ge=1, le=2**30)
    min_job_bytes: int = _core(
        "min_job_bytes", "smaller copies are put together up to this", unit="bytes",
        ge=4096, le=2**40,
    )  # fmt: skip
    max_job_bytes: int = _core(
        "max_job_bytes", "larger copies are cut at this", unit="bytes", ge=4096, le=2**40
    )
    max_shm_job_bytes: int = _core(
        "max_shm_job_bytes", "the same over shm", unit="bytes", ge=4096, le=2**40
    )
    max_jobs: int = _core("max_jobs", "copies that may run at once", ge=1, le=1024)
    max_jobs_per_fetch: int = _core(
        "max_jobs_per_fetch", "of them, those of one fetch", ge=1, le=1024
    )
    max_jobs_per_attachment: int = _core(
        "max_jobs_per_attachment", "of them, those of one pair of engines", ge=1, le=1024
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # Only `kvd.config.load` reads the environment: it knows which source a bad value is from.
        return (init_settings,)

    @field_validator("socket")
    @classmethod
    def _socket(cls, value: str) -> str:
        return check_socket_path(value or default_socket_path())

    @field_validator("socket_group")
    @classmethod
    def _socket_group(cls, value: str) -> str:
        group_id(value)
        return value

    @field_validator("keys", "control_token_file", "tls_cert", "tls_key", "tls_ca")
    @classmethod
    def _keys(cls, value: str) -> str:
        return os.path.abspath(os.path.expanduser(value)) if value else ""

    @field_validator("listen")
    @classmethod
    def _listen(cls, value: str) -> str:
        return str(parse_bind(value))

    @field_validator("data_listen", "metrics", "bootstrap")
    @classmethod
    def _bind(cls, value: str) -> str:
        return str(parse_bind(value)) if value else ""

    @field_validator("advertise")
    @classmethod
    def _advertise(cls, value: str) -> str:
        if not value:
            return ""
        at = parse_host_port(value, default_port=0)
        if at.is_wildcard or at.host == "*":
            raise ValueError(f"must be an address that peers can connect to, not {at.host}")
        return str(at)

    @field_validator("allow_peers")
    @classmethod
    def _allow_peers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(parse_network(v)) for v in value)

    @field_validator("bootstrap_peers")
    @classmethod
    def _bootstrap_peers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(parse_host_port(one)) for one in value)

    @field_validator("device")
    @classmethod
    def _device(cls, value: str) -> str:
        if value != "cpu" and not _DEVICE.fullmatch(value):
            raise ValueError("must be cpu, cuda:N or cuda:GPU-UUID")
        return value

    @model_validator(mode="after")
    def _together(self) -> Settings:
        if self.verify != "off" and self.device != "cpu":
            raise ValueError(
                "verify: checksums are made by the CPU, which cannot read memory of a GPU; leave "
                "it off where device is not cpu"
            )
        if self.transport in GPU_TRANSPORTS and self.device == "cpu":
            raise ValueError(
                f"transport: {self.transport} moves KV of GPUs, and device is cpu; set "
                "device = cuda:N too"
            )
        if not self.insecure and not self.keys:
            for name in ("listen", "data_listen"):
                at = getattr(self, name)
                if at and not parse_bind(at).is_loopback:
                    raise ValueError(
                        f"{name}: {at} can be reached from other hosts, and without keys daemons "
                        "neither authenticate nor encrypt what they say to each other. Keep to a "
                        "loopback address, make keys (kvd keys init) and name their folder with "
                        "keys, or set insecure = true if every host that can reach it is trusted"
                    )
        tls = {name: getattr(self, name) for name in ("tls_cert", "tls_key", "tls_ca")}
        if any(tls.values()) and not all(tls.values()):
            missing = ", ".join(name for name, value in tls.items() if not value)
            raise ValueError(
                f"{missing}: must be set too; tls_cert, tls_key and tls_ca belong together, and "
                "a part of them protects nothing"
            )
        if self.listen_at.is_wildcard and not self.advertise:
            raise ValueError(
                f"advertise: must be set, since listen is {self.listen} and peers need an address "
                "that they can connect to"
            )
        if self.peer_timeout_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"peer_timeout_s: must be at least twice heartbeat_s ({self.heartbeat_s:g}), "
                f"got {self.peer_timeout_s:g}"
            )
        for small, large in (
            ("min_job_bytes", "max_job_bytes"),
            ("min_job_bytes", "max_shm_job_bytes"),
            ("max_jobs_per_fetch", "max_jobs"),
            ("max_jobs_per_attachment", "max_jobs"),
        ):
            value, limit = getattr(self, small), getattr(self, large)
            if value > limit:
                raise ValueError(f"{small}: must not be above {large} ({limit}), got {value}")
        return self

    # --- the same, as their users need them

    @property
    def socket_gid(self) -> int | None:
        """Number of `socket_group`, or None."""
        return group_id(self.socket_group)

    @property
    def listen_at(self) -> HostPort:
        return parse_bind(self.listen)

    @property
    def data_listen_at(self) -> HostPort:
        if not self.data_listen:
            return HostPort(self.listen_at.host, 0)
        return parse_bind(self.data_listen)

    @property
    def metrics_at(self) -> HostPort | None:
        return parse_bind(self.metrics) if self.metrics else None

    @property
    def bootstrap_at(self) -> HostPort | None:
        return parse_bind(self.bootstrap) if self.bootstrap else None

    @property
    def bootstrap_peers_at(self) -> tuple[HostPort, ...]:
        return tuple(parse_host_port(one) for one in self.bootstrap_peers)

    @property
    def advertise_at(self) -> HostPort | None:
        """Port 0 stands for the bound one; None for the bound address altogether."""
        return parse_host_port(self.advertise) if self.advertise else None

    @property
    def peer_networks(self) -> tuple[Network, ...]:
        """`allow_peers`, parsed."""
        return tuple(parse_network(n) for n in self.allow_peers)

    @property
    def transports(self) -> tuple[str, ...]:
        """What may be used, best first; one that was named is the only one."""
        if self.transport != "auto":
            return (self.transport,)
        return AUTO_TRANSPORTS if self.device == "cpu" else GPU_TRANSPORTS + AUTO_TRANSPORTS

    def core(self) -> CoreConfig:
        """The part of the settings that the core lives by."""
        names = {f.name for f in fields(CoreConfig)} - {"transports"}
        values = {name: getattr(self, name) for name in names}
        if self.verify == "crc":  # a job's checksums are one thread's work
            values["max_shm_job_bytes"] = min(self.max_shm_job_bytes, self.max_job_bytes)
        return CoreConfig(transports=self.transports, **values)
