"""A tenant: what the daemon keeps for one (uid, job, rank), with or without a live trainer: its
volumes, its channel with the cached chunks, and the states of its checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterator

from pccheck_native import OUTCOME_GIVEN_UP, _core, catalog
from pccheck_native.group import Agreement
from pccheck_wire.basics import size_text
from pccheck_wire.errors import PccheckError, RefusedError
from pccheck_wire.messages import CheckpointState as State
from pccheckd.base.background import Tasks
from pccheckd.base.errors import translated
from pccheckd.base.logs import LOG
from pccheckd.core.engine import Engine, Shape
from pccheckd.core.port import Owner, Port

from . import inherited
from .admission import Admission
from .checkpoint import Checkpoint, End
from .group import Group
from .leases import Leases
from .ledger import Ledger
from .outcomes import Chronicle
from .pulling import Pulling
from .retention import Retention
from .volumes import Key, OpenVolume, VolumeSet

CHUNK_CAPACITY_MAX = 65536
UNBIND_LIMIT_S = 30.0
BINDINGS_MAX = 4  # PCC_TENANT_VOLUMES
FILE_LOST = ("REMOVED", "REPLACED", "TRUNCATED")  # a volume's file is not at its path, or truncated
QUEUE_EVENTS = frozenset({"requested", "begun", "waits", "refused"})
INHERITED = 0  # the session of checkpoints that the previous daemon had copied


class Tenant:
    """Others call its methods and read its attributes; only its own methods change them."""

    def __init__(self, key: Key, engine: Engine, group: Group, chronicle: Chronicle) -> None:
        # Locks, taken in this order; of the first two a task takes only one.
        self._looking = asyncio.Lock()  # while the files are compared with their paths
        self._reopening = asyncio.Lock()  # while a stopped volume is read again
        self.lock = asyncio.Lock()  # while volumes and owners come and go
        self.key = key
        self.config = engine.config
        self.engine = engine
        self.volumes = VolumeSet(key, engine)
        self.port: Port | None = None
        self.owner: Owner | None = None
        self.group = group
        self.ledger = Ledger()
        self.retention = Retention(self.volumes, engine)
        self.leases = Leases(self.volumes)
        self.queue = Admission(self)
        self.readers = 0  # sessions that may load
        self._coming = 0  # processes that attach
        self.must_end_reads = False  # a stopped volume has to be opened again: checkpoints wait
        self._all_open = asyncio.Event()  # cleared while a volume is closed and opened again
        self._all_open.set()
        self.closed = False
        self.leaving = False  # the trainer has ended, and what it handed over is being drained
        self.finished = False  # the trainer reported the job as done
        self.stalled = ""  # why its disk seems to hang
        self.stopped = False  # a commit record failed; reopened before the next save
        self.volume_lost = False  # its volume's file is gone; the next save makes another
        self.refused: PccheckError | None = None  # why its last trainer got no room to save ...
        self._refused_ns = 0  # ... and when
        self.last_used_ns = time.monotonic_ns()
        self._rests = False  # its channel has no writers ...
        self._unbound = False  # ... or may have none for its present volume
        self._reading = 0  # loads and checks in progress: their volumes stay open
        self._was_refused = False  # the present trainer was refused room
        self.room_bytes = 0  #: the payload bytes that the trainer has registered
        self._away = False  # the storage directory was missing at the last look for volumes
        self.interval_steps = 0  #: between checkpoints, if the client chooses the interval
        self._registered_in = -1  # incarnation whose beginning is on the disk
        self._pulling = Pulling()
        #: Durable and not yet read from the volume: sequence and world size.
        self._appearing: dict[int, int] = {}
        self.chronicle = chronicle
        self._tasks = Tasks(key)
        self.spawn = self._tasks.spawn

    # -- coming and going ----------------------------------------------------------------------

    async def open(self) -> None:
        """Opens what is on the disk; the channel comes with the first trainer."""
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
            port = await self._open_port()
            self.retention.inherited = self.retention.flagged
            await self.protect(owner)
            page_fd = await port.attach(socket_fd, owner.session, owner.kernel_pid)
            self.owner = owner
            self.finished = False
            self.room_bytes = 0
            self._was_refused = False
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
            await self._open_port()

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
        self.leaving = True
        try:
            async with self.lock:
                if self.port is not None:
                    await self.port.detach()
                    if give_way and not self.ledger.live():
                        await self.port.release_memory()
                self.owner = None
                self.last_used_ns = time.monotonic_ns()
        finally:
            self.leaving = False

    async def rest(self) -> None:
        """Ends the writers of a rank whose trainer has been away for a while; a trainer that comes
        starts them again. What is cached stays."""
        async with self.lock:
            waits = self.owner is not None or self.ledger.live() or self.stopped
            if self.port is not None and not (self._rests or waits):
                self._unbound, rests = True, True
                for item in self.volumes.open:  # one may be busy with a load
                    rests &= await self.port.unbind(item.volume, 0)
                self._rests = rests

    def stop_attaches(self) -> None:
        """It is about to be closed: no trainer attaches any more."""
        self.closed = True

    async def close(self) -> None:
        """Drains sealed saves, then closes channel and volumes."""
        self.closed = True
        await self.queue.close()
        await self._tasks.settle()
        async with self.lock:
            if self.port is not None:
                await self.port.close()
                self.port = None
            await self.volumes.close()

    @property
    def incarnation(self) -> int:
        """The incarnation of the start that its trainer belongs to now; else the newest that saved
        here."""
        if self.owner is None:
            return self.volumes.newest_incarnation()
        return self.group.incarnation(self.key.rank, self.owner)

    def usage(self) -> _core.ChannelUsage | None:
        """What its memory is used for; None without a channel. Waits for no disk."""
        return self.port.usage() if self.port is not None else None

    @property
    def quiet(self) -> bool:
        """No trainer and nothing in flight: its memory is a cache."""
        return self.owner is None and not self.ledger.live() and not self.lock.locked()

    @property
    def idle(self) -> bool:
        """Quiet, and no session may read or is about to: it may be closed."""
        return self.quiet and not (self._reading or self.readers or self._coming)

    @property
    def is_read(self) -> bool:
        """A load or a check is in progress."""
        return self._reading > 0

    async def opened(self) -> None:
        """For a read that has begun: until a volume that is being opened again is open."""
        await self._all_open.wait()

    def begin_read(self) -> None:
        """The volumes stay open until `end_read`."""
        self._reading += 1

    def end_read(self) -> None:
        self._reading -= 1
        self.must_end_reads &= self._reading > 0
        self.queue.look()

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """The volumes stay open meanwhile."""
        self.begin_read()
        try:
            yield
        finally:
            self.end_read()

    @contextlib.contextmanager
    def coming(self) -> Iterator[None]:
        """A process attaches: meanwhile the tenant stays loaded."""
        self._coming += 1
        try:
            yield
        finally:
            self._coming -= 1

    def add_reader(self, number: int = 1) -> None:
        """A session that may load has come, or (-1) gone: meanwhile the tenant stays loaded."""
        self.readers += number

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
        if self.stopped or self.volume_lost or current.info.stopped:
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
        self.queue.obey()

    # -- room ----------------------------------------------------------------------------------

    async def look(self, *, listing: bool = True) -> None:
        """Checks that the files of its volumes are still at their paths. Closes those that are not,
        and opens what is there instead; with `listing` also files that have appeared beside it."""
        async with self._looking:
            lost = await self.volumes.look()
            if lost:
                self.volume_lost = True
                self._registered_in = -1
                self.queue.instruct()
            if not (lost or listing or self._away or self.volumes.gone):
                return
            async with self.lock:
                if not self.closed:
                    await self._take_stock(lost)

    async def _take_stock(self, lost: bool) -> None:
        """Opens what is on the disk now, and begins again from that."""
        for item in list(self.volumes.gone):
            unused = self.port is None or await self.port.unbind(item.volume, 0)
            if unused and not self._reading:
                await self.volumes.close_lost(item)
        before = list(self.volumes.open)
        try:
            self._away = await self.engine.lacks_storage(self.key.uid)
            await self.volumes.load()
        except FileNotFoundError:  # the storage directory
            self._away = True
        if not lost and self.volumes.open == before:
            self.group.decide_soon()  # a file that cannot be read may have appeared
            return
        current = self.volumes.current
        if self.port is not None and current is not None and current not in before:
            await self.bind(self.port, current)
        self.ledger.newest = self.volumes.newest()
        self.retention.protected &= self.volumes.sequences()
        if self.owner is not None and self.retention.unrestored:
            await self.protect(self.owner)
        self.group.decide_soon()
        self.queue.instruct()

    async def register(self, payload_bytes: int) -> OpenVolume:
        """A volume whose slots hold `payload_bytes`, bound to the channel. Raises PccheckError."""
        await self.look()
        if self.stopped and not self.volume_lost:
            await self.reopen()
        self.room_bytes = payload_bytes
        async with self.lock:
            owner, port = self._present()
            incarnation = self.incarnation
            current = self.volumes.current
            too_small = current is None or payload_bytes > current.info.payload_capacity
            if current is None or too_small or self.volumes.is_followed:
                current = await self.volumes.make(
                    payload_bytes, incarnation=incarnation,
                    world_size=owner.world_size, next_sequence=self.ledger.last_sequence + 1,
                )  # fmt: skip
                await self._move_to(port, current)
            elif self._registered_in != incarnation:
                await self._begin_incarnation(current, incarnation, owner.world_size)
            self._registered_in = incarnation
            self.volume_lost = False
            self.queue.instruct()
            return current

    def set_refusal(self, why: PccheckError | None) -> None:
        """Its trainer was refused room, or (None) has got it. What a trainer was refused is known
        until that trainer or a later one has got it, or has saved what it requested afterwards."""
        if why is not None and not self._was_refused:
            fields = {"event": "refused"}
            LOG.warning(
                "%s: checkpoints are NOT saved: %s", self.key, why, extra={"fields": fields}
            )
        elif why is None and self.refused is not None:
            LOG.warning("%s: checkpoints are saved again", self.key)
        self.refused, self._was_refused = why, why is not None
        self._refused_ns = time.monotonic_ns()

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
            current = self.volumes.current
            self.finished = True
            if current is None:
                return
            try:
                await self.engine.call(self.key.uid, current.volume.finish, 1)
            except (OSError, _core.NativeError) as error:
                raise translated(error, f"the volume {current.path}") from error
            await self.volumes.refresh()

    # -- saving --------------------------------------------------------------------------------

    async def expose(self, session: int, number: int, exposure: bytes) -> str:
        """Maps the GPU memory that this session's trainer shares; "" or why it cannot be pulled
        from. Under the lock: the memory must never become the next trainer's."""
        async with self.lock:
            port = self.port_of(session)
            if port is None:
                raise RefusedError("the session has ended")
            refusal = self._pulling.take_refusal(session)
            if refusal:
                await port.expose(number, b"")  # replaces the previous exposure
                return refusal
            began_s = time.monotonic()
            reason = await port.expose(number, exposure)
            if not reason and (usage := port.usage()) is not None:  # opening handles may be slow
                LOG.info(
                    "%s: %d allocations of GPU memory (%s) are mapped, after %.3f s", self.key,
                    usage.mappings, size_text(usage.exposed_bytes), time.monotonic() - began_s,
                )  # fmt: skip
            return reason

    def refuse(self, checkpoint: Checkpoint, end: End) -> None:
        """Ends a checkpoint that is not copied yet. If the core has copied or ended it meanwhile,
        an event says how it went on."""
        port = self.port_of(checkpoint.session)
        if port is not None and port.channel.refuse(
            checkpoint.snapshot, int(end.to), checkpoint.sequence
        ):
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
            if checkpoint.requested_ns > self._refused_ns:  # of the room that it had before
                self.set_refusal(None)
            self._appearing[checkpoint.sequence] = checkpoint.world_size
            self.spawn(self._after_durable(checkpoint))
        elif event.kind == "failed" and event.error_name in FILE_LOST:
            self.volume_lost = True
            self.queue.instruct()
            self.spawn(self.look(listing=False))
        elif event.kind == "failed":
            self.stopped = self.stopped or event.stage == "publish"
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

    def gave_up(self, why_never: Callable[[int], str]) -> None:
        """Writes to the page which of the checkpoints that are durable here never become global."""
        for found in self.ledger.gave_up(why_never):
            self._tell(found, OUTCOME_GIVEN_UP)

    def _tell(self, found: Checkpoint, outcome: int, newer: int = 0) -> None:
        """Writes to the page of its trainer, if that one is still here. `newer`: the sequence that
        superseded it."""
        if (port := self.port_of(found.session)) is not None:
            port.channel.set_outcome(found.snapshot, int(outcome), found.sequence, newer)

    async def _after_durable(self, checkpoint: Checkpoint) -> None:
        await self.volumes.refresh()
        if not self.volume_lost:
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
        """Drops outgrown volumes once the current one has what recovery needs."""
        if len(self.volumes.open) < 2:
            return
        async with self.lock:
            volumes = self.volumes.open
            good = [any(not found.is_damaged for found in item.checkpoints) for item in volumes]
            follower = max((index for index, has in enumerate(good) if has), default=0)
            for item in volumes[:follower]:
                if self._reading or self._needs(item):
                    continue
                if self.port is not None and not await self.port.unbind(item.volume, 0):
                    continue  # tried again when its last save has ended
                if not self._reading:  # no read began meanwhile
                    await self.volumes.drop(item)

    def _needs(self, item: OpenVolume) -> bool:
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

    async def _open_port(self) -> Port:
        """The channel; its block size is that of the volume that is already there. One with chunks
        of the previous daemon, which had another --chunk, is replaced when its checkpoints are
        written."""
        config, current = self.config, self.volumes.current
        block = current.info.block_bytes if current else config.block_bytes
        chunk = -(-config.chunk_bytes // block) * block
        if self.port is not None and self.port.chunk_bytes != chunk and not self.ledger.live():
            await self.abandon_port()
        unbound = self.port is None or self._unbound
        port = self.port or await self.make_port(chunk, block, config.in_flight)
        if unbound and current is not None:
            await self.bind(port, current)
        self._rests = self._unbound = False
        return port

    async def make_port(self, chunk_bytes: int, block_bytes: int, lanes: int) -> Port:
        """Opens a channel; also for chunks that the previous daemon has left."""
        config = self.config
        capacity = max(2, min(config.dram_bytes // chunk_bytes, CHUNK_CAPACITY_MAX))
        gpus, label = await self.engine.driver.ready(), inherited.label_of(self.key)
        shape = Shape(chunk_bytes, block_bytes, capacity, lanes, config.writers, gpus, label)
        self.port = await Port.opened(self.engine, self.key.uid, self.on_event, shape)
        return self.port

    async def abandon_port(self) -> None:
        """Closes a channel in which nothing is being written."""
        port, self.port = self.port, None
        if port is not None:
            await port.close()

    async def bind(self, port: Port, item: OpenVolume) -> None:
        try:
            await self.engine.call(self.key.uid, port.channel.bind, item.volume)
        except (OSError, _core.NativeError) as error:
            raise translated(error, f"the volume {item.path}") from error

    async def _move_to(self, port: Port, made: OpenVolume) -> None:
        """New saves go to a volume that was just made. Outgrown volumes need no binding to be read;
        those that hold nothing are dropped."""
        busy = []
        try:
            for item in self.volumes.open[:-1]:
                if not await port.unbind(item.volume, 0):
                    busy.append(item)
                    continue
                await self.engine.call(self.key.uid, item.read)
                if not item.checkpoints:
                    await self.volumes.drop(item)
            if len(busy) >= BINDINGS_MAX:
                await port.unbind(busy[0].volume, UNBIND_LIMIT_S)
            await self.bind(port, made)
        except BaseException:
            await self.volumes.drop(made)
            if self.volumes.current is not None:
                await self.bind(port, self.volumes.current)
            raise

    async def _begin_incarnation(self, item: OpenVolume, incarnation: int, world_size: int) -> None:
        try:
            await self.engine.call(
                self.key.uid, item.volume.begin_incarnation, incarnation, world_size
            )
        except (OSError, _core.NativeError) as error:
            self.stopped = True
            raise translated(error, f"the volume {item.path}") from error

    async def make_ready(self) -> None:
        """For a checkpoint that cannot begin: its volume is opened again, made, or bound. Raises
        why that fails."""
        if self.stopped or self.volume_lost:
            await self.reopen()
            return
        async with self.lock:
            if self.port is not None and self.volumes.current is not None:
                await self.bind(self.port, self.volumes.current)

    async def reopen(self) -> None:
        """Closes a stopped volume and reads it from the media again; makes another one when its
        file is gone. Raises when that fails."""
        if self.stopped and not self.volume_lost:
            await self.look(listing=False)
        if not self.volume_lost:
            async with self._reopening:  # a request and a save may both find it stopped
                if self.stopped:
                    await self._reopen()
        if self.volume_lost:
            await self.register(self.room_bytes)
            self.stopped = False
            await self.retention.stage_again()

    async def _reopen(self) -> None:
        self.must_end_reads = self._reading > 0
        if not await self.ledger.until(lambda: not self._reading, UNBIND_LIMIT_S):
            raise RefusedError("the stopped volume is still being read")
        port, current = self.port, self.volumes.current
        if port is None or current is None:
            return
        # Without the lock: a write in progress may be one that only a detach can end.
        if not await port.unbind(current.volume, UNBIND_LIMIT_S):
            raise RefusedError("the stopped volume still has writes in progress")
        async with self.lock:
            began = self._reading > 0  # a read, while the writes were waited for
            if not began and self.port is port and self.volumes.current is current:
                self._all_open.clear()
                try:
                    there = await self.volumes.reopen(current)
                finally:
                    self._all_open.set()
                if not there:
                    self.volume_lost = True
                    self._registered_in = -1
                    return
                await self.bind(port, current)
            self.stopped = began
        if began:
            await self._reopen()
            return
        self.leases.renew()
        await self.retention.stage_again()
