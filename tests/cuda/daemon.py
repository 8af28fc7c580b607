"""`kvd` with a fake driver and a fake NCCL: `python -m tests.cuda.daemon serve ...`."""

from __future__ import annotations

import sys

from kvd.cli import main
from tests.cuda.fake_driver import FakeDriver
from tests.cuda.fake_nccl import FakeNccl


def install(engine_on: int = 0) -> None:
    """What kvd imports later is these."""
    driver = FakeDriver(devices=2, engine_on=engine_on)
    sys.modules["cuda.bindings.driver"] = driver  # type: ignore[assignment]
    sys.modules["nccl.bindings.nccl"] = FakeNccl(driver)  # type: ignore[assignment]


if __name__ == "__main__":
    install()
    sys.exit(main())
