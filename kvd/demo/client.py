"""The demo's HTTP client: streams completions with token ids, and reads Prometheus metrics."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

REQUEST_S = 120.0
PROBE_S = 5.0


class DemoError(Exception):
    """The demo cannot go on; the text is for the user."""


@dataclass(slots=True)
class Answer:
    """What came back for one prompt: `tokens[i]` are the token ids of choice `i`."""

    tokens: list[list[int]] = field(default_factory=list)
    request_id: str = ""
    ttft_s: float = 0.0
    total_s: float = 0.0
    error: str = ""


Metrics = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]


class Client:
    """Everything that the demo asks, each time over a connection of its own.

    A server may close one that is kept in the very moment in which it is used again, which would
    look like a failed request.
    """

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(force_close=True),
            timeout=aiohttp.ClientTimeout(total=REQUEST_S),
            trust_env=False,
        )

    async def aclose(self) -> None:
        await self._session.close()

    async def complete(self, url: str, body: dict[str, Any]) -> Answer:
        """Ask `url` (its root) for a completion and read the stream to its end.

        Never raises: what went wrong is in `Answer.error`.
        """
        answer = Answer(tokens=[[] for _ in range(body.get("n", 1))])
        start = time.perf_counter()
        try:
            async with self._session.post(f"{url}/v1/completions", json=body) as response:
                if response.status != 200:
                    answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                    return answer
                async for line in response.content:
                    self._event(line, answer, start)
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.total_s = time.perf_counter() - start
        return answer

    @staticmethod
    def _event(line: bytes, answer: Answer, start: float) -> None:
        data = line.strip().removeprefix(b"data:").strip()
        if not data or data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            answer.error = str(event["error"])[:300]
            return
        answer.request_id = event["id"]
        for choice in event["choices"]:
            if choice.get("token_ids"):
                answer.ttft_s = answer.ttft_s or time.perf_counter() - start
                answer.tokens[choice["index"]] += choice["token_ids"]
            if choice.get("finish_reason") not in (None, "length", "stop"):
                answer.error = f"finished with {choice['finish_reason']!r}"

    async def status(self, url: str) -> int | None:
        """HTTP status of a GET, None while nobody answers."""
        try:
            timeout = aiohttp.ClientTimeout(total=PROBE_S)
            async with self._session.get(url, timeout=timeout) as response:
                return response.status
        except (aiohttp.ClientError, TimeoutError):
            return None

    async def metrics(self, url: str) -> Metrics:
        """All samples of a Prometheus endpoint. Raises DemoError when it does not answer."""
        try:
            timeout = aiohttp.ClientTimeout(total=PROBE_S * 2)
            async with self._session.get(url, timeout=timeout) as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise DemoError(f"{url} does not answer: {type(error).__name__}: {error}") from error
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


def total(metrics: Metrics, name: str, **labels: str) -> float:
    """Sum of a metric's samples that carry these labels."""
    return sum(
        value
        for (sample, have), value in metrics.items()
        if sample == name and labels.items() <= dict(have).items()
    )


async def until(
    condition: Callable[[], Any],
    timeout: float,
    what: str,
    *,
    every: float = 0.2,
) -> None:
    """Await `condition()` again and again until it is true. Raises DemoError after `timeout` s."""
    deadline = time.monotonic() + timeout
    while True:
        if await condition():
            return
        if time.monotonic() > deadline:
            raise DemoError(f"{what}: not within {timeout:g} s")
        await asyncio.sleep(every)
