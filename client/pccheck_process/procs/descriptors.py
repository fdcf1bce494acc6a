"""The open descriptors of a process, as /proc shows them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .members import TreeProcess
from .procfs import Proc, file_stat, parse_fields, whole

REMOVED = " (deleted)"


@dataclass(frozen=True, slots=True)
class OpenDescriptor:
    member: TreeProcess
    fd: int
    target: str  # a path, or a name such as "pipe:[123]"
    flags: int
    position: int
    info: dict[str, str]
    stat: os.stat_result | None

    @property
    def reads(self) -> bool:
        return self.flags & os.O_ACCMODE in (os.O_RDONLY, os.O_RDWR)

    @property
    def writes(self) -> bool:
        return self.flags & os.O_ACCMODE in (os.O_WRONLY, os.O_RDWR)

    @property
    def inode(self) -> int:
        """Of "socket:[123]" and "pipe:[123]"; 0 for others."""
        return whole(self.target.partition("[")[2].rstrip("]"))

    @property
    def is_removed(self) -> bool:
        """The name is gone; a file may also be called "x (deleted)"."""
        if not self.target.endswith(REMOVED):
            return False
        same = file_stat(self.target)
        return same is None or self.stat is None or not os.path.samestat(same, self.stat)

    @property
    def path(self) -> str:
        return self.target.removesuffix(REMOVED) if self.is_removed else self.target


def descriptors(proc: Proc, member: TreeProcess) -> list[OpenDescriptor] | None:
    """None when this user may not see them. A descriptor that is closed meanwhile is left out."""
    numbers = proc.numbers(member.pid, "fd")
    if numbers is None:
        return None
    found = []
    for fd in numbers:
        target = proc.link(member.pid, "fd", fd)
        if target is None:
            continue
        info = parse_fields(proc.text(member.pid, "fdinfo", fd))
        flags, position = whole(info.get("flags"), 8), whole(info.get("pos"))
        stat = proc.stat(member.pid, "fd", fd)
        found.append(OpenDescriptor(member, fd, target, flags, position, info, stat))
    return found
