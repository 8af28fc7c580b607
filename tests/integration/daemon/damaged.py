"""A daemon that damages what it copies over shm, and what it sends over tcp, on the way."""

from __future__ import annotations

import sys
from typing import Any

from kvd.cli import main
from kvd.demo.damage import damage
from kvd.transport import shm, tcp_serving
from tests.contract.harness import FlippedVector


def install() -> None:
    copy = shm._Job._copy

    def damaging(job: Any, batch: list[Any]) -> None:
        copy(job, batch)
        damage(job._local, job.job)

    setattr(shm._Job, "_copy", damaging)  # noqa: B010 - mypy knows that it is a method
    setattr(tcp_serving, "Vector", FlippedVector)  # noqa: B010


if __name__ == "__main__":
    install()
    sys.exit(main(sys.argv[1:]))
