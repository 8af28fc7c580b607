"""glibc settings that have to be in the environment before the daemon is executed."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
NON_TEMPORAL = "glibc.cpu.x86_non_temporal_threshold"
THRESHOLD = 0x4400
"""Just above glibc's minimum, which is excluded, and below the block sizes that matter.

Copied KV is not read again by the copying core, so storing it around the caches saves the reads
of the destination's lines: about 1.4 times as fast. By itself glibc does so only for copies much
larger than a block.
"""


def reexec_env(env: Mapping[str, str]) -> dict[str, str] | None:
    """The environment to execute the daemon again with, or None where nothing is to be changed.

    None when the operator chose a threshold, when this is not glibc on x86-64, or when the
    setting is there already, so that executing again cannot loop.
    """
    if platform.machine() != "x86_64" or not _glibc():
        return None
    tunables = env.get(VARIABLE, "")
    if any(item.partition("=")[0] == NON_TEMPORAL for item in tunables.split(":")):
        return None
    setting = f"{NON_TEMPORAL}={THRESHOLD:#x}"
    return {**env, VARIABLE: f"{tunables}:{setting}" if tunables else setting}


def _glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (OSError, ValueError):
        return False
