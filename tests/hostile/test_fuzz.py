"""A minute of random input; `make fuzz` runs it for longer."""

from __future__ import annotations

import os
import random

import pytest

from tests.hostile.fuzz import fuzz
from tests.hostile.target import Target
from tests.integration.daemon.conftest import Site

SECONDS = 60.0


@pytest.mark.timeout(900)
def test_random_input_at_every_door(site: Site) -> None:
    seed = int(os.environ.get("KVDTEST_FUZZ_SEED") or random.SystemRandom().randrange(2**31))
    print(f"KVDTEST_FUZZ_SEED={seed}")
    fuzz(Target(site, site.folder), SECONDS, seed)
