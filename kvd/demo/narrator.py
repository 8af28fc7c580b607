"""Tells the user what happens while it happens: short lines, and live progress on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

STAGES: tuple[tuple[str, str], ...] = (
    ("non-default args", "reading the model's configuration"),
    ("Resolved architecture", "starting the engine core"),
    ("Initializing a V1 LLM engine", "starting the worker"),
    ("Starting to load model", "loading the weights"),
    ("KV cache size", "handing its KV cache to the daemon"),
    ("init engine", "starting the HTTP server"),
    ("Application startup complete", "ready"),
)
"""Words in vLLM's log, and what the engine does from then on."""
FIRST_STAGE = "importing vLLM"


class Narrator:
    """`console` is where it talks; nothing of the result goes there when that is JSON."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def say(self, text: str) -> None:
        """One line of the story."""
        self.console.print(text)

    @contextlib.contextmanager
    def engines(self, logs: Mapping[str, Path]) -> Iterator[EngineProgress]:
        """Progress of starting engines, read from their logs. On a terminal it is live."""
        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[name]:<15}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        with progress:
            yield EngineProgress(self, progress, logs)

    @contextlib.contextmanager
    def steps(self, what: str, count: int) -> Iterator[Steps]:
        """Progress of something that has `count` steps."""
        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        with progress:
            yield Steps(progress, what, count)


class Steps:
    """A bar that is told of each step."""

    def __init__(self, progress: Progress, what: str, count: int) -> None:
        self._progress = progress
        self._task = progress.add_task(what, total=count)

    def step(self, count: int = 1) -> None:
        self._progress.advance(self._task, count)


class EngineProgress:
    """One line for each engine: how far its log says that it is."""

    def __init__(self, narrator: Narrator, progress: Progress, logs: Mapping[str, Path]) -> None:
        self._narrator = narrator
        self._progress = progress
        self._logs = dict(logs)
        self._stage = dict.fromkeys(logs, 0)
        self._tasks = {
            name: progress.add_task(FIRST_STAGE, total=len(STAGES), name=name) for name in logs
        }

    def look(self) -> None:
        """Read the logs again."""
        for name, log in self._logs.items():
            try:
                text = log.read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue
            stage = self._stage[name]
            for i, (words, _) in enumerate(STAGES[stage:], stage + 1):
                if words in text:
                    stage = i
            if stage != self._stage[name]:
                self._stage[name] = stage
                now = STAGES[stage - 1][1]
                self._progress.update(self._tasks[name], completed=stage, description=now)
                if not self._narrator.console.is_terminal:
                    self._narrator.say(f"  {name}: {now}")
