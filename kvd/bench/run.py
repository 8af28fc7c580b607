"""`kvd bench`: two daemons and two plain clients on loopback, measured against the machine.

Each round fetches `concurrency` requests at once, each into blocks chosen at random from blocks
chosen at random. Between rounds, outside the timed part: every byte is checked, the destination is
wiped, and the limit program moves the same blocks by itself, because the speed of a shared machine
drifts from one second to the next.
"""

from __future__ import annotations

import contextlib
import os
import platform
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvd import __version__
from kvd.bench.interrupts import interrupts_ignored, interrupts_wait
from kvd.bench.limit import Limit, LimitSummary, LimitUnavailable, build
from kvd.bench.memory import Shape, allocate, pool_blocks
from kvd.bench.presets import Preset
from kvd.bench.processes import ClientProcess, Daemon, ProcessFailed, cpu_seconds
from kvd.bench.report import Result
from kvd.config import Settings
from kvd.transport.base import TransportError
from kvd.transport.tcp_socket import LOOPBACK_CONGESTION, check_congestion

PRODUCER = "bench-producer"
CONSUMER = "bench-consumer"
DEFAULT_CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")

Transfer = tuple[str, list[int], list[int]]
"""Transfer id, the producer's blocks, the consumer's blocks."""
OnRound = Callable[[int, int, float], None]
"""Rounds done, rounds in all, GB/s of the last one."""


class BenchFailed(Exception):
    """Bytes were wrong, or a request did not succeed."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure. `settings`: of both daemons; `damage`: spoil a destination on purpose."""

    transport: str
    preset: Preset
    requests: int
    concurrency: int
    settings: Settings
    overrides: dict[str, str] = field(default_factory=dict)
    damage: str | None = None
    seed: int | None = None


@dataclass(slots=True)
class Measured:
    """All measured rounds."""

    gbs: list[float] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    nbytes: int = 0
    producer_cpu: float = 0.0
    consumer_cpu: float = 0.0


class Bench:
    """Everything that runs while the bench does."""

    def __init__(
        self, options: Options, stack: contextlib.ExitStack, daemons: list[Daemon]
    ) -> None:
        """Starts the processes; `stack` ends them, last started first. Fills `daemons`."""
        self._options = options
        preset = options.preset
        self._random = random.Random(options.seed)
        self._pool = pool_blocks(preset.blocks * options.concurrency, preset.piece)
        shape = Shape(preset.layers, self._pool, preset.piece)
        with interrupts_wait():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-bench-")))
        src, dst = (self._memory(shape, stack) for _ in range(2))

        settings = {"transport": options.transport, **options.overrides}
        self._daemons = daemons
        for name in ("producer", "consumer"):
            with interrupts_wait():
                daemon = Daemon(f"{name}-daemon", folder, settings)
                stack.callback(daemon.stop)
            self._daemons.append(daemon)
        for daemon in self._daemons:
            daemon.wait_ready()

        sizes = {"layers": preset.layers, "blocks": self._pool, "piece": preset.piece}
        self._clients: list[ClientProcess] = []
        for daemon, role, engine_id, fds in zip(
            self._daemons, ("producer", "consumer"), (PRODUCER, CONSUMER), (src, dst), strict=True
        ):
            setup = {"socket": str(daemon.socket), "role": role, "engine_id": engine_id, **sizes}
            with interrupts_wait():
                client = ClientProcess(f"{role}-client", folder, fds, setup)
                stack.callback(client.stop)
            self._clients.append(client)
        self.producer, self.consumer = self._clients

        self.limit: Limit | None = None
        self.limit_note = ""
        try:
            binary = build(folder)
        except LimitUnavailable as error:
            self.limit_note = str(error)
        else:
            with interrupts_wait():
                self.limit = stack.enter_context(
                    Limit(
                        binary,
                        options.transport,
                        src_fds=src,
                        dst_fds=dst,
                        layers=preset.layers,
                        src_blocks=self._pool,
                        dst_blocks=self._pool,
                        piece=preset.piece,
                        threads=options.settings.shm_threads,
                        congestion=congestion_control(options.settings),
                    )
                )
        for client in self._clients:
            client.answer()
            client.send({"op": "up"})
        addresses = [client.answer() for client in self._clients]
        self._remote = {"host": addresses[0]["host"], "port": addresses[0]["port"]}

    @staticmethod
    def _memory(shape: Shape, stack: contextlib.ExitStack) -> list[int]:
        fds = allocate(shape)
        for fd in fds:
            stack.callback(os.close, fd)
        return fds

    def prepare(self, number: int) -> list[Transfer]:
        """Choose the blocks of round `number`, and offer them."""
        count, at_once = self._options.preset.blocks, self._options.concurrency
        src = self._random.sample(range(self._pool), count * at_once)
        dst = self._random.sample(range(self._pool), count * at_once)
        transfers = [
            (f"bench-{number}-{i}", src[i * count :][:count], dst[i * count :][:count])
            for i in range(at_once)
        ]
        self.producer.ask("offer", transfers=[(name, blocks) for name, blocks, _ in transfers])
        return transfers

    def measure_limit(self, transfers: list[Transfer]) -> None:
        if self.limit is not None:
            src = [block for _, blocks, _ in transfers for block in blocks]
            dst = [block for _, _, blocks in transfers for block in blocks]
            self.limit.measure(src, dst)

    def round(self, transfers: list[Transfer], into: Measured | None) -> float:
        """One round, checked; returns its seconds. Raises BenchFailed, ProcessFailed."""
        self.consumer.ask("wipe")
        before = [cpu_seconds(daemon.pid) for daemon in self._daemons]
        answer = self.consumer.ask("fetch", transfers=transfers, engine_id=PRODUCER, **self._remote)
        wrong = self.consumer.ask("verify", damage=self._options.damage)["wrong_words"]
        after = [cpu_seconds(daemon.pid) for daemon in self._daemons]
        for request in answer["requests"]:
            self._check(request)
        if wrong:
            raise BenchFailed(f"{wrong} words of 8 bytes are wrong")
        seconds = float(answer["seconds"])
        if into is not None:
            nbytes = len(transfers) * self._options.preset.nbytes
            into.gbs.append(nbytes / seconds / 1e9)
            into.requests += answer["requests"]
            into.nbytes += nbytes
            into.producer_cpu += after[0] - before[0]
            into.consumer_cpu += after[1] - before[1]
        return seconds

    def _check(self, request: dict[str, Any]) -> None:
        if request["code"] != "ok":
            raise BenchFailed(f"a fetch ended in {request['code']}: {request['detail']}")
        if request["nbytes"] != self._options.preset.nbytes:
            raise BenchFailed(
                f"a fetch says {request['nbytes']} bytes, not {self._options.preset.nbytes}"
            )
        if request["transport"] != self._options.transport:
            raise BenchFailed(
                f"a fetch went over {request['transport']}, not {self._options.transport}"
            )


