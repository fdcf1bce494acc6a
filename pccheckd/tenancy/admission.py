"""How a checkpoint gets a lane and a slot, as far as the core needs the loop for that. `Admission`
answers the queue of requests in the core (`pcc_tenant_queue.c`): a request gets its number
(`saves.py`), and for a checkpoint that waits, the loop does what the core cannot do. No trainer
waits for the answers: its snapshot waits for its turn anyway, or is being copied. `Unparking` does
the same for checkpoints in memory only, once they are to be written. `Slots` frees slots for both.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from pccheck_native import _core
from pccheck_native.group import Agreement
from pccheck_wire.ends import Cause, Why, in_words
from pccheck_wire.messages import CheckpointState as State
from pccheckd.base.background import happened
from pccheckd.base.errors import translated
from pccheckd.base.logs import LOG
from pccheckd.core.engine import Engine
from pccheckd.core.port import Port
from pccheckd.core.uses import Seat, Uses

from .binding import Binding
from .checkpoint import BROKEN, End, RankCheckpoint, failed
from .group import Group
from .ledger import Ledger
from .readiness import Readiness
from .retention import Leases, Retention
from .saves import Saves
from .volumes import OpenVolume

#: The events that it answers.
EVENTS = frozenset({"requested", "begun", "waits", "refused"})
#: How long a full volume of a group waits for a rank that has requested nothing. A request that is
#: on its way takes milliseconds; a request that never comes must not delay training each time.
LAG_LIMIT_S = 2.0
#: A checkpoint without a slot is looked at again after so long, if no event comes before.
LOOK_S = 0.25

#: Codes of what ends by itself: every lane is busy, or what an earlier daemon left is checked.
_SOON = frozenset({"NO_LANE", "EBUSY"})
#: Codes of refusals that are not the volume's fault: the page says enough.
_REFUSED = frozenset({"ABORTED", "BAD_HANDLE", "DEVICE_LOST", "OTHER_MEMORY"})
_SKIPPED = End(State.SKIPPED, Why(Cause.SLOTS_BUSY))


@dataclass(slots=True)
class Slots:
    """Whether a slot for the next checkpoint is free or can be freed, and why none will be."""

    _engine: Engine
    _group: Group
    _seat: Seat
    _uses: Uses
    _ledger: Ledger
    _binding: Binding
    _retention: Retention
    _leases: Leases
    #: Ranks that are waited for although they have requested nothing ...
    _late: list[int] = field(default_factory=list)
    _late_since_s: float = 0.0  # ... and since when (time.monotonic)

    def has_room(self) -> bool:
        """A checkpoint that is requested now finds a lane and a slot. Waits for no disk."""
        current = self._binding.volumes.current
        if current is None:
            return True  # a volume is made first
        if not self._binding.is_usable or current.info.stopped:
            return True  # the volume is opened again first
        busy = sum(found.state is not State.REQUESTED for found in self._ledger.moving())
        info = current.info
        if busy >= info.slots - info.keep:
            return False
        appearing = self._ledger.appearing.keys()
        with contextlib.suppress(ValueError):  # it is being reopened
            durable = {found.id.sequence for found in current.checkpoints} | appearing
            used = busy + len(durable) + current.quarantined
            if used < info.slots or current.volume.has_expendable():
                return True
        return self._leases.oldest_for_room() is not None

    @property
    def may_come(self) -> bool:
        """The job's ranks write: when they have, a slot may be free."""
        return self._group.is_writing

    def taken(self) -> None:
        """A checkpoint has got one: no rank is waited for any more."""
        self._late = []

    async def free(self, checkpoint: RankCheckpoint) -> bool:
        """No slot is free: recycles what is no longer kept now, instead of with the next record,
        and in the end what only a reader keeps. Whether a slot became free."""
        if self._binding.volumes.current is None:
            return False
        if self._group.is_shared:
            rank = self._binding.volumes.key.rank
            late = await self._group.request_slot(rank, lambda: checkpoint.has_no_slot)
            before = self._late
            if not late or not before:
                self._late_since_s = time.monotonic()
            self._late = late
        if await self._binding.volumes.recycle():
            return True
        self._engine.deliver()
        if not checkpoint.has_no_slot:  # it has taken the slot that became free
            return True
        waits = not checkpoint.skip_when_busy
        return self._end_lease(waits=waits) and await self._binding.volumes.recycle()

    def _end_lease(self, *, waits: bool) -> bool:
        """Ends a reader's lease, and returns whether a slot is free now. For a checkpoint that
        `waits`, no lease ends while a slot will become free: by a checkpoint in flight, by a record
        under way, or by a checkpoint that waits for other ranks."""
        current = self._binding.volumes.current
        if waits and (current is None or not _is_full(current)):
            return False
        newest = self._group.newest_common
        late = self._group.is_shared and any(
            c.id.sequence > newest for c in self._binding.volumes.checkpoints()
        )
        return not (waits and late) and self._leases.end_for_room()

    async def has_free(self) -> bool:
        """A slot is free now: the first checkpoint that waits has not taken it yet."""
        await self._binding.volumes.refresh()
        current = self._binding.volumes.current
        return current is not None and current.info.free_slots > 0

    async def end_without(self) -> End | None:
        """How a checkpoint ends for which no slot will become free; None while one may."""
        if self._late and time.monotonic() - self._late_since_s > LAG_LIMIT_S:
            return End(State.SKIPPED, Why(Cause.SLOTS_LATE, self._late[0]))
        if self._uses.reads:  # a reader holds the slot it reads
            return None
        current = self._binding.volumes.current
        # The core is asked, not the ledger: the loop may not know yet of a save that has begun, nor
        # which slots a record under way gives back.
        if current is None or not _is_full(current):
            return None
        await self._binding.volumes.refresh()
        if not _is_full(current):  # since a moment ago
            return None
        newest = self._group.newest_common
        if self._group.is_shared and any(one.id.sequence > newest for one in current.checkpoints):
            return None  # until the other ranks have caught up
        protected = sorted(self._retention.protected)
        if protected:
            return failed(Cause.SLOTS_PROTECTED, protected[-1])
        return failed(Cause.SLOTS_BROKEN, current.quarantined)


