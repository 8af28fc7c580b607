"""The limits and times that the core needs; `kvd.config` fills them from the settings tree."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """Seconds for `_s`, bytes for `_bytes`, counts otherwise."""

    transports: tuple[str, ...] = ("shm", "tcp")
    """What this daemon may use, best first; one entry means that nothing else will do."""

    release_linger_s: float = 2.0
    """How long an offer outlives its last fetch, since a router may hand it to several."""
    lease_max_s: float = 600.0
    park_max_s: float = 30.0
    fetch_max_s: float = 600.0
    attach_timeout_s: float = 10.0
    tombstone_ttl_s: float = 120.0
    early_release_ttl_s: float = 30.0

    max_sessions: int = 64
    max_offers: int = 16_384
    max_fetches: int = 4_096
    max_parked: int = 1_024
    max_parked_per_peer: int = 256
    max_bytes_per_peer: int = 2**38
    """Granted and not closed yet. More than a GPU holds: who asks for that asks for blocks again
    that it is reading."""
    max_tombstones: int = 65_536
    max_early_releases: int = 4_096
    max_blocks: int = 2**22

    min_job_bytes: int = 4 * 2**20
    max_job_bytes: int = 32 * 2**20
    max_shm_job_bytes: int = 512 * 2**20
    """Copy threads take turns within a job over shm, so that a large one holds nobody up, and each
    job costs the event loop time that it takes from them."""
    max_jobs: int = 8
    """Copy jobs in flight in this daemon, shared fairly between fetches. An attachment that has
    none in flight may always start one more, so that stuck peers never use up all of them."""
    max_jobs_per_fetch: int = 4
    max_jobs_per_attachment: int = 4

    peer_idle_s: float = 600.0
    """An attachment, and a peer, that nothing used for so long is dropped."""
    failure_cache_s: float = 1.0
    """How long a failed attachment or peer answers at once, without another try."""
    fence_grace_s: float = 1.0
    """How long a fetch that met a dead fence word waits for the producer to say why."""
    max_peers: int = 1_024
    max_attachments: int = 4_096
    """Bound of either side: those that we asked for, and those that clients asked of us."""
    max_notifies: int = 4_096
    """Releases and renewals in flight to peers."""
