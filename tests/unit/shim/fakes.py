"""Stand-ins for vLLM's requests and blocks, and for the client, with no vLLM and no daemon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from connector_shim.errors import ClientError
from connector_shim.events import Event, Up
from connector_shim.jobs import RankState, StepJobs
from connector_shim.memory import MemoryDescription
from connector_shim.plans import EngineShape
from connector_shim.scheduler import SchedulerHalf
from connector_shim.settings import ShimSettings
from kvd.protocol.codes import Code
from kvd.protocol.local import FetchDone, OfferEnded, Welcome
from kvd.protocol.types import Geometry, LayerLayout, PeerAddr, Region, Stages
from kvd.protocol.version import PROTO_MAJOR, PROTO_MINOR

UP = RankState("up", "10.0.0.1", 7000)
DOWN = RankState("down", detail="no daemon")


class Clock:
    """Seconds that only pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Block:
    block_id: int
    block_hash: bytes | None = None
    is_null: bool = False


NULL = Block(0, None, True)


@dataclass
class Blocks:
    blocks: tuple[list[Block], ...]


def table(*ids: int, hashed: int = 0) -> list[Block]:
    """A block table; id 0 is the null block, the first `hashed` ones are shared already."""
    return [NULL if i == 0 else Block(i, b"h" if n < hashed else None) for n, i in enumerate(ids)]


@dataclass
class Request:
    request_id: str = "req-1"
    prompt: list[int] = field(default_factory=lambda: list(range(40)))
    params: Any = None
    output: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    status: Any = field(default_factory=lambda: SimpleNamespace(name="WAITING"))
    sampling_params: Any = field(default_factory=lambda: SimpleNamespace(prompt_logprobs=None))
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: list[Any] = field(default_factory=list)
    prompt_embeds: Any = None

    @property
    def kv_transfer_params(self) -> Any:
        return self.params

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.prompt

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    def finish(self, status: str = "FINISHED_LENGTH_CAPPED") -> None:
        """As after a prefill with max_tokens=1, or another end."""
        self.num_computed_tokens = len(self.prompt)
        self.output = [7]
        self.status = SimpleNamespace(name=status)


