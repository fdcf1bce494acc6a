"""A tenant: what the daemon keeps for one (uid, job, rank), with or without a live trainer: its
volumes, its port with the cached chunks, and the states of its checkpoints."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection
from dataclasses import replace

from pccheck_native import OUTCOME_GIVEN_UP, _core, catalog
from pccheck_native.group import Agreement
from pccheck_native.transfer import PULL, Case, Decision, offered
from pccheck_wire.basics import size_text
from pccheck_wire.ends import Why
from pccheck_wire.errors import PccheckError, RefusedError
from pccheck_wire.messages import CheckpointState as State
from pccheckd.base.background import Tasks
from pccheckd.base.logs import LOG
from pccheckd.core.engine import Engine
from pccheckd.core.port import Owner, Port
from pccheckd.core.uses import Seat, TrainerState, Uses

from .admission import Admission
from .binding import UNBIND_LIMIT_S, Binding, BindingState
from .checkpoint import Checkpoint, End
from .group import Group
from .ledger import Ledger
from .outcomes import Chronicle
from .pulling import Pulling
from .retention import Leases, Retention
from .volumes import Key, OpenVolume

FILE_LOST = ("REMOVED", "REPLACED", "TRUNCATED")  # a volume's file is not at its path, or truncated
QUEUE_EVENTS = frozenset({"requested", "begun", "waits", "refused"})
INHERITED = 0  # the session of checkpoints that the previous daemon had copied


class Tenant:
    """Others call its methods and read its attributes; only its own methods change them."""

    def __init__(self, key: Key, engine: Engine, group: Group, chronicle: Chronicle) -> None:
        self.key = key
        self.config = engine.config
        self.engine = engine
        self.uses = Uses()
        self.seat = Seat(key)
        self.binding = Binding(key, engine, self.uses, self.on_event)
        self.volumes = self.binding.volumes
        self.lock = self.binding.lock
        self.group = group
        self.ledger = Ledger()
        self.retention = Retention(self.volumes, engine)
        self.leases = Leases(self.volumes)
        self.queue = Admission(self)
        self.finished = False  # the trainer reported the job as done
        self.stalled = ""  # why its disk seems to hang
        self.last_used_ns = time.monotonic_ns()
        self.interval_steps = 0  #: between checkpoints, if the client chooses the interval
        self.room_bytes = 0  #: the payload bytes that the trainer has registered
        self._pulling = Pulling()
        #: Durable and not yet read from the volume: sequence and world size.
        self._appearing: dict[int, int] = {}
        self.chronicle = chronicle
        self._tasks = Tasks(key)
        self.spawn = self._tasks.spawn

    @property
    def owner(self) -> Owner | None:
        """Its trainer."""
        return self.seat.owner

    @property
    def port(self) -> Port | None:
        return self.binding.port

    @property
    def refused(self) -> PccheckError | None:
        """Why its last trainer got no room to save."""
        return self.seat.refused

    @property
    def leaving(self) -> bool:
        """The trainer has ended, and what it handed over is being drained."""
        return self.seat.state is TrainerState.LEAVING

    @property
    def closed(self) -> bool:
        return self.seat.state is TrainerState.CLOSED

    # -- coming and going ----------------------------------------------------------------------

    async def open(self) -> None:
        """Opens what is on the disk; the port comes with the first trainer."""
        await self.volumes.load()
        self.ledger.newest = self.volumes.newest()

    async def attach(self, owner: Owner, socket_fd: int) -> int:
        """Makes `owner` the tenant's trainer; the page's descriptor. Raises PccheckError."""
        async with self.lock:
            if self.owner is not None:
                raise RefusedError(
                    f"{self.key} is already served for pid {self.owner.pid}; this is pid "
                    f"{owner.pid}",
                    hint="if that process is left over from an earlier start, end it; if both are "
                    "ranks of one training, pass rank= and world_size=, or make the client after "
                    "init_process_group(); if they are two trainings, give this one its own name "
                    "(PCCHECK_JOB, or job=)"
                    if self.owner.pid != owner.pid
                    else "this process has an earlier client: close() it",
                )
            self._require_open()
            self.volumes.require_readable(fresh=owner.fresh)
            port = await self.binding.open_port(in_use=bool(self.ledger.live()))
            self.retention.inherited = self.retention.flagged
            await self.protect(owner)
            page_fd = await port.attach(socket_fd, owner.session, owner.kernel_pid)
            if self.closed:  # meanwhile; the port closes with the rank
                os.close(page_fd)
            self._require_open()
            self.seat.take(owner)
            self.finished = False
            self.room_bytes = 0
            self.ledger.trainer_came(owner.session)
            self.queue.instruct()
            await self.protect_late()  # more of the run before may have become durable meanwhile
            return page_fd

    async def prepare(self) -> None:
        """The slow part of an attach, before other ranks of the job wait for it."""
        if self.port is not None and self.port.least_bytes > self.config.dram_bytes:
            # A trainer cannot use its chunks, which are larger than --chunk is now.
            await self.ledger.until(lambda: not self.ledger.live(), UNBIND_LIMIT_S)
        async with self.lock:
            self._require_open()
            await self.binding.open_port(in_use=bool(self.ledger.live()))

    def _require_open(self) -> None:
        if self.closed:
            raise RefusedError(f"{self.key} was just unloaded", hint="try again", retryable=True)

    async def protect(self, owner: Owner) -> None:
        """P7: a trainer that neither restored nor said fresh overwrites no earlier checkpoint."""
        wanted = set() if owner.fresh else self.group.pins(self.key.rank, owner)
        unread = owner.restored is None and not owner.fresh
        await self.retention.protect(wanted, unrestored=unread or bool(wanted))

    async def protect_late(self) -> None:
        """More of what the run before had in flight is durable."""
        await self.retention.protect_instead(
            lambda: self.group.pins(self.key.rank, self.owner) if self.owner else None
        )

    def protected_step(self) -> int | None:
        """The newest step that is kept for a trainer that has not restored, or will be when it is
        durable."""
        if not self.retention.unrestored:
            return None
        kept = self.retention.protected
        steps = {c.sequence: c.step for c in self.volumes.checkpoints() if c.sequence in kept}
        steps |= {
            c.sequence: c.step for c in self.ledger.copied() if c.incarnation < self.incarnation
        }
        return steps[max(steps)] if steps else None

    async def detach(self, session: int, *, give_way: bool = False) -> None:
        """The trainer has ended: copied checkpoints continue, the others fail. `give_way`: the
        tenant returns its memory before the trainer can attach again."""
        if self.owner is None or self.owner.session != session:
            return
        self.ledger.trainer_ended()
        self.seat.leave()
        async with self.lock:
            try:
                if self.port is not None:
                    await self.port.detach()
                    if give_way and not self.ledger.live():
                        await self.port.release_memory()
            finally:
                self.seat.free()
                self.last_used_ns = time.monotonic_ns()

    async def rest(self) -> None:
        """Ends the writers of a rank whose trainer has been away for a while; a trainer that comes
        starts them again. What is cached stays."""
        async with self.lock:
            if self.owner is None and not self.ledger.live():
                await self.binding.rest()

    def stop_attaches(self) -> None:
        """It is about to be closed: no trainer attaches any more."""
        self.seat.close()

    async def close(self) -> None:
        """Drains sealed saves, then closes port and volumes."""
        self.seat.close()
        await self.queue.close()
        await self._tasks.settle()
        await self.binding.close()

    @property
    def incarnation(self) -> int:
        """The incarnation of the start that its trainer belongs to now; else the newest that saved
        here."""
        if self.owner is None:
            return self.volumes.newest_incarnation()
        return self.group.incarnation(self.key.rank, self.owner)

    def usage(self) -> _core.TenantUsage | None:
        """What its memory is used for; None without a port. Waits for no disk."""
        return self.port.usage() if self.port is not None else None

    @property
    def quiet(self) -> bool:
        """No trainer and nothing in flight: its memory is a cache."""
        return self.owner is None and not self.ledger.live() and not self.lock.locked()

    @property
    def idle(self) -> bool:
        """Quiet, and no session may read or is about to: it may be closed."""
        return self.quiet and not self.uses

    @property
    def is_read(self) -> bool:
        """A load or a check is in progress."""
        return self.uses.reads > 0

    def end_lease(self, *, waits: bool) -> bool:
        """For a checkpoint that has no slot: ends a reader's lease, and returns whether a slot is
        free now. For a checkpoint that `waits`, no lease ends while another checkpoint will free a
        slot: one in flight, or one that waits for other ranks."""
        if waits and self.ledger.in_flight:
            return False
        newest = self.group.newest_common
        late = self.is_grouped and any(o.sequence > newest for o in self.volumes.checkpoints())
        return not (waits and late) and self.leases.end_for_room()

    @property
    def is_grouped(self) -> bool:
        """Its trainer is one of several ranks, or they have left checkpoints."""
        return self.owner is not None and self.group.is_shared

    def note_stall(self, why: str) -> None:
        """Why the disk seems to hang, or "": logged when that changes."""
        if bool(why) != bool(self.stalled):
            LOG.warning("%s: %s", self.key, why or "the disk makes progress again")
        self.stalled = why

    def is_usable(self, found: catalog.Checkpoint) -> bool:
        """Neither flagged nor, when it was last tried, unreadable."""
        return not found.is_damaged and found.sequence not in self.retention.unreadable

    def pending(self) -> dict[int, int]:
        """Requested sequences that have not ended and that the volume does not list as durable,
        each with the world size of the start that requested it."""
        live = (found for found in self.ledger.live() if found.sequence)
        return {found.sequence: found.world_size for found in live} | self._appearing

    def has_room(self) -> bool:
        """A checkpoint that is requested now finds a lane and a slot. Waits for no disk."""
        current = self.volumes.current
        if current is None:
            return True  # a volume is made first
        if not self.binding.is_usable or current.info.stopped:
            return True  # the volume is opened again first
        busy = sum(found.state is not State.REQUESTED for found in self.ledger.live())
        info = current.info
        if busy >= info.slots - info.keep:
            return False
        with contextlib.suppress(ValueError):  # it is being reopened
            durable = {found.sequence for found in current.checkpoints} | self._appearing.keys()
            used = busy + len(durable) + current.quarantined
            if used < info.slots or current.volume.has_expendable():
                return True
        return self.leases.oldest_for_room() is not None

    def obey(self, agreement: Agreement) -> None:
        """What the ranks of the job have decided. Waits for no disk."""
        self.volumes.obey(agreement, self.pending())
        self.queue.obey(agreement)

    # -- room ----------------------------------------------------------------------------------

    async def look(self, *, listing: bool = True) -> None:
        """Checks that the files of its volumes are still at their paths. Closes those that are not,
        and opens what is there instead; with `listing` also files that have appeared beside it."""
        changed = await self.binding.look(listing=listing)
        if changed:
            self.ledger.newest = self.volumes.newest()
            self.retention.protected &= self.volumes.sequences()
            if self.owner is not None and self.retention.unrestored:
                await self.protect(self.owner)
            await self._mark_again()
        self.queue.instruct()
        if changed or listing:
            self.group.decide_soon()  # also when a file that cannot be read has appeared

    async def _mark_again(self) -> None:
        """Leases and flags that were lost because a volume was read from the disk again."""
        self.leases.renew()
        await self.retention.stage_again()

    async def register(self, payload_bytes: int) -> OpenVolume:
        """A volume whose slots hold `payload_bytes`, bound to the port. Raises PccheckError."""
        await self.look()
        if await self.binding.reopen():
            await self._mark_again()
        self.room_bytes = payload_bytes
        async with self.lock:
            owner, _ = self._present()
            volume = await self.binding.register(
                payload_bytes, incarnation=self.incarnation,
                start=self.group.start_id(self.key.rank, owner), world_size=owner.world_size,
                last_sequence=self.ledger.last_sequence,
            )  # fmt: skip
        self.queue.instruct()
        return volume

    async def reopen(self) -> None:
        """For a save that cannot begin: its volume has stopped, is lost, or is not bound. Raises
        PccheckError."""
        volume = await self.register(self.room_bytes)
        async with self.lock:
            if self.binding.state is BindingState.UNBOUND and self.port is not None:
                await self.binding.bind(volume)

    def failed_before_request(self, count: int) -> None:
        """Checkpoints of its trainer failed because it was refused room, or without a daemon."""
        self.ledger.failed(count)
        error = self.refused.code if self.refused is not None else "OTHER"
        self.chronicle.unrequested(self.key, count, error)

    def wanted_bytes(self, payload_bytes: int) -> int:
        """DRAM for two checkpoints, within this rank's share of the budget."""
        owner, port = self._present()
        chunk = port.chunk_bytes
        limit = self.config.max_dram_per_user_bytes or self.config.dram_bytes
        share = min(limit, self.config.dram_bytes) // owner.local_world_size
        wanted = -(-payload_bytes // chunk) * chunk * 2
        return max(2 * chunk, min(wanted, share // chunk * chunk))

    async def finish(self) -> None:
        """The job is done: only its newest checkpoint is kept."""
        async with self.lock:
            self.finished = True
            await self.binding.finish()

    # -- saving --------------------------------------------------------------------------------

    async def expose(self, session: int, number: int, exposure: bytes, case: Case) -> Decision:
        """Maps the GPU memory that this session's trainer shares, if it is to be pulled. Under the
        lock: the memory must never become the next trainer's."""
        async with self.lock:
            port = self.port_of(session)
            if port is None:
                raise RefusedError("the session has ended")
            decision = offered(replace(case, failed_copies=self._pulling.failed(session)))
            if decision.transfer != PULL:
                self._pulling.refused()
                await port.expose(number, b"")  # replaces the previous exposure
                return decision
            began_s = time.monotonic()
            decision = offered(replace(case, obstacle=await port.expose(number, exposure)))
            if (
                decision.transfer == PULL and (usage := port.usage()) is not None
            ):  # opening handles may be slow
                LOG.info(
                    "%s: %d allocations of GPU memory (%s) are mapped, after %.3f s", self.key,
                    usage.mappings, size_text(usage.exposed_bytes), time.monotonic() - began_s,
                )  # fmt: skip
            return decision

    def refuse(self, checkpoint: Checkpoint, end: End) -> None:
        """Ends a checkpoint that is not copied yet. If the core has copied or ended it meanwhile,
        an event says how it went on."""
        port, why = self.port_of(checkpoint.session), end.why
        if port is not None and port.native.refuse(
            checkpoint.snapshot, int(end.to), checkpoint.sequence, cause=int(why.cause),
            error=why.number, argument=int(why.argument),
        ):  # fmt: skip
            self.ended(checkpoint, end)

    def ended(self, checkpoint: Checkpoint, end: End) -> None:
        """The core has ended a checkpoint that was not copied yet."""
        if checkpoint.live:
            self.ledger.refuse(checkpoint, end)
            self.group.decide_soon()
            self.chronicle.ended(self.key, checkpoint)

    # -- events --------------------------------------------------------------------------------

    def on_event(self, event: _core.Event) -> None:
        """From the native core, on the loop."""
        if event.kind in ("load_ended", "bad_peer"):
            if self.owner is not None and self.owner.session == event.session:
                self.owner.on_event(event)
            return
        if event.kind in QUEUE_EVENTS:
            self.queue.on_event(event)
            return
        self.queue.look()
        checkpoint = self.ledger.apply(event, self.group.why_given_up)
        if checkpoint is None:
            return
        self._pulling.note(checkpoint, event)
        if event.kind == "durable":
            self.seat.saved(checkpoint.requested_ns)
            self._appearing[checkpoint.sequence] = checkpoint.world_size
            self.spawn(self._after_durable(checkpoint))
        elif event.kind == "failed" and event.error_name in FILE_LOST:
            self.binding.lose()
            self.queue.instruct()
            self.spawn(self.look(listing=False))
        elif event.kind == "failed" and event.stage == "publish":
            self.binding.stop()
        if not checkpoint.live:
            self.chronicle.ended(self.key, checkpoint)
        if event.kind in ("failed", "superseded", "given_up"):
            self.group.decide_soon()
            self.spawn(self._retire())

    def became_global(self, newest: int, common: Collection[int]) -> None:
        """Every rank has the sequences `common`, up to `newest`: writes that to the page."""
        for found in self.ledger.became_global(newest, common):
            superseded = found.state is State.SUPERSEDED
            self._tell(found, found.state, newest if superseded else 0)
        self.spawn(self._retire())

    def gave_up(self, why_never: Callable[[int], Why | None]) -> None:
        """Writes to the page which of the checkpoints that are durable here never become global."""
        for found in self.ledger.gave_up(why_never):
            self._tell(found, OUTCOME_GIVEN_UP)

    def _tell(self, found: Checkpoint, outcome: int, newer: int = 0) -> None:
        """Writes to the page of its trainer, if that one is still here. `newer`: the sequence that
        superseded it."""
        if (port := self.port_of(found.session)) is not None:
            port.native.set_outcome(found.snapshot, int(outcome), found.sequence, newer)

    async def _after_durable(self, checkpoint: Checkpoint) -> None:
        await self.volumes.refresh()
        if self.binding.state is not BindingState.LOST:
            self.volumes.settled()
        self._appearing.pop(checkpoint.sequence, None)
        self.group.decide_soon()
        await self._retire()
        if checkpoint.session == INHERITED:
            await self._after_inherited()
        elif self.owner is not None and self.owner.session != checkpoint.session:
            await self.protect_late()

    async def _after_inherited(self) -> None:
        """A checkpoint that the previous daemon had copied is durable, and pinned by its record. Of
        several the newest keeps its pin until the trainer restores."""
        inherited = sorted(self.ledger.sequences(INHERITED) & self.volumes.sequences())
        restored = self.owner is not None and not self.retention.unrestored
        for sequence in inherited if restored else inherited[:-1]:
            await self.retention.unprotect(sequence)
        await self.protect_late()

    async def _retire(self) -> None:
        await self.binding.retire(self.needs)

    def needs(self, item: OpenVolume) -> bool:
        """Whether a volume holds a checkpoint that must stay."""
        held = {found.sequence for found in item.checkpoints}
        return bool(item.pinned or held & self.retention.protected) or any(
            map(self.group.needs, held)
        )

    # -- volumes under the lock ----------------------------------------------------------------

    def _present(self) -> tuple[Owner, Port]:
        if self.owner is None or self.port is None:
            raise RefusedError("the session has ended")
        return self.owner, self.port

    def port_of(self, session: int) -> Port | None:
        """The port while that session is attached to it; else None."""
        owner = self.owner
        return self.port if owner is not None and owner.session == session else None
