"""glibc settings that have to be in the environment before the daemon is executed.

Copied KV is not read again by the core that copied it, so storing it around the caches saves
reading the destination's lines first: about 1.3 to 1.4 times as fast. By itself glibc does so only
for copies much larger than a block. Two settings change that: a lower threshold for non-temporal
stores, and no `rep movsb`, which where the processor has it (AMD's Zen 3 and later) glibc prefers
up to the size of the second-level cache, whatever the first threshold says.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"
TUNABLES: dict[str, int] = {
    # Just above glibc's minimum, which is excluded, and below the block sizes that matter.
    "glibc.cpu.x86_non_temporal_threshold": 0x4400,
    "glibc.cpu.x86_rep_movsb_threshold": 0x40000000,
}


def reexec_env(env: Mapping[str, str]) -> dict[str, str] | None:
    """The environment to execute the daemon again with, or None where nothing is to be changed.

    Values that the operator chose are kept. None, too, when this is not glibc on x86-64, and when
    the settings are all there, so that executing again cannot loop.
    """
    if platform.machine() != "x86_64" or not _glibc():
        return None
    chosen = [item for item in env.get(VARIABLE, "").split(":") if item]
    names = {item.partition("=")[0] for item in chosen}
    missing = [f"{name}={value:#x}" for name, value in TUNABLES.items() if name not in names]
    if not missing:
        return None
    return {**env, VARIABLE: ":".join(chosen + missing)}


def _glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (OSError, ValueError):
        return False
