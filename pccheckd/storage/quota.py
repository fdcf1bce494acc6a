"""Whether a new volume has room: on the disk, within --max-storage and --max-storage-per-user."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from pccheck_native import dropping
from pccheck_wire.basics import size_text
from pccheck_wire.errors import StorageFullError
from pccheckd.config.options import Config

from .space import Reservation

#: How long a volume waits for others that are being made and leave no room for it.
MAKING_LIMIT_S = 10.0
NAMED_MAX = 8  # jobs in a hint


@dataclass(frozen=True, slots=True)
class Need:
    """The space of a volume that is to be made."""

    config: Config
    uid: int
    job: str
    who: str  # the rank, in words
    nbytes: int

    async def require(
        self,
        before: list[Reservation],
        call: Callable[[Callable[[list[Reservation]], None], list[Reservation]], Awaitable[None]],
    ) -> None:
        """Counts volumes that were requested before as made. When they leave no room, waits for
        them a moment: they may fail, or be counted twice while they are being made. `call` runs a
        function in a thread. Raises StorageFullError with the numbers."""
        if before:
            with contextlib.suppress(StorageFullError):
                await call(self.check, before)
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(MAKING_LIMIT_S):
                    for one in before:
                        await one.over.wait()
        await call(self.check, [one for one in before if not one.over.is_set()])

    def check(self, going: list[Reservation]) -> None:
        """Raises StorageFullError when the volumes `going` to be made leave no room. Blocks."""
        config, needed = self.config, self.nbytes
        promised = sum(one.nbytes for one in going)
        own = sum(one.nbytes for one in going if one.uid == self.uid)
        limits = (
            ("--max-storage", config.max_storage_bytes, "*/*/*.pcc", promised),
            (
                "--max-storage-per-user", config.max_storage_per_user_bytes,
                f"{self.uid}/*/*.pcc", own,
            ),
        )  # fmt: skip
        free = max(0, shutil.disk_usage(config.storage).free - promised)
        if needed > free:
            raise self._full(needed - free, f"{config.storage} has {size_text(free)} free")
        for flag, limit, files, more in limits:
            used = more + sum(map(_size, config.storage.glob(files))) if limit else 0
            if limit and used + needed > limit:
                raise self._full(
                    used + needed - limit,
                    f"{size_text(used)} of {flag} {size_text(limit)} are used",
                    larger_than=flag if needed > limit else "",
                )  # fmt: skip

    def _full(self, lacking: int, but: str, *, larger_than: str = "") -> StorageFullError:
        return StorageFullError(
            f"a volume for {self.who} takes {size_text(self.nbytes)} ({self.config.slots} slots), "
            f"but {but}",
            hint=f"raise {larger_than}, or use fewer --slots; dropping other jobs is not enough"
            if larger_than else self.droppable(lacking),
        )  # fmt: skip

    def droppable(self, lacking: int) -> str:
        """Other jobs of the same user that together make room for `lacking` bytes, finished ones
        first, then the largest. Blocks."""
        found: list[dropping.JobUse] = []
        with contextlib.suppress(OSError):
            found = dropping.jobs(self.config.storage, uid=self.uid)
        others = [job for job in found if job.job != self.job]
        others.sort(key=lambda job: (not job.done, -job.bytes))
        freed = itertools.accumulate(job.bytes for job in others)
        count = next((at for at, freed_bytes in enumerate(freed, 1) if freed_bytes >= lacking), 0)
        if not 0 < count <= NAMED_MAX:
            return (
                f"{size_text(lacking)} more are needed: free space on the disk, use fewer "
                "--slots, or another --storage"
            )
        named = ", ".join(
            f"pccheckctl drop {job.job} ({size_text(job.bytes)}{', finished' if job.done else ''})"
            for job in others[:count]
        )
        return f"make room by dropping jobs whose checkpoints you do not need any more: {named}"


def _size(path: Path) -> int:
    """0 for a file that was dropped meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0
