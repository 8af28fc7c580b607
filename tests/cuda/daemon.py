"""`kvd` with a fake driver and a fake NCCL: `python -m tests.cuda.daemon serve ...`."""

from __future__ import annotations

import os
import sys

from kvd.cli import main
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.fake_nccl import FakeNccl
from tests.cuda.script import Hang

HANGS = "KVD_TEST_GPU_HANGS"
"""Calls of the driver, with spaces between, that hang when they are first made."""


def install(engine_on: int = 0) -> None:
    """What kvd imports later is these."""
    driver = FakeDriver(devices=2, engine_on=engine_on)
    for call in os.environ.get(HANGS, "").split():
        driver.script.add(call, Hang())
    sys.modules["cuda.bindings.driver"] = driver  # type: ignore[assignment]
    sys.modules["nccl.bindings.nccl"] = FakeNccl(driver)  # type: ignore[assignment]


if __name__ == "__main__":
    install()
    sys.exit(main())
