"""The guards, by safety rule. A test fails by what it saw: wrong bytes or a wrong answer."""

from __future__ import annotations

from dataclasses import replace

from tests.chaos.mutants.mutant import Hunk, Mutant
from tests.chaos.mutants.of_copies import DONE_MEANS_QUIET, READS_ARE_VALIDATED, WRITER_IS_OWNER
from tests.chaos.mutants.of_promises import (
    BOUNDS,
    DEATH,
    GEOMETRY,
    IDS,
    MANIFEST,
    ONCE,
    PROMPTS,
    SIZES,
)
from tests.chaos.mutants.places import CORE

# The core checks its own invariants in tests; without that, the test alone has to see it.
BLIND = Hunk(
    "kvd/core/invariants.py",
    "    _check_sessions(core)\n    _check_offers(core)\n",
    "    if core is not None:\n        return\n"
    "    _check_sessions(core)\n    _check_offers(core)\n",
)
_ALL = (
    *WRITER_IS_OWNER,
    *READS_ARE_VALIDATED,
    *DONE_MEANS_QUIET,
    *IDS,
    *MANIFEST,
    *BOUNDS,
    *ONCE,
    *DEATH,
    *GEOMETRY,
    *SIZES,
    *PROMPTS,
)
MUTANTS: tuple[Mutant, ...] = tuple(
    replace(mutant, hunks=(*mutant.hunks, BLIND)) if mutant.test.startswith(CORE) else mutant
    for mutant in _ALL
)
