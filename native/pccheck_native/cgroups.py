"""How much memory this process may have: the RAM, and the limit of every cgroup that it is in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OF_PROCESS = Path("/proc/self/cgroup")
MEMORY = Path("/proc/meminfo")
ROOT = Path("/sys/fs/cgroup")


class Limit(NamedTuple):
    nbytes: int
    used_bytes: int
    name: str  # for messages


def limits(of_process: Path = OF_PROCESS, root: Path = ROOT) -> Iterator[Limit]:
    """The limits of this process's memory cgroups and of those above, in version 1 and 2.

    In a container the path may name groups of the host that are not mounted here. Then the group
    that is mounted at the root is the container's own.
    """
    for line in filter(None, _read(of_process).split("\n")):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _above(root, path, ("memory.max", "memory.high"), "memory.current")
            yield from _above(  # mounted beside version 1
                root / "unified", path, ("memory.max", "memory.high"), "memory.current"
            )
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes",)
            yield from _above(root / "memory", path, names, "memory.usage_in_bytes")


def memory_bytes(of_process: Path = OF_PROCESS, root: Path = ROOT) -> tuple[int, str]:
    """The most that this process may have, and what bounds it."""
    host = ram_bytes(), "the RAM of this host"
    return min([host, *((one.nbytes, one.name) for one in limits(of_process, root))])


def ram_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available() -> tuple[int, str]:
    """Bytes that may still be taken, and what limits them: the RAM, or a cgroup."""
    lines = _read(MEMORY).splitlines()
    shown = next(line for line in lines if line.startswith("MemAvailable:"))
    free, bound = int(shown.split()[1]) << 10, "RAM"
    for limit in limits():
        left = max(0, limit.nbytes - limit.used_bytes)
        if left < free:
            free, bound = left, limit.name
    return free, bound


def _above(root: Path, path: str, names: tuple[str, ...], used: str) -> Iterator[Limit]:
    parts = [part for part in path.split("/") if part]
    place = root if ".." in parts else root.joinpath(*parts)
    for group in (place, *place.parents):
        shown = str(group).encode(errors="replace").decode()
        for name in names:
            limit, now = _read(group / name).strip(), _read(group / used).strip()
            if limit.isdigit() and now.isdigit():
                yield Limit(int(limit), int(now), f"{name} of cgroup {shown}")
        if group == root:
            break


def _read(path: Path) -> str:
    """ "" for a file that cannot be read. A group may have a name of any bytes."""
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""
