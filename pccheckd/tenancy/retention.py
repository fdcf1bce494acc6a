"""What keeps one tenant's checkpoints: flags (for the next run, pinned, damaged), and leases of
sessions that read them.

A flag is staged and reaches the disk with the next record, so the flags on the disk may be older
than those here. A lease is not on the disk: a leased checkpoint is not recycled while it is read,
unless a new checkpoint would have no slot."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from pccheck_native import _core, catalog
from pccheck_wire.errors import NoCheckpointError, PccheckError, RefusedError
from pccheckd.base.errors import translated
from pccheckd.base.logs import LOG
from pccheckd.core.engine import Engine
from pccheckd.core.port import Owner
from pccheckd.core.uses import Seat

from .checkpoint import RankCheckpoint
from .group import Group
from .volumes import DAMAGED, PROTECTED, Key, VolumeSet


class Retention:
    """Owned by its tenant."""

    def __init__(self, volumes: VolumeSet, engine: Engine, seat: Seat, group: Group) -> None:
        self._volumes = volumes
        self._engine = engine
        self._seat = seat
        self._group = group
        self.protected: set[int] = set()  # sequences pinned until Restored or fresh (P7)
        self.unrestored = False  # the trainer has neither restored nor used fresh=True
        #: Unreadable at the last try. Not flagged on the disk, since it may become readable.
        self.unreadable: set[int] = set()
        self._released: set[int] = set()  # flagged on the disk until the next record
        self.reports = 0  # of damage, by readers
        self._judging = asyncio.Lock()  # held while damage is flagged or unflagged
        self._protecting = asyncio.Lock()  # held while what is protected changes
        #: Flagged when the trainer came, for a previous run that had not restored either.
        self.inherited: set[int] = set()

    @property
    def flagged(self) -> set[int]:
        """Flagged as protected, or about to be."""
        there = {one.id.sequence for one in self._volumes.checkpoints() if one.is_protected}
        return there - self._released | self.protected

    async def flag(
        self, sequence: int, *, set_: int = 0, clear: int = 0, now: bool = False
    ) -> bool:
        """Flags a durable checkpoint; False when it does not exist (now) or cannot be flagged."""
        try:
            return await self.flag_or_raise(sequence, set_=set_, clear=clear, now=now)
        except PccheckError:
            return False  # it is logged

    async def flag_or_raise(
        self, sequence: int, *, set_: int = 0, clear: int = 0, now: bool = False
    ) -> bool:
        """The same, but raises why one that exists cannot be flagged."""
        item = self._volumes.find(sequence)
        if item is None:
            return False
        uid, key = self._volumes.key.uid, self._volumes.key
        try:
            await self._engine.call(uid, item.volume.flag, sequence, set=set_, clear=clear, now=now)
            await self._engine.call(uid, item.read)
        except FileNotFoundError:
            return False  # recycled since it was read
        except (OSError, ValueError, _core.NativeError) as error:
            LOG.warning("%s: checkpoint %d cannot be flagged: %s", key, sequence, error)
            if isinstance(error, ValueError):
                raise RefusedError(
                    f"the volume of {key} was closed meanwhile", hint="try again", retryable=True
                ) from error
            raise translated(error, f"the volume of {key}") from error
        return True

    async def damaged(self, sequence: int) -> None:
        """A reader found it damaged: recovery skips it from now on, also after a restart."""
        LOG.error("%s: checkpoint %d is damaged; recovery skips it", self._volumes.key, sequence)
        self.reports += 1
        self.unreadable.discard(sequence)
        async with self._judging:
            await self.flag(sequence, set_=DAMAGED, now=True)

    def not_read(self, sequence: int) -> None:
        """The disk failed to read it. The data may be intact, so there is no flag."""
        LOG.error("%s: checkpoint %d could not be read", self._volumes.key, sequence)
        self.unreadable = (self.unreadable | {sequence}) & self._volumes.sequences()

    def is_usable(self, found: catalog.StoredCheckpoint) -> bool:
        """Neither flagged nor, when it was last tried, unreadable."""
        return not found.is_damaged and found.id.sequence not in self.unreadable

    async def found_whole(self, sequence: int, *, reports: int) -> bool:
        """A reader read all of it from the disk, and every checksum was right: removes a damage
        flag, with a record of its own; whether it did. `reports` is the count before the reading:
        damage that was reported meanwhile stays."""
        self.unreadable.discard(sequence)
        async with self._judging:
            known = self._volumes.checkpoint(sequence)
            if known is None or not known.is_damaged or self.reports != reports:
                return False
            if not await self.flag(sequence, clear=DAMAGED, now=True):
                return False
        LOG.warning(
            "%s: checkpoint %d is readable and intact again: its damage flag was removed",
            self._volumes.key, sequence, extra={"fields": {"event": "cleared"}},
        )  # fmt: skip
        return True

    async def protect(self, owner: Owner) -> None:
        """P7: a trainer that neither restored nor said fresh overwrites no earlier checkpoint."""
        wanted = set() if owner.fresh else self._group.pins(self._volumes.key.rank, owner)
        unread = owner.restored is None and not owner.fresh
        async with self._protecting:
            await self._protect(wanted)
            self.unrestored = unread or bool(wanted)

    async def protect_late(self) -> None:
        """More of the previous run has become durable. Does nothing when the trainer has restored
        meanwhile, or has ended."""
        async with self._protecting:
            owner = self._seat.owner
            if owner is not None and self.unrestored:
                wanted = self._group.pins(self._volumes.key.rank, owner)
                if wanted != self.protected:
                    await self._protect(wanted)

    async def became_durable(self, inherited: set[int]) -> None:
        """Checkpoints that the previous daemon had copied are durable, and pinned by their records.
        Of several the newest keeps its pin until the trainer restores."""
        restored = self._seat.owner is not None and not self.unrestored
        for sequence in sorted(inherited)[: None if restored else -1]:
            await self.unprotect(sequence)
        await self.protect_late()

    async def volumes_changed(self) -> None:
        """Other volumes are open now than before."""
        self.protected &= self._volumes.sequences()
        if self._seat.owner is not None and self.unrestored:
            await self.protect(self._seat.owner)

    async def _protect(self, wanted: set[int]) -> None:
        for sequence in self.flagged - wanted:
            await self.unprotect(sequence)
        for sequence in wanted:
            self._released.discard(sequence)
            await self.flag(sequence, set_=PROTECTED)
        self.protected = wanted

    def restored_to(self, sequence: int) -> None:
        """The trainer has restored `sequence`. A trainer that found nothing, for example because
        its disk was missing, does not count as having restored what is there now."""
        if not self.protected or max(self.protected) <= sequence:
            self.unrestored = False

    def protected_step(self, copied: Iterable[RankCheckpoint]) -> int | None:
        """The newest step that is kept for a trainer that has not restored. `copied`: checkpoints
        of earlier starts that will be kept, too, when they are durable."""
        if not self.unrestored:
            return None
        durable = self._volumes.checkpoints()
        kept = [(c.id.sequence, c.id.step) for c in durable if c.id.sequence in self.protected]
        return max(kept + [(c.id.sequence, c.id.step) for c in copied], default=(0, None))[1]

    async def release(self) -> None:
        """The job's ranks have restored: the previous run's checkpoints may be recycled."""
        self.inherited = set()
        async with self._protecting:
            await self._protect(set())

    async def unprotect(self, sequence: int) -> None:
        """It may be recycled again. The disk has its flag until the next record."""
        self._released = (self._released | {sequence}) & self._volumes.sequences()
        await self.flag(sequence, clear=PROTECTED)

    async def stage_again(self) -> None:
        """Stages flags again that were lost because a volume was read from the disk again."""
        for sequence in self._released & self._volumes.sequences():
            await self.flag(sequence, clear=PROTECTED)
        for sequence in self.protected:
            await self.flag(sequence, set_=PROTECTED)


def recycled(key: Key, sequence: int) -> NoCheckpointError:
    return NoCheckpointError(
        f"{key} has no durable checkpoint {sequence}: newer ones may have replaced it",
        hint="open the newest one again",
    )


class Leases:
    """Owned by a tenant. Leases are not on the disk, so they end with the daemon. No call waits
    for the disk."""

    def __init__(self, volumes: VolumeSet) -> None:
        self._volumes = volumes
        self._sessions: dict[int, set[int]] = {}  # by sequence

    def take(self, sequence: int, session: int) -> None:
        """Leases a checkpoint until `give_back`. Raises NoCheckpointError when it was recycled."""
        if not self._spare(sequence, True):
            raise recycled(self._volumes.key, sequence)
        self._sessions.setdefault(sequence, set()).add(session)

    def give_back(self, session: int) -> None:
        """Ends all leases of a session that has ended."""
        for sequence, sessions in list(self._sessions.items()):
            sessions.discard(session)
            if not sessions:
                self._end(sequence)

    def end_for_room(self) -> bool:
        """Ends the lease on `oldest_for_room`; False when there is none."""
        found = self.oldest_for_room()
        if found is None:
            return False
        self._end(found.id.sequence)
        LOG.info(
            "%s: lease of a reader on step %d ended: a new checkpoint needs the slot",
            self._volumes.key, found.id.step,
        )  # fmt: skip
        return True

    def oldest_for_room(self) -> catalog.StoredCheckpoint | None:
        """The oldest leased checkpoint whose slot a new one can have."""
        current = self._volumes.current
        if current is None:
            return None
        leased = [one for one in current.checkpoints if one.id.sequence in self._sessions]
        for found in sorted(leased, key=lambda one: one.id.sequence):
            self._spare(found.id.sequence, False)
            try:
                if current.volume.has_expendable():
                    return found
            except ValueError:  # the volume is being reopened
                return None
            finally:
                self._spare(found.id.sequence, True)
        return None

    def renew(self) -> None:
        """Leases the same checkpoints again, after a volume was read from the disk again."""
        for sequence in list(self._sessions):
            if not self._spare(sequence, True):
                del self._sessions[sequence]

    def _end(self, sequence: int) -> None:
        del self._sessions[sequence]
        self._spare(sequence, False)

    def _spare(self, sequence: int, spared: bool) -> bool:
        item = self._volumes.find(sequence)
        if item is None:
            return False
        try:
            item.volume.spare(sequence, spared)
        except (OSError, _core.NativeError):  # recycled
            return False
        except ValueError:  # closed, and about to be opened again: `renew` follows
            pass
        return True
