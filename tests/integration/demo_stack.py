"""A `kvd demo --keep` for tests: two real engines that stay up, and daemons that may be killed."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from kvd.demo.client import Answer, Client, total

START_S = 1200.0
"""Two engines, on a machine that has other things to do as well."""
Name = Literal["prefill", "decode"]


class Demo:
    """A running `kvd demo`. Its report goes to `report`, what it tells to `told`."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.report = folder / "report.json"
        self.told = folder / "told.txt"
        with self.report.open("wb") as out, self.told.open("wb") as err:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "kvd", "demo", "--json", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "TMPDIR": str(folder)},
            )

    def wait_report(self) -> dict[str, Any]:
        """The report, once it is there. Fails with what the demo told when none comes."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            text = self.report.read_text()
            if text.endswith("}\n"):
                report: dict[str, Any] = json.loads(text)
                return report
            if self.popen.poll() is not None and not self.report.read_text():
                break
            time.sleep(0.2)
        raise AssertionError(f"no report (exit code {self.popen.poll()}):\n{self.told.read_text()}")

    def end(self) -> int:
        """Ctrl-C, once; returns the exit code. A demo that does not end is killed, and failed."""
        self.popen.send_signal(signal.SIGINT)
        try:
            return self.popen.wait(120)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
            raise

    def kill(self) -> None:
        """For a test that has failed: its children follow by themselves."""
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()

    def processes(self) -> list[psutil.Process]:
        """Everything that it started, and what those started."""
        try:
            return list(psutil.Process(self.popen.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return []


def check_report(report: dict[str, Any], transport: str) -> None:
    """The conditions are tested elsewhere; here it is that they held, and for what."""
    assert report["ok"], [check for check in report["checks"] if not check["ok"]]
    assert report["transports_used"] == [transport]
    assert len(report["rows"]) == 13
    for row in report["rows"]:
        assert row["identical"], row
        assert row["output_tokens"] >= 16 * row["n"]
        assert row["fetched_tokens"] == row["prompt_tokens"] - row["local_hits"] > 0
        assert row["blocks"] == row["due_blocks"] > 0
    totals = report["totals"]
    assert totals["fetched_tokens"] == totals["external_prefix_cache_hits"]
    assert totals["fetched_bytes"] == totals["served_bytes"] == totals["due_bytes"]
    assert 2 * report["control"]["differing"] > report["control"]["answers"]


@contextmanager
def kept_demo(root: Path, *arguments: str) -> Iterator[Kept]:
    """`kvd demo --keep`, up until the block ends; then it must end with exit code 0."""
    with tempfile.TemporaryDirectory(dir=root, prefix="") as folder:
        demo = Demo(Path(folder), "--keep", *arguments)
        kept = None
        try:
            kept = Kept(demo, demo.wait_report())
            yield kept
        finally:
            if kept is not None:
                kept.end_daemons()
            code = demo.end() if demo.popen.poll() is None else demo.popen.returncode
        assert code == 0, demo.told.read_text()
        left = [path.name for path in demo.folder.iterdir() if "-again-" not in path.name]
        assert sorted(left) == ["report.json", "told.txt"]


@dataclass
class Kept:
    """Handles of a stack that is up. `daemons` are those that the test started itself."""

    demo: Demo
    report: dict[str, Any]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def keep(self) -> dict[str, Any]:
        keep: dict[str, Any] = self.report["keep"]
        return keep

    @property
    def url(self) -> str:
        return str(self.keep["url"])

    def engine_url(self, name: Name) -> str:
        return str(self.keep["engines"][name])

    def engine_pids(self) -> list[int]:
        """The servers, and the processes in which they compute."""
        servers = [psutil.Process(self.keep["pids"][f"{n} engine"]) for n in ("prefill", "decode")]
        return sorted(p.pid for server in servers for p in [server, *server.children(True)])

    def daemon_pid(self, name: Name) -> int:
        started = self.daemons.get(name)
        return started.pid if started else int(self.keep["pids"][f"{name} daemon"])

    def signal_daemon(self, name: Name, number: signal.Signals) -> None:
        os.kill(self.daemon_pid(name), number)

    def kill_daemon(self, name: Name) -> None:
        """SIGKILL; returns when it is dead, and its sockets with it."""
        pidfd = os.pidfd_open(self.daemon_pid(name))
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            assert select.select([pidfd], [], [], 30)[0], f"the {name} daemon does not die"
        finally:
            os.close(pidfd)

    def restart_daemon(self, name: Name) -> None:
        """Start it again as an operator would, with the line that the demo printed.

        A stopped one is killed first, which is what a supervisor's watchdog does.
        """
        self._kill(name)
        log = self.demo.folder / f"{name}-again-{time.time_ns()}.log"
        with log.open("wb") as out:
            self.daemons[name] = subprocess.Popen(
                self.keep["daemon_argv"][name], stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def _kill(self, name: Name) -> None:
        started = self.daemons.pop(name, None)
        if started is not None:
            started.kill()
            started.wait(30)
            return
        try:
            process = psutil.Process(int(self.keep["pids"][f"{name} daemon"]))
        except psutil.NoSuchProcess:
            return
        if process.status() != psutil.STATUS_ZOMBIE:
            process.kill()

    def end_daemons(self) -> None:
        for name in list(self.daemons):
            self.daemons[name].terminate()
            self.daemons.pop(name).wait(60)

    async def fetched_bytes(self, client: Client) -> int:
        """Bytes that decode's present daemon counted."""
        metrics = await client.metrics(str(self.keep["metrics"]["decode daemon"]))
        return round(total(metrics, "kvd_fetched_bytes_total"))

    async def served_bytes(self, client: Client) -> int:
        """Bytes that prefill's present daemon counted."""
        metrics = await client.metrics(str(self.keep["metrics"]["prefill daemon"]))
        return round(total(metrics, "kvd_served_bytes_total"))

    def logs(self, lines: int = 40) -> str:
        """The ends of all logs, for a failure's text."""
        files = [*self.keep["logs"].values(), *map(str, self.demo.folder.glob("*-again-*.log"))]
        tails = ((f, Path(f).read_text(errors="replace").splitlines()[-lines:]) for f in files)
        return "\n".join(f"--- {file}\n" + "\n".join(tail) for file, tail in tails)

    async def daemon_ready(self, client: Client, name: Name) -> bool:
        url = str(self.keep["metrics"][f"{name} daemon"]).replace("/metrics", "/readyz")
        return await client.status(url) == 200

    async def is_back(self, client: Client, name: Name) -> bool:
        """Whether a daemon is ready, and no other one still tries to reach it."""
        if not await self.daemon_ready(client, name):
            return False
        metrics = await client.metrics(str(self.keep["metrics"]["decode daemon"]))
        trying = [total(metrics, "kvd_peers", state=state) for state in ("connecting", "down")]
        return sum(trying) == 0


