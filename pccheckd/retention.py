"""What one tenant's volumes keep for a reason: the flags that say so, set and taken away again.

A flag is staged and reaches the media with the next record, so what the media say of flags may be
older than what is meant."""

from __future__ import annotations

import asyncio

from pccheck_native import _core, catalog

from .engine import Engine
from .logs import LOG
from .port import Owner
from .volumes import DAMAGED, GLOBAL, PINNED, OpenVolume, VolumeSet

PINS_SLOTS_MIN = 4


def pins(
    found: list[catalog.Checkpoint], pinned: set[int], incarnation: int, slots: int
) -> set[int]:
    """Which sequences a run that has not restored yet must leave alone (P7); `found` is newest
    first, `pinned` what is pinned already.

    The newest good one of the run before; and one that an earlier run, which did not restore
    either, had to leave alone: it is worth more than the few steps since. Small volumes have room
    for one pin.
    """
    before = [i.sequence for i in found if i.incarnation < incarnation and not i.is_damaged]
    if not before:
        return set()
    wanted = {min((s for s in before if s in pinned), default=before[0])}
    return wanted | {before[0]} if slots >= PINS_SLOTS_MIN else wanted


class Retention:
    """Owned by its tenant."""

    def __init__(self, volumes: VolumeSet, engine: Engine) -> None:
        self._volumes = volumes
        self._engine = engine
        self.protected: set[int] = set()  # sequences pinned until Restored or fresh (P7)
        self._unrestored = False  # the trainer has neither restored nor said fresh
        self.global_sequence = 0  # flagged GLOBAL: every rank of the group has its step
        #: What the disk could not read when it was last tried. Not on the disk: it may heal.
        self.unreadable: set[int] = set()
        self.reports = 0  # of damage, by readers
        self._judging = asyncio.Lock()  # damage is flagged, or the flag taken away

    def load(self) -> None:
        """Takes over what the media say."""
        found = self._volumes.checkpoints()
        self.global_sequence = max((f.sequence for f in found if f.is_global), default=0)

    def needs(self, item: OpenVolume) -> bool:
        """Whether a volume has what must not go with it."""
        return bool(
            {*self.protected, self.global_sequence} & {f.sequence for f in item.checkpoints}
        )

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

    async def protect(self, owner: Owner) -> None:
        """P7: the newest checkpoint of the run before is kept until restored or `fresh`."""
        found, current = self._volumes.checkpoints(), self._volumes.current
        pinned = {item.sequence for item in found if item.is_pinned} | self.protected
        wanted = (
            set()
            if owner.fresh or current is None
            else pins(found, pinned, owner.incarnation, current.info.slots)
        )
        for sequence in pinned - wanted:
            await self.flag(sequence, clear=PINNED)
        for sequence in wanted - pinned:
            await self.flag(sequence, set_=PINNED)
        self.protected = wanted
        self._unrestored = not owner.fresh
        if owner.fresh:
            await self._leave_group(owner)

    async def found_later(self, owner: Owner | None, sequence: int, older: set[int]) -> None:
        """One that a daemon before us had copied became durable, pinned, perhaps after the run that
        follows had connected; it stands for the `older` ones of its kind."""
        self.protected -= older
        for one in older:
            await self.flag(one, clear=PINNED)
        if owner is not None and self._unrestored:
            await self.protect(owner)
        elif owner is not None:
            await self.flag(sequence, clear=PINNED)

    async def restored(self, owner: Owner | None) -> None:
        """The trainer's checkpoints may recycle what it restored from."""
        for sequence in self.protected:
            await self.flag(sequence, clear=PINNED)
        self.protected = set()
        self._unrestored = False
        await self._leave_group(owner)

    async def became_global(self, sequence: int) -> None:
        """Every rank has it durable and flagged: older flags go, also those of a daemon that was
        killed before their going was written."""
        before, self.global_sequence = self.global_sequence, sequence
        flagged = {f.sequence for f in self._volumes.checkpoints() if f.is_global}
        for old in ({before} | flagged) - {0, sequence}:
            await self.flag(old, clear=GLOBAL)

    async def stage_again(self) -> None:
        """After a volume was read from the media again: what was staged only is gone."""
        for sequence in self.protected:
            await self.flag(sequence, set_=PINNED)
        if self.global_sequence:
            await self.flag(self.global_sequence, set_=GLOBAL)

    async def _leave_group(self, owner: Owner | None) -> None:
        """A rank that goes on alone has no step in common with anybody to be kept."""
        if owner is not None and owner.world_size < 2:
            await self.became_global(0)
