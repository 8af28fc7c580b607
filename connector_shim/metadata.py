"""The objects that vLLM carries between the two halves, as the classes that it expects."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from connector_shim.jobs import RankId, RankState, StepJobs


@dataclass
class KvdMetadata(KVConnectorMetadata):
    """Scheduler half to worker halves, each step."""

    jobs: StepJobs


@dataclass
class KvdWorkerMetadata(KVConnectorWorkerMetadata):
    """Worker halves to scheduler half, each step: the state of each rank's daemon."""

    ranks: dict[RankId, RankState] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both workers' ranks together; another connector's metadata adds nothing."""
        if not isinstance(other, KvdWorkerMetadata):
            return self
        return KvdWorkerMetadata({**self.ranks, **other.ranks})


@dataclass
class KvdHandshake(KVConnectorHandshakeMetadata):
    """A worker's first word to the scheduler half, once after start."""

    rank: RankId
    state: RankState
