"""Reads files below /proc that may vanish, be forbidden or hold anything at any moment."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD of <linux/sched.h>


class Proc:
    """A file system like /proc. No method raises for what a process did meanwhile."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, *names: object) -> str:
        return os.path.join(self.root, *map(str, names))  # noqa: PTH118 -- a Path costs ten times it

    def read(self, *names: object) -> bytes | None:
        """None for what is gone or forbidden."""
        try:
            with open(self.path(*names), "rb", buffering=0) as file:  # noqa: PTH123
                return file.readall()
        except (OSError, ValueError):
            return None

    def text(self, *names: object) -> str:
        """ "" for what is gone or forbidden."""
        return os.fsdecode(self.read(*names) or b"")

    def link(self, *names: object) -> str | None:
        try:
            return os.readlink(self.path(*names))  # noqa: PTH115
        except (OSError, ValueError):
            return None

    def names(self, *names: object) -> list[str] | None:
        try:
            return os.listdir(self.path(*names))  # noqa: PTH208
        except (OSError, ValueError):
            return None

    def numbers(self, *names: object) -> list[int] | None:
        """The entries of a directory that are numbers, in order."""
        found = self.names(*names)
        return None if found is None else sorted(int(one) for one in found if is_number(one))

    def stat(self, *names: object) -> os.stat_result | None:
        """Of what a link leads to, also where only the kernel can follow the link."""
        return file_stat(self.path(*names))

    def pids(self) -> list[int]:
        return self.numbers() or []


@dataclass(frozen=True, slots=True)
class Stat:
    """The fields of /proc/PID/stat that matter here."""

    comm: str
    state: str
    parent: int
    group: int
    session: int
    terminal: int  # device number, 0 for none
    flags: int
    threads: int
    start_time: int

    @property
    def kernel_thread(self) -> bool:
        return bool(self.flags & _KERNEL_THREAD)

    @property
    def ended(self) -> bool:
        """The process ended; its parent has not collected it yet."""
        return self.state in ("Z", "X", "x")


def parse_stat(line: str) -> Stat | None:
    """None for what is no such line. The second field may hold blanks and parentheses."""
    begin, end = line.find("("), line.rfind(")")
    fields = line[end + 1 :].split()
    if not 0 < begin < end or len(fields) < 20:
        return None
    try:
        numbers = [int(fields[at]) for at in (1, 2, 3, 4, 6, 17, 19)]
    except ValueError:
        return None
    return Stat(line[begin + 1 : end], fields[0], *numbers)


def parse_fields(text: str) -> dict[str, str]:
    """The lines "Name:  value" of status, fdinfo and smaps_rollup; the first of each name."""
    found: dict[str, str] = {}
    for line in text.split("\n"):
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name, value.strip())
    return found


def whole(text: str | None, base: int = 10) -> int:
    """The number that `text` starts with; 0 for any other text."""
    words = (text or "").split()
    with contextlib.suppress(ValueError, IndexError):
        return int(words[0], base)
    return 0


def is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 12


def file_stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)  # noqa: PTH116
    except (OSError, ValueError):
        return None


def shown(text: str) -> str:
    """A path or a name of any bytes, in one line that can be printed."""
    printable = text.encode(errors="replace").decode()
    return "".join(one if one.isprintable() else "?" for one in printable)