def congestion_control(settings: Settings) -> str:
    """What the tcp transport asks for on loopback; "" leaves the system's default."""
    if settings.tcp_congestion:
        return settings.tcp_congestion
    try:
        check_congestion(LOOPBACK_CONGESTION)
    except TransportError:
        return ""
    return LOOPBACK_CONGESTION


@contextlib.contextmanager
def started(options: Options) -> Iterator[Bench]:
    """A bench with everything running; everything is gone afterwards."""
    stack = contextlib.ExitStack()
    daemons: list[Daemon] = []
    try:
        yield Bench(options, stack, daemons)
    except (BenchFailed, ProcessFailed) as error:
        # The reason is with the daemons more often than not, and their logs are about to go.
        complaints = "".join(daemon.complaints() for daemon in daemons)
        raise type(error)(f"{error}{complaints}") from None
    finally:
        with interrupts_ignored():
            stack.close()


def run(options: Options, on_round: OnRound) -> Result:
    """Measure. Raises BenchFailed, ProcessFailed, LimitFailed, or OSError for want of memory."""
    rounds = -(-options.requests // options.concurrency)
    measured = Measured()
    with started(options) as bench:
        transfers = bench.prepare(0)
        first_s = bench.round(transfers, None)
        transfers = bench.prepare(1)
        for number in range(1, rounds + 1):
            # Offered a whole round ahead, so that no fetch waits for its offer.
            following = bench.prepare(number + 1) if number < rounds else transfers
            bench.measure_limit(transfers)
            bench.round(transfers, measured)
            on_round(number, rounds, measured.gbs[-1])
            if number == rounds:
                bench.measure_limit(transfers)
            transfers = following
        limit = bench.limit.summary() if bench.limit is not None else None
        return _result(options, measured, first_s, limit, bench.limit_note)


def _congestion(options: Options, limit: LimitSummary | None) -> str | None:
    """What tcp ran under: the limit's own socket knows, else what was set, else the system."""
    if options.transport != "tcp":
        return None
    if limit is not None:
        return limit.congestion
    named = congestion_control(options.settings)
    if named:
        return named
    try:
        return DEFAULT_CONGESTION.read_text().strip()
    except OSError:
        return None


def _result(
    options: Options, measured: Measured, first_s: float, limit: LimitSummary | None, note: str
) -> Result:
    preset, gb = options.preset, measured.nbytes / 1e9
    gbs = median(measured.gbs)
    times = [request["seconds"] * 1e3 for request in measured.requests]

    def stage(name: str) -> float:
        return float(median(request[name] * 1e3 for request in measured.requests))

    return Result(
        transport=options.transport,
        preset=preset.name,
        requests=len(measured.requests),
        concurrency=options.concurrency,
        pieces=preset.pieces,
        piece_bytes=preset.piece,
        request_bytes=preset.nbytes,
        verified=True,
        gbs=gbs,
        gbs_min=min(measured.gbs),
        gbs_max=max(measured.gbs),
        limit_gbs=None if limit is None else limit.gbs,
        ratio=None if limit is None else gbs / limit.gbs,
        limit_method=None if limit is None else limit.method,
        limit_methods={} if limit is None else limit.by_method,
        limit_samples=0 if limit is None else limit.samples,
        limit_note=note,
        p50_ms=float(np.percentile(times, 50)),
        p99_ms=float(np.percentile(times, 99, method="higher")),
        first_ms=first_s * 1e3,
        granted_ms=stage("granted"),
        first_byte_ms=stage("first_byte"),
        last_byte_ms=stage("last_byte"),
        cpu_s_per_gb=(measured.producer_cpu + measured.consumer_cpu) / gb,
        producer_cpu_s_per_gb=measured.producer_cpu / gb,
        consumer_cpu_s_per_gb=measured.consumer_cpu / gb,
        limit_cpu_s_per_gb=None if limit is None else limit.cpu_s_per_gb,
        threads=options.settings.shm_threads if options.transport == "shm" else None,
        streams=options.settings.tcp_streams if options.transport == "tcp" else None,
        congestion_control=_congestion(options, limit),
        verify=options.settings.verify,
        settings=options.overrides,
        version=__version__,
        cpus=len(os.sched_getaffinity(0)),
        kernel=platform.release(),
    )