def remote_params(**changes: Any) -> dict[str, Any]:
    """What a producer of 40 tokens answers and a router hands to decode."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "engine-p",
        "remote_request_id": "cmpl-1-abc",
        "remote_host": "10.0.0.2",
        "remote_port": 7001,
        "tp_size": 1,
        "remote_num_tokens": 40,
        "transfer_id": "t-1",
        "kvd": {
            "v": 1,
            "transfer_id": "t-1",
            "generation": 77,
            "ranks": [[0, 0, "10.0.0.2", 7001]],
        },
        **changes,
    }


def scheduler_half(
    *,
    block_sizes: tuple[int, ...] = (16,),
    num_blocks: int = 100,
    pp_size: int = 1,
    tp_size: int = 1,
    clock: Clock | None = None,
    up: bool = True,
    **settings: Any,
) -> SchedulerHalf:
    half = SchedulerHalf(
        EngineShape("engine-d", block_sizes, num_blocks, pp_size, tp_size),
        ShimSettings(**settings),
        clock=clock or Clock(),
        started_ns=1_000_000_000,
    )
    if up:
        half.update_daemons({(p, t): UP for p in range(pp_size) for t in range(tp_size)})
    return half


def jobs_of(half: SchedulerHalf) -> StepJobs:
    return half.take_jobs()


def memory_description(groups: Sequence[int] = (0,), num_blocks: int = 100) -> MemoryDescription:
    """A description without descriptors."""
    layers = tuple(
        LayerLayout(f"layer.{i}", group, [Region(0, i * 1000 * num_blocks, 1000, 1000)])
        for i, group in enumerate(groups)
    )
    geometry = Geometry(
        model="m",
        kv_dtype="bfloat16",
        block_size=16,
        total_kv_heads=1,
        kv_heads_per_rank=1,
        head_size=32,
        layout="x",
        layers=[(layer.name, layer.group, [1000]) for layer in layers],
    )
    return MemoryDescription((), layers, geometry, num_blocks)


@dataclass
class FakeClient:
    """Records calls; a test scripts what `poll` returns."""

    state: str = "up"
    welcome: Welcome | None = None
    daemon_pid: int = 0
    events: list[Event] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    raises: dict[str, ClientError] = field(default_factory=dict)
    memory: MemoryDescription | None = None
    fetched: dict[str, dict[str, Any]] = field(default_factory=dict)
    offered: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    closed: int = 0
    clock: Clock | None = None
    """Moved on by a poll that waits for nothing."""
    waits: list[float] = field(default_factory=list)
    later: list[Callable[[], None]] = field(default_factory=list)
    """What happens while polls wait, one thing each."""

    def __post_init__(self) -> None:
        self.welcome = Welcome(
            proto_major=PROTO_MAJOR,
            proto_minor=PROTO_MINOR,
            daemon_id="d-1",
            boot_id=1,
            advertise=PeerAddr("10.0.0.1", 7000),
            version="0",
        )

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def _call(self, name: str, *arguments: Any) -> None:
        self.calls.append((name, *arguments))
        if name in self.raises:
            raise self.raises[name]

    def describe(self, memory: MemoryDescription) -> None:
        self._call("describe", memory)
        self.memory = memory

    def poll(self, timeout: float = 0.0) -> list[Event]:
        if timeout:
            self.waits.append(timeout)
            if not self.events and self.later:
                self.later.pop(0)()
            elif not self.events and self.clock is not None:
                self.clock.now += timeout
        events, self.events = self.events, []
        return events

    def offer(
        self,
        transfer_id: str,
        generation: int,
        *,
        blocks: Sequence[Sequence[int]],
        digests: Mapping[int, bytes],
        tokens: int | None = None,
        lease_s: float,
        watched: bool = False,
    ) -> None:
        self._call("offer", transfer_id, generation)
        self.offered[transfer_id, generation] = {
            "blocks": [list(b) for b in blocks],
            "digests": dict(digests),
            "tokens": tokens,
            "lease_s": lease_s,
            "watched": watched,
        }

    def extend_blocks(
        self, transfer_id: str, generation: int, *, group: int, first: int, blocks: Sequence[int]
    ) -> bool:
        self._call("extend_blocks", transfer_id, generation, group, first)
        offer = self.offered.get((transfer_id, generation))
        if offer is None:
            return False
        table = offer["blocks"][group]
        assert len(table) == first
        table += blocks
        return True

    def extend(
        self,
        transfer_id: str,
        generation: int,
        *,
        tokens: int,
        first_layer: int = 0,
        num_layers: int = 0,
    ) -> bool:
        self._call("extend", transfer_id, generation, tokens, first_layer, num_layers)
        return (transfer_id, generation) in self.offered

    def seal(self, transfer_id: str, generation: int, *, tokens: int) -> bool:
        self._call("seal", transfer_id, generation, tokens)
        offer = self.offered.get((transfer_id, generation))
        if offer is None:
            return False
        offer["tokens"] = tokens
        return True

    def revoke(self, transfer_id: str, generation: int) -> bool:
        self._call("revoke", transfer_id, generation)
        if (transfer_id, generation) not in self.offered:
            return False
        self.end_offer(transfer_id, generation, Code.REVOKED)
        return True

    def revoke_all(self) -> int:
        self._call("revoke_all")
        for transfer_id, generation in list(self.offered):
            self.end_offer(transfer_id, generation, Code.REVOKED)
        return 0

    def fetch(self, transfer_id: str, **arguments: Any) -> str:
        self._call("fetch", transfer_id)
        fetch_id = str(arguments["fetch_id"])
        self.fetched[fetch_id] = {"transfer_id": transfer_id, **arguments}
        return fetch_id

    def cancel(self, fetch_id: str) -> bool:
        self._call("cancel", fetch_id)
        return True

    def release(
        self, transfer_id: str, *, remote: PeerAddr, engine_id: str, generation: int | None = None
    ) -> None:
        self._call("release", transfer_id, remote, engine_id, generation)

    def renew(
        self, transfer_id: str, *, remote: PeerAddr, engine_id: str, generation: int | None = None
    ) -> None:
        self._call("renew", transfer_id, remote, engine_id, generation)

    def close(self) -> None:
        self.closed += 1

    # --- what a test makes the daemon say ---------------------------------------------------

    def come_up(self) -> None:
        self.state = "up"
        assert self.welcome is not None
        self.events.append(Up(self.welcome, False))

    def end_fetch(
        self, fetch_id: str, code: str = Code.OK, bad: Sequence[Sequence[int]] = ()
    ) -> None:
        """`bad[g]`: indices of group g's blocks that are bad."""
        fetch = self.fetched[fetch_id]
        maps = []
        for group, blocks in enumerate(fetch["blocks"]):
            bitmap = bytearray(-(-len(blocks) // 8))
            for index in bad[group] if group < len(bad) else ():
                bitmap[index // 8] |= 1 << (index % 8)
            maps.append(bytes(bitmap))
        self.events.append(
            FetchDone(
                fetch_id=fetch_id,
                code=code,
                detail="",
                generation=1,
                bad=maps,
                tokens=fetch["end"] - fetch["start"],
                nbytes=4096,
                transport="shm",
                stages=Stages(),
            )
        )

    def end_offer(self, transfer_id: str, generation: int, reason: str = Code.RELEASED) -> None:
        del self.offered[transfer_id, generation]
        self.events.append(OfferEnded(transfer_id, generation, reason))
