"""`kvd bench`: how fast KV moves between two daemons, against what the machine can do."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench with these arguments; returns the exit status."""
    # The client processes import this package too, and need none of this.
    from kvd.bench import cli

    return cli.main(argv)
