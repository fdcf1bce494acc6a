"""Room on the storage's file system: what is free, and what volumes under way will take."""

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

#: How long somebody waits for the file system before the figures of a moment ago have to do.
FRESH_LIMIT_S = 1.0


class Disk(NamedTuple):
    """None while the storage directory is not there."""

    total_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(slots=True, eq=False)
class Reservation:
    """Room that a volume will take; `over` when it has taken it, or has failed."""

    uid: int
    nbytes: int
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Room:
    """Owned by the engine; only the loop touches it. A file system that hangs keeps one thread."""

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
        self._thread.shutdown(wait=False, cancel_futures=True)

    def look(self) -> Future[None]:
        """Looks at the file system again, unless a look is under way."""
        if self._asked is None or self._asked.done():
            self._asked = self._thread.submit(self._see)
        return self._asked

    async def fresh(self) -> Disk:
        """As it is now; where the file system hangs, as it was when last seen."""
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
        """Room for a volume that is about to be made. Yields what was reserved before and is not
        over: two volumes must not both count on the last room, and none waits for another."""
        mine = Reservation(uid, nbytes)
        before = list(self._reserved)
        self._reserved.append(mine)
        try:
            yield before
        finally:
            self._reserved.remove(mine)
            mine.over.set()
