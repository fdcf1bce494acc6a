"""How much memory may still be taken."""

from __future__ import annotations

import psutil

from pccheck_native import cgroups


def available() -> tuple[int, str]:
    """Bytes that may still be taken, and what limits them: the RAM, or a cgroup."""
    free, bound = int(psutil.virtual_memory().available), "RAM"
    for limit in cgroups.limits():
        left = max(0, limit.nbytes - limit.used_bytes)
        if left < free:
            free, bound = left, limit.name
    return free, bound
