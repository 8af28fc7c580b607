"""One patch to a copy of the shipped code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class DoesNotApplyError(Exception):
    """The code has moved on; the patch has to follow."""


@dataclass(frozen=True, slots=True)
class Hunk:
    """`old` is there exactly once in the file and becomes `new`."""

    path: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Raises DoesNotApplyError."""
        file = root / self.path
        text = file.read_text() if file.exists() else ""
        if text.count(self.old) != 1:
            raise DoesNotApplyError(
                f"{self.path} has {text.count(self.old)} times, not once:\n{self.old}"
            )
        file.write_text(text.replace(self.old, self.new))

    def __str__(self) -> str:
        removed = "\n".join(f"-{line}" for line in self.old.splitlines())
        added = "\n".join(f"+{line}" for line in self.new.splitlines())
        return f"--- {self.path}\n{removed}\n{added}"


@dataclass(frozen=True, slots=True)
class Mutant:
    """`test` is a pytest node; `says` must be in its failure."""

    name: str
    rule: int
    """Of the eleven safety rules."""
    hunks: tuple[Hunk, ...]
    test: str
    says: str = ""
