"""Whether a rank can save: its files are at their paths, a volume has the room that its trainer
registered, and the core knows whether saves may begin, and who numbers them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from pccheck_wire.errors import RefusedError
from pccheckd.core.uses import Seat

from .binding import Binding, BindingState
from .group import Group
from .ledger import Ledger
from .retention import Leases, Retention
from .volumes import OpenVolume


@dataclass
class Readiness:
    """Owned by its tenant."""

    _group: Group
    _seat: Seat
    _ledger: Ledger
    _binding: Binding
    _retention: Retention
    _leases: Leases
    stops: bool = False  # the daemon is stopping: what has not begun fails
    room_bytes: int = 0  #: the payload bytes that the trainer has registered
    registers: bool = False  #: it waits for a volume and DRAM for `room_bytes`

    @property
    def incarnation(self) -> int:
        """The incarnation of the start that its trainer belongs to now; else the newest that saved
        here."""
        owner = self._seat.owner
        if owner is None:
            return self._binding.volumes.newest_incarnation()
        return self._group.incarnation(self._binding.volumes.key.rank, owner)

    def instruct(self) -> None:
        """Tells the core whether saves may begin, and whether it numbers them. Call it whenever
        that may have changed. Waits for nothing."""
        port, owner = self._binding.port, self._seat.owner
        if port is None:
            return
        alone = self._group.alone(self._binding.volumes.key.rank, owner) if owner else None
        incarnation, above = alone or (0, 0)
        with contextlib.suppress(ValueError):  # closed
            port.native.policy(
                held=self.stops or not self._binding.is_usable, numbers=alone is not None,
                incarnation=incarnation, above=above,
            )  # fmt: skip

    def stop(self) -> None:
        """The daemon is stopping."""
        self.stops = True
        self.instruct()

    async def look(self, *, listing: bool = True) -> None:
        """Checks that the files of its volumes are still at their paths. Closes those that are not,
        and opens what is there instead; with `listing` also files that have appeared beside it."""
        changed = await self._binding.look(listing=listing)
        if changed:
            self._ledger.newest = self._binding.volumes.newest()
            await self._retention.volumes_changed()
            await self._mark_again()
        self.instruct()
        if changed or listing:
            self._group.decide_soon()  # also when a file that cannot be read has appeared

    async def _mark_again(self) -> None:
        """Leases and flags that were lost because a volume was read from the disk again."""
        self._leases.renew()
        await self._retention.stage_again()

    async def register(self, payload_bytes: int) -> OpenVolume:
        """A volume whose slots hold `payload_bytes`, bound to the port. Raises PccheckError."""
        await self.look()
        if await self._binding.reopen():
            await self._mark_again()
            self._group.decide_soon()
        self.room_bytes = payload_bytes
        async with self._binding.lock:
            owner = self._seat.owner
            if owner is None or self._binding.port is None:
                raise RefusedError("the session has ended")
            start = self._group.start_id(self._binding.volumes.key.rank, owner)
            volume = await self._binding.register(
                payload_bytes, incarnation=self.incarnation, start=start,
                world_size=owner.world_size, last_sequence=self._ledger.last_sequence,
                spare=self._group.spare_slots,
            )  # fmt: skip
        self.instruct()
        return volume

    async def reopen(self) -> None:
        """For a save that cannot begin: its volume has stopped, is lost, or is not bound. Raises
        PccheckError."""
        volume = await self.register(self.room_bytes)
        async with self._binding.lock:
            if self._binding.state is BindingState.UNBOUND and self._binding.port is not None:
                await self._binding.bind(volume)
