"""One site under fire: asks for transfers, breaks things, and keeps what engines say of it."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.namespaces import Cable
from tests.chaos.plans import PROCESS_FAULTS, FaultPlan, Faults, TransferPlan, Transfers
from tests.chaos.site import BLOCK_BYTES, DAEMONS, KILLABLE, LAYERS, Site

PRODUCERS, CONSUMERS = ("pk", "ps"), ("dk", "ds")
DEPTH = 24
"""Transfers that are under way at once, at one site."""
FAULT_EVERY_S = 1.2
QUIET_S = 30.0
LATE_S = 40.0
"""A fetch that is not told for so long, while its engine and daemon run, is not told at all."""
MIB = 2**20


@dataclass(slots=True)
class Live:
    """A transfer under way: what it was, who takes part, which fetches are not told."""

    plan: TransferPlan
    producer: str
    open: set[str]
    since: float
    hit: bool = False


@dataclass
class Run:
    """One site, its random streams and what has been counted."""

    site: Site
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    live: dict[str, Live] = field(default_factory=dict)
    samples: list[dict[str, dict[str, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        name = self.site.transport
        self._transfers = Transfers(self.seed, name, len(PRODUCERS), len(CONSUMERS))
        self._faults = Faults(self.seed, name, FAULT_EVERY_S)
        self._fault = self._faults.next()
        self._fault_at = time.monotonic() + self._fault.pause_s
        self._ends: list[tuple[float, Callable[[], None]]] = []
        self._use = 0
        self._answers: dict[str, dict[str, Any]] = {}
        self.requests = True
        self.faults = True

    # --- transfers --------------------------------------------------------------------------

    def request(self) -> None:
        plan = self._transfers.next()
        self._use += 1
        producer = PRODUCERS[plan.producer]
        wanted = {CONSUMERS[fetch.consumer]: fetch for fetch in plan.fetches}
        site = self.site
        if not all(n in site.engines and site.engines[n].up for n in (producer, *wanted)):
            self.counts["not_possible"] += 1
            return
        tid = f"{site.transport}-{self._use}"
        self.live[tid] = Live(plan, producer, set(wanted), time.monotonic())
        self.counts["transfers"] += 1
        self.counts["over_1_mib"] += plan.blocks * LAYERS * BLOCK_BYTES > MIB
        self.counts["streamed"] += plan.chunks > 0
        site.engines[producer].tell("prefill", tid=tid, use=self._use, **plan.offer())
        for name, fetch in wanted.items():
            blocks = plan.blocks - fetch.short
            site.engines[name].tell(
                "fetch",
                tid=tid,
                use=self._use,
                number=site.number(producer),
                engine_id=f"e{producer}",
                remote=site.remotes[producer],
                blocks=blocks,
                start=min(fetch.start, blocks - 1),
                tokens=16 * blocks if fetch.short else plan.tokens,
                delay_s=fetch.delay_s,
                cancel_s=fetch.cancel_s,
                deadline_s=fetch.deadline_s,
                park_s=fetch.park_s,
                misled=fetch.misled,
                release=fetch.release,
                sole=len(wanted) == 1,
            )

    def _ended(self, tid: str, consumer: str) -> None:
        live = self.live.get(tid)
        if live is None:
            return
        live.open.discard(consumer)
        if not live.open:
            del self.live[tid]

    # --- what engines say -------------------------------------------------------------------

    def hear(self, name: str, said: list[dict[str, Any]] | None) -> None:
        if said is None:
            self._engine_ended(name)
            return
        engine = self.site.engines[name]
        for message in said:
            match message["ev"]:
                case "up":
                    engine.up = True
                case "down":
                    engine.up = False
                case "done":
                    self.counts[f"told {message['code']}"] += 1
                    self.counts["told"] += 1
                    self.counts["bytes"] += message["nbytes"]
                    self._ended(message["tid"], name)
                case "not_asked":
                    self.counts["not_asked"] += 1
                    self._ended(message["tid"], name)
                case "full":
                    self.counts["full"] += 1
                    if name in CONSUMERS:
                        self._ended(message["tid"], name)
                case "violation":
                    self.violations.append(f"{engine.name}: {message['what']}")
                case "audited":
                    self._answers[name] = message
                case other:
                    self.counts[other] += 1

    def _engine_ended(self, name: str) -> None:
        """A killed engine; any other end is a fault of the suite, or of the client."""
        engine = self.site.engines[name]
        status = engine.wait()
        if status != -signal.SIGKILL:
            self.violations.append(f"{engine.name} ended with {status}: {engine.tail()}")
        self.site.drop_engine(name)
        for tid in [t for t, live in self.live.items() if name in live.open]:
            self._ended(tid, name)
        self.site.start_engine(name)

    # --- faults -----------------------------------------------------------------------------

    def _hit(self, names: tuple[str, ...]) -> None:
        for live in self.live.values():
            if live.producer in names or live.open & set(names):
                self.counts["hits"] += 1
                self.counts["transfers_hit"] += not live.hit
                live.hit = True

    def fault(self, plan: FaultPlan) -> None:
        site = self.site
        kind = plan.kind
        names = KILLABLE if kind in ("kill_daemon", "drain_daemon", "stop_long") else DAEMONS
        name = names[int(plan.target * len(names))]
        proxied = kind in ("stall", "cut", "refuse")
        keeper, engine = site.daemons[name], site.engines[name]
        if not proxied and (keeper.stopped or engine.stopped or engine.popen.poll() is not None):
            self.counts["faults_skipped"] += 1
            return
        self.counts[f"fault {kind}"] += 1
        self.counts["faults"] += 1
        self.counts["process_faults"] += kind in PROCESS_FAULTS
        cable = isinstance(site.network, Cable)
        self._hit((PRODUCERS if cable else ("ps",)) if proxied else (name,))
        match kind:
            case "kill_engine":
                engine.kill(signal.SIGKILL)
            case "kill_daemon":
                keeper.signal(signal.SIGKILL)
            case "drain_daemon":
                keeper.signal(signal.SIGTERM)
            case "stop_daemon" | "stop_long":
                keeper.stopped = True
                keeper.signal(signal.SIGSTOP)
                daemon = keeper.daemon

                def resume() -> None:
                    if keeper.daemon is daemon:
                        keeper.stopped = False
                        keeper.signal(signal.SIGCONT)

                self._later(plan.lasts_s, resume)
            case "stop_engine":
                engine.stopped = True
                engine.kill(signal.SIGSTOP)

                def go_on() -> None:
                    engine.stopped = False
                    if engine.popen.poll() is None:
                        engine.kill(signal.SIGCONT)

                self._later(plan.lasts_s, go_on)
            case _:
                network = site.network
                assert network is not None
                if isinstance(network, Cable) or kind == "stall":
                    network.stall()
                elif kind == "cut":
                    network.cut()
                else:
                    network.refuse()
                self._later(plan.lasts_s, network.heal)

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._ends.append((time.monotonic() + seconds, what))

    def _revive(self) -> None:
        for name, keeper in self.site.daemons.items():
            status = keeper.revive()
            if status is None:
                continue
            self.counts["daemon_starts"] += 1
            if keeper.steady or status not in (0, -signal.SIGKILL):
                tail = keeper.daemon.tail()
                self.violations.append(f"daemon {name} ended by itself with {status}: {tail}")

    # --- the loop ---------------------------------------------------------------------------

    def step(self, seconds: float) -> None:
        now = time.monotonic()
        self._revive()
        due = [what for at, what in self._ends if at <= now]
        self._ends = [entry for entry in self._ends if entry[0] > now]
        for what in due:
            what()
        if self.faults and now >= self._fault_at:
            self.fault(self._fault)
            self._fault = self._faults.next()
            self._fault_at = now + self._fault.pause_s
        if self.requests and len(self.live) < DEPTH:
            self.request()
            seconds = min(seconds, 0.002)
        for name, said in self.site.wait(seconds):
            self.hear(name, said)
        self._check_late(now)

    def _check_late(self, now: float) -> None:
        for tid, live in list(self.live.items()):
            if now - live.since > LATE_S:
                self.violations.append(f"{tid} was never told to {sorted(live.open)}: {live.plan}")
                del self.live[tid]

    def quiet(self) -> None:
        """No new transfers and faults; waits until everything has ended, and takes a sample."""
        self.requests = self.faults = False
        deadline = time.monotonic() + QUIET_S + LATE_S
        while True:
            self.step(0.05)
            if time.monotonic() > deadline:
                self.violations.append(f"not quiet within {QUIET_S + LATE_S:g} s: {self._answers}")
                break
            if self.live or self._ends or not all(e.up for e in self.site.engines.values()):
                continue
            if self._all_idle():
                break
        self.samples.append({n: k.holds() for n, k in self.site.daemons.items() if k.steady})
        self.requests = self.faults = True
        self._fault_at = time.monotonic() + self._fault.pause_s

    def _all_idle(self) -> bool:
        """Asks each engine for an audit of all its blocks and for what it still holds."""
        self._answers.clear()
        asked = list(self.site.engines.values())
        for engine in asked:
            engine.tell("audit")
        until = time.monotonic() + 10.0
        while len(self._answers) < len(asked) and time.monotonic() < until:
            for name, said in self.site.wait(0.05):
                self.hear(name, said)
        return len(self._answers) == len(asked) and all(
            answer["state"] == "up" and not answer["offers"] and not answer["fetches"]
            for answer in self._answers.values()
        )

    def check_flat(self) -> None:
        """Daemons that were never killed hold what they held after the warm-up."""
        first, last = self.samples[0], self.samples[-1]
        for name, before in first.items():
            after = last[name]
            room = {"fds": 16, "threads": 8, "anon_kib": 24 * 1024 + before["anon_kib"] // 5}
            for what, margin in room.items():
                if after[what] > before[what] + margin:
                    self.violations.append(
                        f"daemon {name} holds more {what}: {before[what]}, then {after[what]}"
                    )

    def check_loops(self) -> None:
        """No callback held up a daemon's loop; of what a daemon did before it was killed, too."""
        for name, keeper in self.site.daemons.items():
            for line in keeper.daemon.slow_callbacks():
                self.violations.append(f"daemon {name}: {line}")