def prompt(number: int, tokens: int = 150) -> str:
    """Text that starts as no other number's does."""
    return f"{number}: {'the cache is moved from one engine to the other, and ' * 40}"[:tokens]


async def ask(client: Client, url: str, number: int, salt: str, output: int = 24) -> Answer:
    """One greedy completion."""
    return await client.complete(
        url,
        {
            "model": "demo",
            "prompt": prompt(number, 100 + 13 * (number % 17)),
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": salt,
            "return_token_ids": True,
            "stream": True,
        },
    )


async def alone(client: Client, kept: Kept, number: int) -> list[list[int]]:
    """What one engine answers by itself to the same prompt."""
    answer = await ask(
        client, kept.engine_url("prefill"), number, f"alone-{number}-{time.time_ns()}"
    )
    assert not answer.error, answer.error
    return answer.tokens


@dataclass
class Asked:
    """A request of `Traffic`, and when it was sent (monotonic seconds)."""

    number: int
    sent: float
    answer: Answer


class Traffic:
    """Asks one prompt after the other, over several lines, until it is told to stop."""

    def __init__(self, client: Client, kept: Kept, salt: str, lines: int = 3) -> None:
        self.asked: list[Asked] = []
        self._client = client
        self._kept = kept
        self._salt = salt
        self._next = 0
        self._stop = False
        self._tasks = [asyncio.create_task(self._line()) for _ in range(lines)]

    async def _line(self) -> None:
        while not self._stop:
            self._next += 1
            number, sent = self._next, time.monotonic()
            answer = await ask(self._client, self._kept.url, number, self._salt)
            self.asked.append(Asked(number, sent, answer))

    async def stop(self) -> list[Asked]:
        """Lets what is under way end; returns everything that was asked."""
        self._stop = True
        await asyncio.gather(*self._tasks)
        return self.asked
