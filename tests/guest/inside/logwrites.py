"""The log of dm-log-writes (Documentation/admin-guide/device-mapper/log-writes.rst): what reached a
device, in an order that its flushes allow, and marks in between.

The target logs a write when something has made it durable: the flush that covers it, with which
it then stands in one run, or its own FUA. So every prefix that ends with a flush, a FUA write or a
mark is what a power cut at that moment leaves at the least; and before each flush, any part of the
writes that it covers may be there as well.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FLUSH, FUA, DISCARD, MARK = 1, 2, 4, 8
_MAGIC = 0x6A736677736872
_SUPER = struct.Struct("<QQQI")
_ENTRY = struct.Struct("<QQQQ")
PAGE = 4096


@dataclass(frozen=True, slots=True)
class Entry:
    """One write, flush, discard or mark; `at` is where its data stand in the log."""

    flags: int
    offset: int
    nbytes: int
    at: int
    mark: str = ""

    @property
    def settles(self) -> bool:
        """What comes before it in the log is durable from here on."""
        return bool(self.flags & (FLUSH | FUA | MARK))

    @property
    def writes(self) -> bool:
        return self.nbytes > 0 and not self.flags & (DISCARD | MARK)


class Log:
    """An ended log, read from its device."""

    def __init__(self, device: Path) -> None:
        self._fd = os.open(device, os.O_RDONLY)
        magic, version, self._count, self._sector = _SUPER.unpack(
            os.pread(self._fd, _SUPER.size, 0)
        )
        assert (magic, version) == (_MAGIC, 1), "not a log of dm-log-writes"

    def entries(self) -> list[Entry]:
        return list(self._entries())

    def _entries(self) -> Iterator[Entry]:
        at = self._sector
        for _ in range(self._count):
            head = os.pread(self._fd, self._sector, at)
            sector, sectors, flags, length = _ENTRY.unpack_from(head)
            at += self._sector
            nbytes = sectors * self._sector
            text = head[_ENTRY.size :][:length].decode() if flags & MARK else ""
            yield Entry(flags, sector * self._sector, nbytes, at, text)
            if not flags & DISCARD:
                at += nbytes

    def data(self, entry: Entry) -> bytes:
        return os.pread(self._fd, entry.nbytes, entry.at)

    def close(self) -> None:
        os.close(self._fd)


def apply(log: Log, entry: Entry, target: int) -> None:
    """Discards are left out: they promise nothing about what is read afterwards."""
    if entry.writes:
        os.pwrite(target, log.data(entry), entry.offset)


def apply_part(log: Log, entries: list[Entry], target: int, rng: random.Random) -> int:
    """Some of the pages of writes that no flush covers yet, in any order; how many."""
    pages = [
        (entry, at) for entry in entries if entry.writes for at in range(0, entry.nbytes, PAGE)
    ]
    chosen = rng.sample(pages, rng.randint(0, len(pages)))
    for entry, at in chosen:
        os.pwrite(target, log.data(entry)[at : at + PAGE], entry.offset + at)
    return len(chosen)
