"""`kvd demo`: two real vLLM engines hand over KV through two daemons, checked token by token."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """`kvd demo` with these arguments; returns the exit status."""
    from kvd.demo import cli

    return cli.main(argv)
