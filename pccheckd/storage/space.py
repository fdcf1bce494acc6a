"""Space on the storage's file system: free, and reserved for volumes that are being made."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pccheckd.base.threads import Threads

#: How long a caller waits for the file system before it gets the previous figures.
FRESH_LIMIT_S = 1.0


class Disk(NamedTuple):
    """None while the storage directory is missing."""

    total_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(slots=True, eq=False)
class Reservation:
    """Space for a volume; `over` when the volume has been made, or has failed."""

    uid: int
    nbytes: int
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Room:
    """Owned by the engine; only the loop touches it. A hanging file system blocks one thread."""

    def __init__(self, storage: Path) -> None:
        self.disk = Disk()  # as last seen
        self._storage = storage
        self._thread = Threads(1, "statvfs")
        self._asked: Future[None] | None = None
        self._reserved: list[Reservation] = []

    def start(self) -> None:
        self._thread.begin()
        self.look()

    def stop(self) -> None:
        self._thread.stop()

    def look(self) -> Future[None]:
        """Starts to read the figures again, unless that is in progress."""
        if self._asked is None or self._asked.done():
            self._asked = self._thread.submit(self._see)
        return self._asked

    async def fresh(self) -> Disk:
        """The present figures; the previous ones when the file system hangs."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FRESH_LIMIT_S):
                await asyncio.shield(asyncio.wrap_future(self.look()))
        return self.disk

    def _see(self) -> None:
        try:
            found = shutil.disk_usage(self._storage)
        except OSError:
            self.disk = Disk()
        else:
            self.disk = Disk(found.total, found.free)

    @contextlib.contextmanager
    def reserved(self, uid: int, nbytes: int) -> Iterator[list[Reservation]]:
        """Reserves space for a volume that is about to be made. Yields the earlier reservations
        that are not over: two volumes must not both count on the same space."""
        mine = Reservation(uid, nbytes)
        before = list(self._reserved)
        self._reserved.append(mine)
        try:
            yield before
        finally:
            self._reserved.remove(mine)
            mine.over.set()
