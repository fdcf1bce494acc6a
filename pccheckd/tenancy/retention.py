"""What one tenant's volumes keep for a reason: the flags that say so, set and taken away again.

A flag is staged and reaches the media with the next record, so what the media say of flags may be
older than what is meant."""

from __future__ import annotations

import asyncio

from pccheck_native import _core
from pccheckd.base.logs import LOG
from pccheckd.core.engine import Engine

from .volumes import DAMAGED, PROTECTED, VolumeSet


class Retention:
    """Owned by its tenant."""

    def __init__(self, volumes: VolumeSet, engine: Engine) -> None:
        self._volumes = volumes
        self._engine = engine
        self.protected: set[int] = set()  # sequences pinned until Restored or fresh (P7)
        self.unrestored = False  # the trainer has neither restored nor said fresh
        #: What the disk could not read when it was last tried. Not on the disk: it may heal.
        self.unreadable: set[int] = set()
        self._released: set[int] = set()  # flagged on the disk until the next record
        self.reports = 0  # of damage, by readers
        self._judging = asyncio.Lock()  # damage is flagged, or the flag taken away
        self._protecting = asyncio.Lock()  # what is protected changes
        #: What was flagged when the trainer came, for a run that had not restored either.
        self.inherited: set[int] = set()

    @property
    def flagged(self) -> set[int]:
        """What is flagged as protected, or is to be."""
        there = {one.sequence for one in self._volumes.checkpoints() if one.is_protected}
        return there - self._released | self.protected

    async def flag(
        self, sequence: int, *, set_: int = 0, clear: int = 0, now: bool = False
    ) -> bool:
        """Flags a durable checkpoint; False when it is not there (any more) or cannot be."""
        item = self._volumes.find(sequence)
        if item is None:
            return False
        uid = self._volumes.key.uid
        try:
            await self._engine.call(uid, item.volume.flag, sequence, set=set_, clear=clear, now=now)
            await self._engine.call(uid, item.read)
        except FileNotFoundError:
            return False  # recycled since it was read
        except (OSError, ValueError, _core.NativeError) as error:  # ValueError: closed meanwhile
            LOG.warning(
                "%s: checkpoint %d cannot be flagged: %s", self._volumes.key, sequence, error
            )
            return False
        return True

    async def damaged(self, sequence: int) -> None:
        """A reader found it damaged: recovery passes it over from now on, after a restart too."""
        LOG.error("%s: checkpoint %d is damaged", self._volumes.key, sequence)
        self.reports += 1
        self.unreadable.discard(sequence)
        async with self._judging:
            await self.flag(sequence, set_=DAMAGED, now=True)

    def not_read(self, sequence: int) -> None:
        """A reader met an error of the disk, which says nothing of the data: no flag."""
        LOG.error("%s: checkpoint %d could not be read", self._volumes.key, sequence)
        there = {one.sequence for one in self._volumes.checkpoints()}
        self.unreadable = (self.unreadable | {sequence}) & there

    async def found_whole(self, sequence: int, *, reports: int) -> bool:
        """A reader read all of it from the disk, and every checksum was right: a flag that says
        otherwise goes, with a record of its own; whether it did. `reports` is as it was before the
        reading: whoever found damage meanwhile is right."""
        self.unreadable.discard(sequence)
        async with self._judging:
            known = {one.sequence for one in self._volumes.checkpoints() if one.is_damaged}
            if sequence not in known or self.reports != reports:
                return False
            if not await self.flag(sequence, clear=DAMAGED, now=True):
                return False
        LOG.warning(
            "%s: checkpoint %d reads well again, all of it: it is no longer flagged as damaged",
            self._volumes.key, sequence, extra={"fields": {"event": "cleared"}},
        )  # fmt: skip
        return True

    async def protect(self, wanted: set[int], *, unrestored: bool) -> None:
        """P7: `wanted` is kept until the job's ranks have restored, or say `fresh`."""
        async with self._protecting:
            await self._protect(wanted)
            self.unrestored = unrestored

    async def protect_instead(self, wanted: set[int]) -> None:
        """More of the run before has become durable; unless the trainer has restored meanwhile."""
        async with self._protecting:
            if self.unrestored:
                await self._protect(wanted)

    async def _protect(self, wanted: set[int]) -> None:
        for sequence in self.flagged - wanted:
            await self.unprotect(sequence)
        for sequence in wanted:
            self._released.discard(sequence)
            await self.flag(sequence, set_=PROTECTED)
        self.protected = wanted

    def restored_to(self, sequence: int) -> None:
        """The trainer has taken over `sequence`. One that found nothing, because its disk was away
        for example, does not count as having read what is there now."""
        if not self.protected or max(self.protected) <= sequence:
            self.unrestored = False

    async def release(self) -> None:
        """The job's ranks have restored: what they restored from may be recycled."""
        async with self._protecting:
            await self._protect(set())

    async def unprotect(self, sequence: int) -> None:
        """One may be recycled again. The disk has its flag until the next record."""
        self._released.add(sequence)
        await self.flag(sequence, clear=PROTECTED)

    async def stage_again(self) -> None:
        """After a volume was read from the media again: what was staged only is gone."""
        for sequence in self._released & {one.sequence for one in self._volumes.checkpoints()}:
            await self.flag(sequence, clear=PROTECTED)
        for sequence in self.protected:
            await self.flag(sequence, set_=PROTECTED)
