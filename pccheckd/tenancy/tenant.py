"""A tenant: what the daemon keeps for one (uid, job, rank), with or without a live trainer. Its
parts have a module each; this one says how the rank and its trainers come and go."""

from __future__ import annotations

import os
from collections.abc import Collection

from pccheck_native import _core
from pccheck_native.group import Agreement
from pccheck_wire.errors import RefusedError
from pccheckd.base.background import Tasks
from pccheckd.base.logs import LOG
from pccheckd.core.engine import Engine
from pccheckd.core.port import Owner, Port
from pccheckd.core.uses import Seat, Uses

from . import admission
from .admission import Admission, Slots, Unparking
from .binding import UNBIND_LIMIT_S, Binding
from .group import Group
from .ledger import Ledger
from .outcomes import Chronicle
from .pulling import Pulling
from .readiness import Readiness
from .retention import Leases, Retention
from .saves import Saves
from .volumes import Key, VolumeSet


class Tenant:
    """Others call the methods of its parts and read their attributes."""

    def __init__(self, key: Key, engine: Engine, group: Group, chronicle: Chronicle) -> None:
        self.key = key
        self.engine = engine
        self.group = group
        self.tasks = Tasks(key)
        self.uses = Uses()
        self.seat = Seat(key)
        self.ledger = Ledger()
        self.volumes = VolumeSet(key, engine)
        self.binding = binding = Binding(engine, self.volumes, self.seat, self.uses, self._on_event)
        self.retention = Retention(self.volumes, engine, self.seat, group)
        self.leases = Leases(self.volumes)
        self.pulling = Pulling(binding)
        self.slots = Slots(
            engine, group, self.seat, self.uses, self.ledger, binding, self.retention, self.leases
        )
        self.readiness = Readiness(
            group, self.seat, self.ledger, binding, self.retention, self.leases
        )
        self.saves = Saves(
            group, self.seat, self.ledger, binding, self.retention, self.readiness, self.pulling,
            chronicle, self.tasks,
        )  # fmt: skip
        self.queue = Admission(engine, self.ledger, binding, self.readiness, self.slots, self.saves)
        self.unparking = Unparking(self.ledger, binding, self.readiness, self.slots, self.saves)

    def _on_event(self, event: _core.Event) -> None:
        """From the native core, on the loop."""
        if event.kind in ("load_ended", "bad_peer"):
            owner = self.seat.owner
            if owner is not None and owner.session == event.session:
                owner.on_event(event)
        elif event.kind in admission.EVENTS:
            self.queue.on_event(event)
        else:
            self.queue.look()
            self.unparking.look()
            self.saves.on_event(event)

    def obey(self, agreement: Agreement) -> None:
        """What the ranks of the job have decided. Waits for no disk."""
        self.volumes.obey(agreement, self.ledger.pending())
        self.queue.obey(agreement)

    @property
    def quiet(self) -> bool:
        """No trainer and nothing in flight: its memory is a cache."""
        is_free = self.seat.owner is None and not self.ledger.live()
        return is_free and not self.binding.lock.locked()

    @property
    def idle(self) -> bool:
        """Quiet, and no session may read or is about to: it may be closed."""
        return self.quiet and not self.uses

    # -- coming and going ----------------------------------------------------------------------

    async def open(self) -> None:
        """Opens what is on the disk; the port comes with the first trainer."""
        await self.volumes.load()
        self.ledger.newest = self.volumes.newest()

    async def prepare(self) -> None:
        """The slow part of an attach, before other ranks of the job wait for it."""
        port = self.binding.port
        if port is not None and port.grant.least_bytes > self.engine.config.dram_bytes:
            # A trainer cannot use its chunks, which are larger than --chunk is now.
            await self.ledger.until(lambda: not self.ledger.live(), UNBIND_LIMIT_S)
        async with self.binding.lock:
            self._require_open()
            await self.binding.open_port(in_use=bool(self.ledger.live()))

    def _require_open(self) -> None:
        if self.seat.is_closed:
            raise RefusedError(f"{self.key} was just unloaded", hint="try again", retryable=True)

    async def attach(self, owner: Owner, socket_fd: int) -> int:
        """Makes `owner` the tenant's trainer; the page's descriptor. Raises PccheckError."""
        async with self.binding.lock:
            self.seat.require_free(owner)
            self._require_open()
            self.volumes.require_readable(fresh=owner.fresh)
            port = await self.binding.open_port(in_use=bool(self.ledger.live()))
            self.retention.inherited = self.retention.flagged
            await self.retention.protect(owner)
            page_fd = await port.attach(socket_fd, owner.session, owner.kernel_pid)
            if self.seat.is_closed:  # meanwhile; the port closes with the rank
                os.close(page_fd)
            self._require_open()
            self.seat.take(owner)
            self.readiness.room_bytes = 0
            self.ledger.trainer_came(owner.session)
            self.readiness.instruct()
            # More of the run before may have become durable meanwhile.
            await self.retention.protect_late()
            return page_fd

    async def detach(
        self, session: int, others: Collection[Tenant] = (), *, give_way: bool = False
    ) -> None:
        """The trainer has ended: copied checkpoints continue, the others fail. `others`: the ranks
        of the job here; from their GPUs a last step is read that this trainer's GPUs do not give
        any more. `give_way`: the tenant returns its memory before the trainer can attach again."""
        if self.seat.owner is None or self.seat.owner.session != session:
            return
        self.ledger.trainer_ended()
        self.seat.leave()
        async with self.binding.lock:
            try:
                if (port := self.binding.port) is not None:
                    await self._detach(port, others)
                    if give_way and not self.ledger.live():
                        await port.release_memory()
            finally:
                self.seat.free()

    async def _detach(self, port: Port, others: Collection[Tenant]) -> None:
        keys = {
            other: one.key
            for one in others
            if one is not self and (other := one.binding.port) is not None
        }
        lender = await port.detach(list(keys))
        if lender is not None:
            LOG.info(
                "%s: the last step could not be read from its own GPU memory, and was read from "
                "that of rank %d", self.key, keys[lender].rank,
            )  # fmt: skip

    async def rest(self) -> None:
        """Ends the writers of a rank whose trainer has been away for a while; a trainer that comes
        starts them again. What is cached stays."""
        async with self.binding.lock:
            if self.seat.owner is None and not self.ledger.live():
                await self.binding.rest()

    async def vacate(self) -> None:
        """Deletes the volumes of a rank that runs on another node, unless it is used, or something
        in them is needed."""
        async with self.binding.lock:
            used = self.seat.owner is not None or self.ledger.live() or self.uses
            if used or any(map(self.saves.needs, self.volumes.open)):
                return
            await self.binding.abandon_port()
            for item in list(self.volumes.open):
                if not self.uses.reads:  # no read began meanwhile
                    await self.volumes.drop(item)
            if not self.volumes.open:
                self.ledger.forget()

    async def close(self) -> None:
        """Drains sealed saves, then closes port and volumes."""
        self.seat.close()
        await self.queue.close()
        await self.unparking.close()
        await self.tasks.settle()
        await self.binding.close()