@dataclass(slots=True)
class Admission:
    """Answers the queue of one tenant. Owned by the tenant."""

    _engine: Engine
    _ledger: Ledger
    _binding: Binding
    _readiness: Readiness
    _slots: Slots
    _saves: Saves
    _first: RankCheckpoint | None = None  # waits in the core for what the loop can do ...
    _why: str = ""  # ... and the core's code for it
    _reopened: RankCheckpoint | None = None  # the volume was opened again for it
    _task: asyncio.Task[None] | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _agreement: Agreement | None = None  # the last decision of the ranks

    def __len__(self) -> int:
        """Checkpoints that wait for a lane and a slot."""
        return sum(found.state is State.REQUESTED for found in self._ledger.live())

    async def close(self) -> None:
        self._first = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # -- events of the queue -------------------------------------------------------------------

    def on_event(self, event: _core.Event) -> None:
        try:
            self._take(event)
        except Exception:  # the edge of this checkpoint: no trainer waits for it
            LOG.exception("%s: a checkpoint cannot be saved", self._binding.volumes.key)
            found = self._ledger.find(event.session, event.id)
            if found is not None:
                self._saves.refuse(found, BROKEN)

    def _take(self, event: _core.Event) -> None:
        if event.kind == "requested":
            self._saves.requested(event)
            return
        checkpoint = self._ledger.find(event.session, event.id)
        if checkpoint is None or not checkpoint.live:
            return
        if event.kind == "waits":
            self._first, self._why = checkpoint, event.error_name
            self.look()
            if self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._run())
        elif event.kind == "begun":
            self._slots.taken()
            self._saves.begun(checkpoint, event.sequence)
        else:
            self._saves.ended(checkpoint, self._end_of(event.error_name, event.error))

    def _end_of(self, code: str, number: int) -> End:
        """How one ends that the core has refused for this code."""
        if code == "NO_LANE":
            return _SKIPPED
        if code == "ECANCELED":
            return End(State.SKIPPED, Why(Cause.WITHDRAWN))
        if code == "ENOTCONN":
            return failed(Cause.ENDED_BEFORE)
        if code in _REFUSED:
            return End(State.FAILED, Why(stage="begin", code=code, number=number))
        return self._failed(_error_of(code))

    def _failed(self, error: BaseException) -> End:
        told = translated(error, f"the volume of {self._binding.volumes.key}")
        return End(
            State.FAILED,
            in_words(told.message, told.hint, getattr(error, "code_name", told.code)),
        )

    def obey(self, agreement: Agreement) -> None:
        """The ranks have decided: what waits and was given up ends. The first one, which makes them
        decide when it looks for a slot, looks again only if they have decided otherwise."""
        self._saves.refuse_given_up()
        if agreement != self._agreement:
            self._agreement = agreement
            self.look()

    # -- what nothing ends by itself -----------------------------------------------------------

    def look(self) -> None:
        """Something has changed that the first one may wait for."""
        self._changed.set()

    async def _run(self) -> None:
        """While the first one waits for what the loop can do."""
        while (first := self._waiting()) is not None:
            self._changed.clear()
            try:
                end = await self._help(first)
            except Exception:  # the edge of this checkpoint: the next ones continue
                LOG.exception("%s: step %d cannot begin", self._binding.volumes.key, first.id.step)
                end = BROKEN
            if end is not None and self._waiting() is first:
                self._saves.refuse(first, end)
            if self._waiting() is first:
                await happened(self._changed, LOOK_S)

    def _waiting(self) -> RankCheckpoint | None:
        """The first one, if the core has not said meanwhile that it has got what it waited for."""
        self._engine.deliver()
        first = self._first
        if first is None or first.state is not State.REQUESTED:
            self._first = None
        return self._first

    async def _help(self, first: RankCheckpoint) -> End | None:
        """Does what the first one waits for; or how it ends, if that cannot be done."""
        if self._readiness.stops:
            return failed(Cause.STOPPING)
        if self._why == "NO_SLOT":
            if not await self._slots.free(first) and not self._is_stopped():
                end = await self._slots.end_without()
                if end is not None or not first.skip_when_busy:
                    return end
                if not await self._slots.has_free():  # else it has not taken that slot yet
                    return _SKIPPED
        elif self._why == "STOPPED" and self._reopened is first:
            return self._failed(_error_of("STOPPED"))
        else:
            if self._why == "STOPPED":
                self._binding.stop()
            self._reopened = first
            try:
                await self._readiness.reopen()
            except Exception as error:
                return self._failed(error)
        port = self._binding.port_of(first.session)
        if port is not None:
            with contextlib.suppress(ValueError):  # closed
                port.native.retry()
        return None

    def _is_stopped(self) -> bool:
        """The record that was to free a slot has failed: the core says so when it tries again."""
        current = self._binding.volumes.current
        return current is not None and current.info.stopped


