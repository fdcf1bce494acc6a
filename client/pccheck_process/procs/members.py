"""The processes of a tree, and who each of them is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

from .procfs import Proc, Stat, is_number, parse_fields, parse_stat, shown

_OPTIONS_LOOKED_AT = 6


@dataclass(frozen=True, slots=True)
class TreeProcess:
    pid: int
    stat: Stat
    status: dict[str, str]
    argv: tuple[str, ...]

    def __str__(self) -> str:
        return f"process {self.pid} ({shown(self.stat.comm)})"

    @property
    def runs(self) -> bool:
        """False for what has no memory and no open files to look at."""
        return not self.stat.ended and not self.stat.kernel_thread

    def ids(self, name: str) -> tuple[int, ...]:
        """The real, effective, saved and file system ids of "Uid" or "Gid"; all of "Groups"."""
        words = self.status.get(name, "").split()
        return tuple(int(word) for word in words if is_number(word))

    @property
    def is_daemon(self) -> bool:
        """pccheckd, or a helper of it: by the name, the program or `-m pccheckd`."""
        if self.stat.comm == "pccheckd":
            return True
        words = self.argv[:_OPTIONS_LOOKED_AT]
        if any(PurePosixPath(word).name == "pccheckd" for word in words[:2]):
            return True
        module = words[words.index("-m") + 1 :][:1] if "-m" in words else ()
        return any(word.split(".")[0] == "pccheckd" for word in module)


def member_of(proc: Proc, pid: int) -> TreeProcess | None:
    """None when there is no such process, or no longer."""
    stat = parse_stat(proc.text(pid, "stat"))
    if stat is None:
        return None
    words = proc.text(pid, "cmdline").rstrip("\0").split("\0")
    status = parse_fields(proc.text(pid, "status"))
    return TreeProcess(pid, stat, status, tuple(word for word in words if word))


def descendants(proc: Proc, pid: int) -> list[int]:
    """`pid` first, then its children, their children, and so on."""
    children: dict[int, list[int]] = {}
    for other in proc.pids():
        if stat := parse_stat(proc.text(other, "stat")):
            children.setdefault(stat.parent, []).append(other)
    found, seen = [pid], {pid}
    for parent in found:  # grows meanwhile
        for child in children.get(parent, []):
            if child not in seen:  # reused pids can make a circle
                seen.add(child)
                found.append(child)
    return found
