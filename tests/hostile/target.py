"""A daemon to be attacked, and a good neighbour that is served by it all the while."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from kvd.protocol.codes import Code
from tests.conftest import wait_for
from tests.hostile.messages import Known
from tests.integration.daemon.conftest import Site
from tests.integration.daemon.engine import BLOCK_SIZE, Engine, digest

SEED = 7
MAX_GROWTH = 50 * 2**20
"""Bytes of memory that a daemon may hold more than before it was attacked."""
FD_MARGIN = 16
PRODUCER = "producer"
BAIT = "bait"
BAIT_BLOCKS = (9, 10, 11)
BAIT_DIGEST = digest(BAIT)
BAIT_TOKENS = len(BAIT_BLOCKS) * BLOCK_SIZE
SETTLE_S = 60.0


class Target:
    """`p`, which is attacked, serves an engine here; `d`, a good peer, fetches from it."""

    def __init__(self, site: Site, folder: Path, **settings: object) -> None:
        both = {"transport": "tcp", "log_level": "info", "peer_idle_s": 3, **settings}
        self.p = site.daemon("p", **both)
        self.d = site.daemon("d", **both)
        self.producer = site.engine(self.p.ready(), PRODUCER, seed=SEED)
        self.consumer = site.engine(self.d.ready(), "consumer")
        self.at = self.producer.up()
        self.consumer.up()
        memory = self.producer.client._memory
        assert memory is not None
        self.geometry = memory.geometry
        self.canary = folder / "executed"
        self.fetches = 0
        self._lock = threading.Lock()
        self._baits = 0
        self.lay_bait()

    @property
    def data_port(self) -> int:
        return int(self.p.found["data_port"])

    @property
    def http(self) -> tuple[str, int]:
        host, _, port = self.p.found["metrics"].rpartition(":")
        return host, int(port)

    def known(self) -> Known:
        """What a stranger can know: the engine and its geometry, but no good transfer's name."""
        return Known(
            {
                "engine_id": (PRODUCER, "stranger"),
                "geometry": (self.geometry,),
                "digest": (BAIT_DIGEST,),
                "transfer_id": (BAIT, "a"),
                "transports": (["tcp"], ["shm", "tcp"]),
                "end": (BAIT_TOKENS,),
                "start": (0,),
            },
            self.canary,
        )

    def lay_bait(self) -> None:
        """A stranger who reaches a port may release it, as routers do: then there is another."""
        with self._lock:
            self.producer.poll()
            if BAIT not in {transfer for transfer, _ in self.producer.client.offers}:
                self._baits += 1
                self.producer.offer(BAIT, BAIT_BLOCKS, generation=self._baits, lease_s=3600.0)

    def fetch(self, consumer: Engine | None = None) -> None:
        """One real transfer through the attacked daemon; every byte is looked at."""
        consumer = consumer or self.consumer
        name = str(uuid.uuid4())
        with self._lock:
            self.producer.offer(name, [1, 2, 3])
            done = consumer.fetch(name, [4, 5, 6], remote=self.at, engine_id=PRODUCER, park_s=10.0)
        assert done.code == Code.OK, done
        assert consumer.wrong(SEED, {4: 1, 5: 2, 6: 3}) == 0
        consumer.fill()
        self.fetches += 1

    def fetch_on_new_connections(self) -> None:
        """The same by an engine that has none yet."""
        other = Engine(self.d.socket, str(uuid.uuid4()))
        try:
            other.up()
            self.fetch(other)
        finally:
            other.close()

    @contextlib.contextmanager
    def served_meanwhile(self) -> Iterator[None]:
        """A good peer fetches before, during and after; raises what went wrong with it."""
        self.fetch()
        failure: list[BaseException] = []
        stop = threading.Event()
        before = self.fetches

        def run() -> None:
            try:
                while not stop.is_set():
                    self.fetch()
                    stop.wait(0.1)
            except BaseException as e:
                failure.append(e)

        thread = threading.Thread(target=run, name="good-neighbour")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(60)
        if failure:
            print(f"exit status {self.p.popen.poll()}\n{self.p.tail()}")
            raise failure[0]
        assert self.fetches > before, "nothing was fetched meanwhile"
        self.fetch()

    def dropped(self, where: str, reason: str = "") -> float:
        """What was thrown away so far at `where`, for `reason` or for any."""
        labels = {"where": where, "reason": reason} if reason else {"where": where}
        return self.p.metric("kvd_dropped_total", **labels)

    def waits_for_drop(self, where: str, reason: str, count: float) -> None:
        wait_for(
            lambda: self.dropped(where, reason) >= count, SETTLE_S,
            what=f"{count:g} {reason} counted at {where}, not {self.dropped(where, reason):g}",
        )  # fmt: skip

    @contextlib.contextmanager
    def unharmed(self) -> Iterator[None]:
        """Afterwards nothing was executed, and memory and descriptors are as before."""
        process = psutil.Process(self.p.pid)
        self.fetch()
        rss, fds = process.memory_info().rss, self.p.fds()
        started = time.monotonic()
        yield
        assert self.p.popen.poll() is None, "the daemon ended"
        wait_for(
            lambda: self.p.fds() <= fds + FD_MARGIN, SETTLE_S,
            what=f"descriptors are closed ({fds} before, {self.p.fds()} now)",
        )  # fmt: skip
        wait_for(
            lambda: process.memory_info().rss <= rss + MAX_GROWTH, SETTLE_S,
            what=f"memory as before: {(process.memory_info().rss - rss) / 2**20:.1f} MiB more",
        )  # fmt: skip
        assert not self.canary.exists(), "what came in was executed"
        assert process.children() == []
        lines = self.p.log.read_text().splitlines()
        errors = [line for line in lines if '"level": "error"' in line]
        assert not errors, f"the daemon met states that cannot be: {errors[:3]}"
        print(
            f"{time.monotonic() - started:.1f} s, {self.fetches} good fetches, "
            f"{(process.memory_info().rss - rss) / 2**20:+.1f} MiB"
        )