@dataclass(slots=True)
class Unparking:
    """Gives checkpoints in memory only a lane and a slot, one after another, and knows whether
    memory has room for one more. Owned by its tenant."""

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
        if self._readiness.registers:
            return True  # its trainer begins no copy before it has its memory
        stays, replaced = self._in_memory(port)
        # The core may have begun to copy what the loop takes for requested only.
        left = max(0, usage.full_chunks - sum(stays) - sum(replaced))
        written = min(sum(_chunks(port, self._ledger.moving())), left)
        asked = [one for one in self._ledger.live() if one.parks and not one.is_begun]
        new = sum(_chunks(port, asked)) or -(-self._readiness.room_bytes // port.chunk_bytes)
        taken = written + sum(stays) + max(replaced, default=0) + new
        return len(stays) < _core.SAVES_PARKED - 1 and taken <= _all_chunks(port)

    @property
    def is_starved(self) -> bool:
        """A checkpoint for the disk gets no chunk, however long it waits: what stays in memory has
        all of them. What is being written gives its chunks back, and so does what is replaced."""
        port = self._binding.port
        waits = any(one.state is State.COPYING for one in self._ledger.moving())
        if not waits or port is None:
            return False
        stays, replaced = self._in_memory(port)
        return sum(stays) + max(replaced, default=0) >= _all_chunks(port)

    def _in_memory(self, port: Port) -> tuple[list[int], list[int]]:
        """The chunks of each checkpoint in memory only: of those that wait for the disk, and of the
        others, all of which but the newest are replaced soon."""
        parks = [one for one in self._ledger.live() if one.parks and one.is_begun]
        wanted = [one for one in parks if one.wanted]
        return _chunks(port, wanted), _chunks(port, (one for one in parks if not one.wanted))

    def write(self, parked: RankCheckpoint, *, must: bool) -> None:
        """Has it written soon. Unless it `must` be, it stays in memory when the disk has no room
        for it now."""
        _, before = self._waiting.get(parked.id.sequence, (parked, False))
        self._waiting[parked.id.sequence] = parked, must or before
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
                LOG.exception("step %d in memory cannot be written", parked.id.step)
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
        # Before the try: what ends during the try may have freed a slot.
        is_last = self._readiness.stops and not self._slots.may_come
        code = self._saves.write(parked)
        if not code or code in _SOON:
            return not code or not must
        end: End | None = _lost(code)
        if code == "NO_SLOT":
            parked.blocked = not await self._slots.free(parked)
            if not parked.blocked:
                self._changed.set()
                return False
            end = await self._slots.end_without()
            if end is None:  # a slot may become free
                return is_last or not must
        if must and end is not None:
            self._saves.drop(parked, end)
        return True


def _is_full(item: OpenVolume) -> bool:
    with contextlib.suppress(ValueError):  # it is being reopened
        return item.volume.is_full()
    return False


def _chunks(port: Port, checkpoints: Iterable[RankCheckpoint]) -> list[int]:
    """How many each of them takes."""
    return [-(-one.payload_bytes // port.chunk_bytes) for one in checkpoints]


def _all_chunks(port: Port) -> int:
    """Those of the rank, with those that it is about to get."""
    return max(port.grant.nbytes, port.grant.aim_bytes) // port.chunk_bytes


def _error_of(code: str) -> _core.NativeError:
    """The core's error with this code, which it reported in an event."""
    error = _core.NativeError(code)
    error.code_name = code
    return error


def _lost(code: str) -> End:
    """It is bound to a volume that no longer takes checkpoints."""
    words = f"the volume that it was to be written to takes no more checkpoints ({code})"
    return End(State.FAILED, in_words(words, "the next checkpoint opens the volume again", code))
