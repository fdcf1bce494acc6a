"""Has the checkpoints of a rank written that are in memory only, as soon as the disk has a lane and a
slot for them. The job's ranks decide which ones (`group/parked.py`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from pccheck_wire.ends import in_words
from pccheck_wire.messages import CheckpointState as State
from pccheckd.base.background import happened
from pccheckd.base.logs import LOG

from .admission import LOOK_S, Slots
from .binding import Binding
from .checkpoint import BROKEN, End, RankCheckpoint
from .ledger import Ledger
from .readiness import Readiness
from .saves import Saves

PLACES = 3  # PCC_SAVES_PARKED
#: Codes of what ends by itself: every lane is busy, or what an earlier daemon left is being checked.
_SOON = frozenset({"NO_LANE", "EBUSY"})


@dataclass(slots=True)
class Unparking:
    """Owned by its tenant."""

    _ledger: Ledger
    _binding: Binding
    _readiness: Readiness
    _slots: Slots
    _saves: Saves
    #: What is in memory may take an idle disk: no checkpoint is requested for the disk,
    #: which would find the disk busy, and the memory full.
    fills_disk: bool = True
    #: By sequence, in their order; and whether one has to be written, or only if the disk has room.
    _waiting: dict[int, tuple[RankCheckpoint, bool]] = field(default_factory=dict)
    _task: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def has_room(self) -> bool:
        """A checkpoint of level memory that is requested now finds memory beside what is being
        written, what is going to be, and the newest in memory: its copy waits for no disk. The
        others in memory are replaced as soon as the other ranks have copied theirs."""
        usage, port = self._binding.usage(), self._binding.port
        if usage is None or port is None:
            return True  # it is refused otherwise

        def chunks(sizes: Iterable[int]) -> list[int]:
            return [-(-size // port.chunk_bytes) for size in sizes]

        live = self._ledger.live()
        parks = [one for one in live if one.parks and one.state is not State.REQUESTED]
        stays = chunks(one.payload_bytes for one in parks if one.wanted)
        newest = chunks(one.payload_bytes for one in parks if not one.wanted)
        lanes = chunks(one.payload_bytes for one in self._ledger.moving())
        # The core may have begun to copy what the loop takes for requested only.
        left = max(0, usage.full_chunks - sum(stays) - sum(newest))
        queued = max(1, sum(one.parks for one in live) - len(parks))
        new = queued * sum(chunks([self._readiness.room_bytes]))
        has = max(port.grant.nbytes, port.grant.aim_bytes) // port.chunk_bytes
        taken = min(sum(lanes), left) + sum(stays) + max(newest, default=0) + new
        return len(stays) < PLACES - 1 and taken <= has

    @property
    def is_starved(self) -> bool:
        """A checkpoint that is being written gets no chunk, because others are in memory."""
        usage = self._binding.usage()
        waits = any(one.state is State.COPYING for one in self._ledger.moving())
        return waits and usage is not None and not (usage.free_chunks + usage.cached_chunks)

    def write(self, parked: RankCheckpoint, *, must: bool) -> None:
        _, before = self._waiting.get(parked.sequence, (parked, False))
        self._waiting[parked.sequence] = parked, must or before
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def look(self) -> None:
        """Something has changed that the first one may wait for."""
        self._changed.set()

    async def finished(self) -> None:
        """Returns when all are on a lane, or nothing frees a slot for them any more."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def close(self) -> None:
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
            await self.finished()

    async def _run(self) -> None:
        while self._waiting:
            self._changed.clear()
            sequence, (parked, must) = next(iter(self._waiting.items()))
            try:
                done = await self._try(parked, must=must)
            except Exception:  # the edge of this checkpoint: the next ones continue
                LOG.exception("step %d in memory cannot be written", parked.step)
                self._saves.drop(parked, BROKEN)
                done = True
            if done:
                self._waiting.pop(sequence, None)
            else:
                await happened(self._changed, LOOK_S)

    async def _try(self, parked: RankCheckpoint, *, must: bool) -> bool:
        """Whether nothing more is to be done for it."""
        if not parked.is_parked:
            return True
        code = self._saves.write(parked)
        if not code or code in _SOON:
            return not code or not must
        end: End | None = _lost(code)
        if code == "NO_SLOT":
            if await self._slots.free(parked):
                self._changed.set()
                return False
            end = await self._slots.end_without()
            if end is None:  # a slot may become free
                return not must or (self._readiness.stops and not self._ledger.in_flight)
        if must and end is not None:
            self._saves.drop(parked, end)
        return True


def _lost(code: str) -> End:
    """It is bound to a volume that no longer takes checkpoints."""
    words = f"the volume that it was to be written to takes no more checkpoints ({code})"
    return End(State.FAILED, in_words(words, "the next checkpoint opens the volume again", code))
