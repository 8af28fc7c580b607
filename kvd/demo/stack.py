"""The demo's five processes: two daemons, two engines, one router. Up together, down together."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal

from kvd.demo.client import Client, DemoError, until
from kvd.demo.daemons import DAMAGE, SERVE, Daemon, sessions, start_daemon
from kvd.demo.engines import CHUNK, STREAM_CHUNK, Engine, Policy, running, start_engine
from kvd.demo.model import ModelShape, write_model
from kvd.demo.narrator import Narrator
from kvd.demo.ports import Ports
from kvd.demo.processes import Child, Children
from kvd.demo.proxy import READY, fetch_proxy, start_proxy
from kvd.demo.router import start_router

Mode = Literal["pull", "stream", "mooncake"]
"""Decode is asked after prefill has ended, or ("stream") at the same moment. "mooncake" is after,
by a router that knows prefill's bootstrap service instead of prefill's answer."""

ENGINE_START_S = 900.0
ROUTER_START_S = 60.0
REGISTER_S = 60.0
IDLE_S = 30.0

NEEDED = {
    "vllm": "vLLM's CPU build; `make venv` installs it",
    "vllm_router": "the router in front of the engines: pip install vllm-router",
}


def check_installed() -> None:
    """Raises DemoError that names what is missing, before anything is started."""
    for module, what in NEEDED.items():
        if importlib.util.find_spec(module) is None:
            raise DemoError(f"{module} is not installed ({what})")


class Stack:
    """Everything that the demo starts, and the folder that it keeps its files in.

    Leaving the context ends every process and removes the folder, unless `keep_folder` was set.
    """

    def __init__(
        self,
        narrator: Narrator,
        config: Mapping[str, str],
        policy: Policy,
        mode: Mode = "pull",
    ) -> None:
        self.narrator = narrator
        self.mode: Mode = mode
        self.config = dict(config)
        self.policy: Policy = policy
        self.shape = ModelShape()
        self.children = Children()
        self.keep_folder = False
        self.folder: Path
        self.client: Client
        self.daemons: dict[str, Daemon] = {}
        self.engines: dict[str, Engine] = {}
        self.router: Child | None = None
        self.router_url = ""
        self.router_metrics_url = ""
        self._ports = Ports()
        self._proxy: Path | None = None

    async def __aenter__(self) -> Stack:
        self.folder = Path(tempfile.mkdtemp(prefix="kvd-demo-"))
        self.client = Client()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # In a task of its own: whoever cancels us again must not cancel the cleaning up.
        cleaning = asyncio.create_task(self._clean())
        while not cleaning.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(cleaning)
        cleaning.result()

    async def _clean(self) -> None:
        router = [self.router] if self.router else []
        engines = [engine.child for engine in self.engines.values()]
        # Daemons last: an engine that goes takes its offers back, and the daemon has nothing left.
        await self.children.stop_all([router + engines])
        await self.client.aclose()
        self._ports.__exit__(None, None, None)
        if not self.keep_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    # --- up ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start all of it. Raises DemoError, OSError."""
        check_installed()
        say = self.narrator.say
        if self.mode == "stream":
            say("  vLLM's Mooncake proxy is looked up (it is fetched the first time)")
            self._proxy = await asyncio.to_thread(fetch_proxy)
        write_model(self.folder / "model", shape=self.shape)
        # The daemons first: a setting that they refuse is told at once, not after 40 seconds.
        for name in ("prefill", "decode"):
            self.daemons[name] = await start_daemon(
                self.children, self.client, name, folder=self.folder, config=self.config
            )
        say(
            f"  two daemons are up (kvd serve, pids {self.daemons['prefill'].child.pid} and "
            f"{self.daemons['decode'].child.pid})"
        )
        for name in ("prefill", "decode"):
            self.engines[name] = start_engine(
                self.children,
                "prefill" if name == "prefill" else "decode",
                model=self.folder / "model",
                folder=self.folder,
                port=self._ports.reserve(),
                socket=self.daemons[name].socket,
                policy=self.policy,
                chunk=STREAM_CHUNK if self.mode == "stream" else CHUNK,
            )
        await self._wait_for_engines()
        for name in ("prefill", "decode"):
            await self.wait_registered(name)
        say("  both engines serve, and have shared their KV memory with their daemons")
        if self._proxy is not None:
            await self._start_proxy(self._proxy)
            say(f"  vLLM's Mooncake proxy is in front of them: {self.router_url}")
        else:
            await self._start_router()
            say(f"  vllm-router is in front of them: {self.router_url}")

    async def _wait_for_engines(self) -> None:
        logs = {engine.child.name: engine.child.log for engine in self.engines.values()}
        with self.narrator.engines(logs) as progress:

            async def healthy() -> bool:
                progress.look()
                self.check_alive()
                states = [
                    await self.client.status(f"{engine.url}/health")
                    for engine in self.engines.values()
                ]
                return all(state == 200 for state in states)

            await until(
                healthy, ENGINE_START_S, f"both engines serve (logs in {self.folder})", every=0.5
            )

    async def _start_router(self) -> None:
        port = self._ports.reserve()
        metrics_port = self._ports.reserve()
        self.router = start_router(
            self.children,
            prefill=self.engines["prefill"].url,
            decode=self.engines["decode"].url,
            port=port,
            metrics_port=metrics_port,
            folder=self.folder,
            bootstrap_port=self._bootstrap_port() if self.mode == "mooncake" else None,
        )
        self.router_url = f"http://127.0.0.1:{port}"
        self.router_metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"

        async def ready() -> bool:
            self.check_alive()
            return await self.client.status(f"{self.router_url}/health") == 200

        await until(ready, ROUTER_START_S, f"the router serves (its log: {self.router.log})")

    def _bootstrap_port(self) -> int:
        return int(self.daemons["prefill"].bootstrap.rpartition(":")[2])

    async def _start_proxy(self, script: Path) -> None:
        port = self._ports.reserve()
        router = start_proxy(
            self.children,
            script,
            prefill=self.engines["prefill"].url,
            bootstrap_port=self._bootstrap_port(),
            decode=self.engines["decode"].url,
            port=port,
            folder=self.folder,
        )
        self.router = router
        self.router_url = f"http://127.0.0.1:{port}"

        async def ready() -> bool:
            self.check_alive()
            return READY in router.log.read_text(encoding="utf-8", errors="replace")

        await until(ready, ROUTER_START_S, f"the proxy serves (its log: {router.log})")

    # --- while it runs ----------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raises DemoError when a process ended that should not have."""
        for child in self.children.ended():
            raise DemoError(
                f"the {child.name} ended with exit code {child.exit_code()}; "
                f"the end of its log {child.log}:\n{child.tail()}"
            )

    async def wait_registered(self, name: str) -> None:
        """Wait until the engine has described its memory to its daemon. Raises DemoError."""
        daemon, engine = self.daemons[name], self.engines[name]
        nudges = 0

        async def registered() -> bool:
            nonlocal nudges
            self.check_alive()
            if sessions(await self.client.metrics(daemon.metrics_url)) >= 1:
                return True
            # The shim acts in the engine's steps, and an idle engine makes none.
            nudges += 1
            await self.nudge(engine, f"{daemon.child.pid}-{nudges}")
            return False

        await until(
            registered,
            REGISTER_S,
            f"the {name} engine registers with its daemon (logs: {engine.child.log}, {daemon.log})",
        )

    async def nudge(self, engine: Engine, salt: str) -> None:
        """One token, straight from an engine, that no row of the demo can profit from."""
        await self.client.complete(
            engine.url,
            {
                "model": "demo",
                "prompt": "nudge",
                "max_tokens": 1,
                "cache_salt": f"nudge-{salt}",
                "stream": True,
                "return_token_ids": True,
            },
        )

    async def wait_idle(self) -> None:
        """Wait until neither engine has a request left. Raises DemoError."""

        async def idle() -> bool:
            self.check_alive()
            for engine in self.engines.values():
                if running(await self.client.metrics(engine.metrics_url)):
                    return False
            return True

        await until(idle, IDLE_S, "both engines have finished all requests", every=0.05)

    async def replace_decode_daemon(self, *, damaging: bool) -> None:
        """End decode's daemon and start another one at the same addresses."""
        old = self.daemons["decode"]
        await self.children.stop(old.child)
        self.daemons["decode"] = await start_daemon(
            self.children,
            self.client,
            "decode",
            folder=self.folder,
            config=self.config,
            program=DAMAGE if damaging else SERVE,
            like=old,
        )
        await self.wait_registered("decode")
