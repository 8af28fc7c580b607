"""Whether processes of other programs are alive."""

from __future__ import annotations

import psutil


def runs(process: psutil.Process) -> bool:
    """Whether it lives; one that is dead and that its parent has not noticed does not."""
    try:
        return bool(process.is_running() and process.status() not in _DEAD)
    except psutil.NoSuchProcess:
        return False


_DEAD = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
