"""Random input at every door of a live daemon: `python -m tests.hostile.fuzz --seconds 600`.

One door after the other gets a round of examples from a seed that is printed; the same seed gives
the same examples. After each round the daemon must have counted what it refused.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from kvd.protocol import local, peer
from kvd.protocol.types import PeerAddr
from kvd.protocol.version import PROTO_MAJOR
from kvd.transport.tcp_wire import Request, pack_request
from tests.conftest import wait_for
from tests.hostile.doors import DataDoor, HttpDoor, Insider, UnixDoor, ZmqDoor
from tests.hostile.messages import Known, pickle_that_touches
from tests.hostile.target import SETTLE_S, Target
from tests.integration.daemon.conftest import Site

EXAMPLES = 60
"""Of one round."""
Round = Callable[[int], None]


class Fuzzer:
    """Rounds at the doors of one target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.known: Known = target.known()
        self.context: zmq.Context[Any] = zmq.Context()
        self.unix = UnixDoor(target.p.socket)
        self.zmq = ZmqDoor(self.context, str(target.at))
        self.data = DataDoor(target.data_port)
        self.http = HttpDoor(target.http)
        self.numbers = itertools.count()
        self.examples = 0

    def close(self) -> None:
        self.context.destroy(0)

    def run(self, seconds: float, first_seed: int) -> None:
        """Rounds at each door in turn until the time is over; at least one at each."""
        doors: dict[str, Round] = {
            "unix": self.unix_round,
            "zmq": self.zmq_round,
            "data": self.data_round,
            "http": self.http_round,
        }
        deadline = time.monotonic() + seconds
        for number in itertools.count():
            if number >= len(doors) and time.monotonic() > deadline:
                break
            name = list(doors)[number % len(doors)]
            one, began = first_seed + number, time.monotonic()
            print(f"round {number}: {name}, seed {one}", flush=True)
            doors[name](one)
            assert self.target.p.popen.poll() is None, f"the daemon ended: {name}, seed {one}"
            print(f"  {time.monotonic() - began:.1f} s", flush=True)
        print(f"{self.examples} examples")

    # --- the doors --------------------------------------------------------------------------

    def unix_round(self, number: int) -> None:
        frames = self.known_here().frames(local.FromShim.__args__)
        scripts = st.lists(st.tuples(frames, st.sampled_from([0, 0, 0, 1, 1, 2, 17])), max_size=8)
        self._compared(
            number,
            st.tuples(st.integers(0, 2), scripts),
            lambda drawn: self.unix.attack(drawn[0], drawn[1], next(self.numbers)),
            told=lambda: self.unix.heard["Refused"],
            counted=lambda: self._dropped("session") + self._metric("kvd_refused_total"),
        )

    def known_here(self) -> Known:
        """An engine of the same user may say more than a stranger, but is not the good one."""
        values = {k: v for k, v in self.known.values.items() if k not in ("engine_id", "remote")}
        port = self.target.data_port  # a peer that speaks something else
        values["remote"] = tuple(
            PeerAddr(host, at, rank)
            for host, at, rank in (
                ("127.0.0.1", port, None), ("127.0.0.1", 1, None), ("192.0.2.1", 9, None),
                (*self.target.http, (0, 0)), ("no.such.host.invalid", 5, None),
            )
        )  # fmt: skip
        return Known(values, self.known.canary)

    def zmq_round(self, number: int) -> None:
        bodies = self.known.bodies(peer.ToProducer.__args__)
        heads = st.sampled_from([(2, 0)] * 8 + [(1, 0), (3, 0), (2**64 - 1, 0)])
        envelopes = st.builds(
            lambda head, epoch, body: encoded([head[0] - 2 + PROTO_MAJOR, head[1], epoch, body]),
            heads, st.sampled_from([5] * 8 + [0, 6, 2**63]), bodies,
        )  # fmt: skip
        frame = st.one_of(
            envelopes, envelopes, envelopes, self.known.damaged(envelopes), self.known.noise()
        )
        one_part = frame.map(lambda f: [f])
        parts = st.one_of(one_part, st.lists(frame, min_size=2, max_size=3))
        self._compared(
            number,
            st.tuples(st.booleans(), st.lists(st.one_of(parts, one_part), max_size=8)),
            lambda drawn: self.zmq.attack(drawn[0], drawn[1], next(self.numbers) % 64),
            told=lambda: sum(
                self.zmq.heard[n] for n in ("PeerRefused", "FetchRefused", "AttachRefused")
            ),
            counted=lambda: (
                self._dropped("peer_server")
                + self._metric("kvd_refused_total")
                + self._metric("kvd_attaches_total")
                - self.target.p.metric("kvd_attaches_total", code="ok")
            ),
        )

    def data_round(self, number: int) -> None:
        self.target.lay_bait()
        insider = Insider(self.target, self.zmq, f"insider-{number}")
        try:
            u32 = st.sampled_from([0, 1, 2, 3, 4, 2**31, 2**32 - 1])
            requests = st.builds(
                Request,
                u32,
                st.sampled_from([insider.ticket] * 3 + [b"\0" * 16]),
                st.sampled_from([0, 0, 0, 1, 2**16 - 1]),
                st.sampled_from([0, 0, 0, 1, 4, 2**32 - 1]),
                st.sampled_from([4, 4, 4, 0, 1, 2**32 - 1]),
                st.sampled_from([3 * 4 * 4096, 4 * 4096, 0, 1, 2**63]),
                st.lists(st.integers(0, 3), min_size=1, max_size=5).map(
                    lambda indices: np.array(indices, np.uint32)
                ),
            ).map(pack_request)
            frame = st.one_of(requests, requests, self.known.damaged(requests), self.known.noise())

            def attack(drawn: tuple[bool, list[bytes]]) -> None:
                insider.beat()
                self.data.attack(*drawn)

            self._compared(
                number,
                st.tuples(st.sampled_from([True, True, False]), st.lists(frame, max_size=6)),
                attack,
                told=lambda: self.data.heard["REFUSED"],
                counted=lambda: self._dropped("data"),
            )
        finally:
            insider.close()

    def http_round(self, number: int) -> None:
        paths = st.sampled_from(
            ["/metrics", "/v1/status", "/v1/transfers?last=5", "/v1/transfers?last=x", "/healthz",
             "/readyz", "/query", "/v1/drain", "/v1/transfers/bait/release", "/", "/../../etc",
             "/" + "a" * 5000, "/%00", "*", "http://elsewhere/metrics"]
        )  # fmt: skip
        methods = st.sampled_from(["GET", "GET", "GET", "HEAD", "POST", "PUT", "DELETE", "BREW"])
        header = st.sampled_from(
            ["Accept: */*", "Accept: application/openmetrics-text", "Expect: 100-continue",
             "Transfer-Encoding: identity", "X: " + "y" * 5000, "Connection: keep-alive",
             "Authorization: Bearer " + "z" * 100, "Cookie: a=b", "Upgrade: websocket",
             "Host: elsewhere", "Content-Encoding: gzip"]
        )  # fmt: skip
        good = st.builds(
            lambda method, path, headers: "\r\n".join(
                [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *headers, "", ""]
            ).encode(),
            methods, paths, st.lists(header, max_size=4),
        )  # fmt: skip
        bad_body = st.sampled_from(
            [b"POST /v1/drain HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\nx",
             b"POST /v1/drain HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
             b"ffffffff\r\n",
             b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
             b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
             + pickle_that_touches(self.known.canary)]
        )  # fmt: skip
        broken = st.one_of(self.known.damaged(good), self.known.noise(), bad_body)
        drawn = st.one_of(st.tuples(good, st.just(True)), st.tuples(broken, st.just(False)))
        self._compared(
            number,
            drawn,
            lambda drawn: self.http.attack(drawn[0], whole=drawn[1]),
            told=lambda: self.http.heard["4xx"],
            counted=lambda: self._dropped("http"),
        )

    # --- inside -----------------------------------------------------------------------------

    def _compared(
        self,
        number: int,
        drawn: st.SearchStrategy[Any],
        attack: Callable[[Any], None],
        *,
        told: Callable[[], float],
        counted: Callable[[], float],
    ) -> None:
        """One round. What the daemon told strangers that it refuses, it must have counted."""
        before_told, before_counted = told(), counted()

        @seed(number)
        @settings(
            max_examples=EXAMPLES, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(drawn)
        def examples(value: Any) -> None:
            self.examples += 1
            attack(value)

        examples()
        wait_for(
            lambda: told() - before_told <= counted() - before_counted, SETTLE_S,
            what=f"{told() - before_told:g} refusals are counted "
            f"({counted() - before_counted:g} are)",
        )  # fmt: skip

    def _dropped(self, where: str) -> float:
        return self.target.dropped(where)

    def _metric(self, name: str) -> float:
        return self.target.p.metric(name)


def encoded(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def fuzz(target: Target, seconds: float, first_seed: int) -> None:
    """The whole of it, against one target. Raises AssertionError."""
    fuzzer = Fuzzer(target)
    try:
        # Once through every door first, so that what is loaded once is not taken for a leak.
        fuzzer.run(0, first_seed + 1_000_000)
        with target.unharmed(), target.served_meanwhile():
            fuzzer.run(seconds, first_seed)
    finally:
        fuzzer.close()


@contextlib.contextmanager
def a_site() -> Iterator[Site]:
    folder = Path(tempfile.mkdtemp(prefix="kvdf-", dir="/tmp"))
    site = Site(folder)
    try:
        yield site
    except BaseException:
        print(site.logs(), file=sys.stderr)
        raise
    finally:
        site.close()
        shutil.rmtree(folder)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    with a_site() as site:
        fuzz(Target(site, site.folder), arguments.seconds, arguments.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
