"""What the queue of requests in the core (`pcc_tenant_queue.c`) asks of the loop: the number of a
checkpoint, and what to do when nothing frees a slot by itself. No trainer waits for the answers:
its snapshot waits for its turn anyway, or is being copied already."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from pccheck_native import _core
from pccheck_wire.ends import Cause, Why, in_words
from pccheck_wire.messages import CheckpointState as State
from pccheckd.base.background import happened
from pccheckd.base.errors import translated
from pccheckd.base.logs import LOG
from pccheckd.core.port import Port

from .checkpoint import Checkpoint, End, failed
from .group import Requested

if TYPE_CHECKING:
    from pccheck_native.group import Agreement

    from .tenant import Tenant

#: How long a full volume of a group waits for a rank that has requested nothing. A request that is
#: on its way takes milliseconds; a request that never comes must not delay training each time.
LAG_LIMIT_S = 2.0
#: A checkpoint without a slot is looked at again after so long, if no event comes before.
LOOK_S = 0.25

#: Codes of refusals that are not the volume's fault: the page says enough.
_REFUSED = frozenset({"ABORTED", "BAD_HANDLE", "DEVICE_LOST"})
_SKIPPED = End(State.SKIPPED, Why(Cause.SLOTS_BUSY))
_BROKEN = failed(Cause.INTERNAL)


class Admission:
    """Answers the queue of one tenant. Owned by the tenant."""

    def __init__(self, tenant: Tenant) -> None:
        self._tenant = tenant
        self._stops = False  # the daemon is stopping
        self._first: Checkpoint | None = None  # waits in the core for what the loop can do ...
        self._why = ""  # ... and the core's code for it
        self._reopened: Checkpoint | None = None  # the volume was opened again for it
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._agreement: Agreement | None = None  # the last decision of the ranks
        #: Ranks that are waited for although they have requested nothing ...
        self._late: list[int] = []
        self._late_since_s = 0.0  # ... and since when (time.monotonic)

    def __len__(self) -> int:
        """Checkpoints that wait for a lane and a slot."""
        return sum(found.state is State.REQUESTED for found in self._tenant.ledger.live())

    # -- what the core may do without a question -----------------------------------------------

    def instruct(self) -> None:
        """Tells the core whether saves may begin, and whether it numbers them. Call it whenever
        that may have changed. Waits for nothing."""
        tenant = self._tenant
        if tenant.port is None:
            return
        alone = tenant.group.alone(tenant.key.rank, tenant.owner) if tenant.owner else None
        incarnation, above = alone or (0, 0)
        with contextlib.suppress(ValueError):  # closed
            tenant.port.native.policy(
                held=self._stops or not tenant.binding.is_usable, numbers=alone is not None,
                incarnation=incarnation, above=above,
            )  # fmt: skip

    def stop(self) -> None:
        """The daemon is stopping: what has not begun fails."""
        self._stops = True
        self.instruct()

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
            LOG.exception("%s: a checkpoint cannot be saved", self._tenant.key)
            found = self._tenant.ledger.find(event.session, event.id)
            if found is not None:
                self._tenant.refuse(found, _BROKEN)

    def _take(self, event: _core.Event) -> None:
        if event.kind == "requested":
            self._requested(event)
            return
        checkpoint = self._tenant.ledger.find(event.session, event.id)
        if checkpoint is None or not checkpoint.live:
            return
        if event.kind == "waits":
            self._first, self._why = checkpoint, event.error_name
            self.look()
            if self._task is None or self._task.done():
                self._task = asyncio.get_running_loop().create_task(self._run())
        elif event.kind == "begun":
            self._begun(checkpoint, event.sequence)
        else:
            self._tenant.ended(checkpoint, self._end_of(event.error_name, event.error))

    def _requested(self, event: _core.Event) -> None:
        tenant = self._tenant
        owner, port = tenant.owner, tenant.port_of(event.session)
        if owner is None or port is None or event.request is None:
            return
        port.native.noted()
        asked = event.request
        tenant.interval_steps = asked.interval
        checkpoint = Checkpoint(
            session=event.session, snapshot=event.id, step=asked.step,
            payload_bytes=asked.payload_bytes, skip_when_busy=asked.skip,
            incarnation=tenant.incarnation, world_size=owner.world_size,
            requested_ns=asked.taken_ns, map=asked.map,
            held_at_ns=asked.held_at_ns, held_ns=asked.held_ns,
        )  # fmt: skip
        tenant.ledger.add(checkpoint)
        tenant.chronicle.requested(tenant.key, checkpoint)
        if asked.cause:  # the core has refused it
            tenant.ended(checkpoint, failed(Cause(asked.cause), asked.argument))
            return
        end = self._number(checkpoint, asked, port)
        if end is not None:
            tenant.refuse(checkpoint, end)
        tenant.group.decide_soon()

    def _number(self, checkpoint: Checkpoint, asked: _core.SaveRequest, port: Port) -> End | None:
        """Gives one of several ranks its number; how it ends if it gets none."""
        tenant = self._tenant
        if self._stops:
            return failed(Cause.STOPPING)
        if tenant.volumes.current is None and not tenant.room_bytes:
            return failed(Cause.NO_ROOM)
        requested = Requested(
            asked.step, asked.base, asked.turn, asked.descents, asked.row, asked.division,
            asked.skip, checkpoint.requested_ns,
        )  # fmt: skip
        checkpoint.incarnation, checkpoint.sequence, end = tenant.group.number(
            tenant.key.rank, requested
        )
        tenant.ledger.numbered(checkpoint)
        if end is None and checkpoint.sequence:
            end = self._given_up(checkpoint) or self._tell_number(checkpoint, port)
        return end

    def _tell_number(self, checkpoint: Checkpoint, port: Port) -> End | None:
        try:
            port.native.number(
                checkpoint.snapshot, checkpoint.sequence, checkpoint.incarnation,
                checkpoint.world_size,
            )  # fmt: skip
        except (OSError, _core.NativeError):  # a sequence that is in use: no two are given out
            LOG.exception("%s: step %d got no number", self._tenant.key, checkpoint.step)
            return _BROKEN
        return None

    def _begun(self, checkpoint: Checkpoint, sequence: int) -> None:
        tenant, rank = self._tenant, self._tenant.key.rank
        self._late = []
        if not checkpoint.sequence:  # of a rank alone
            checkpoint.sequence = tenant.group.took(rank, sequence)
            tenant.ledger.numbered(checkpoint)
            port = tenant.port_of(checkpoint.session)
            if not sequence and port is not None and self._tell_number(checkpoint, port):
                tenant.refuse(checkpoint, _BROKEN)
                return
        tenant.ledger.passed(checkpoint.sequence)
        checkpoint.advance(State.COPYING, time.monotonic_ns())

    def _end_of(self, code: str, number: int) -> End:
        """How one ends that the core has refused for this code."""
        if code == "NO_LANE":
            return _SKIPPED
        if code == "ENOTCONN":
            return failed(Cause.ENDED_BEFORE)
        if code in _REFUSED:
            return End(State.FAILED, Why(stage="begin", code=code, number=number))
        return self._failed(_error_of(code))

    def _failed(self, error: BaseException) -> End:
        told = translated(error, f"the volume of {self._tenant.key}")
        return End(
            State.FAILED,
            in_words(told.message, told.hint, getattr(error, "code_name", told.code)),
        )

    # -- what has been given up ----------------------------------------------------------------

    def obey(self, agreement: Agreement) -> None:
        """The ranks have decided: what waits and was given up ends. The first one, which makes them
        decide when it looks for a slot, looks again only if they have decided otherwise."""
        for checkpoint in self._tenant.ledger.live():
            if checkpoint.state is State.REQUESTED and checkpoint.sequence:
                end = self._given_up(checkpoint)
                if end is not None:
                    self._tenant.refuse(checkpoint, end)
        if agreement != self._agreement:
            self._agreement = agreement
            self.look()

    def _given_up(self, checkpoint: Checkpoint) -> End | None:
        group = self._tenant.group
        if not group.gives_up(checkpoint.sequence):
            return None
        return End(State.SKIPPED, group.why_given_up(checkpoint.sequence))

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
                LOG.exception("%s: step %d cannot begin", self._tenant.key, first.step)
                end = _BROKEN
            if end is not None:
                # The slot that was missing may be the one that this checkpoint has just got.
                self._tenant.engine.deliver()
                if self._waiting() is first:
                    self._tenant.refuse(first, end)
            if self._waiting() is first:
                await happened(self._changed, LOOK_S)

    def _waiting(self) -> Checkpoint | None:
        first = self._first
        if first is None or first.state is not State.REQUESTED:
            self._first = None
        return self._first

    async def _help(self, first: Checkpoint) -> End | None:
        """Does what the first one waits for; or how it ends, if that cannot be done."""
        tenant = self._tenant
        if self._stops:
            return failed(Cause.STOPPING)
        if self._why == "NO_SLOT":
            if not await self._recycled(first) and not self._is_stopped():
                end = await self.end_without_slot()
                return _SKIPPED if end is None and first.skip_when_busy else end
        elif self._why == "STOPPED" and self._reopened is first:
            return self._failed(_error_of("STOPPED"))
        else:
            if self._why == "STOPPED":
                tenant.binding.stop()
            self._reopened = first
            try:
                await tenant.reopen()
            except Exception as error:
                return self._failed(error)
        port = tenant.port_of(first.session)
        if port is not None:
            with contextlib.suppress(ValueError):  # closed
                port.native.retry()
        return None

    def _is_stopped(self) -> bool:
        """The record that was to free a slot has failed: the core says so when it tries again."""
        current = self._tenant.volumes.current
        return current is not None and current.info.stopped

    async def end_without_slot(self) -> End | None:
        """How a checkpoint ends for which no slot will become free; None while one may."""
        if self._late and time.monotonic() - self._late_since_s > LAG_LIMIT_S:
            return End(State.SKIPPED, Why(Cause.SLOTS_LATE, self._late[0]))
        if (
            self._tenant.ledger.in_flight or self._tenant.is_read
        ):  # a reader holds the slot it reads
            return None
        await self._tenant.volumes.refresh()
        current = self._tenant.volumes.current
        if current is None or current.info.free_slots:
            return None
        with contextlib.suppress(ValueError):  # it is being reopened
            if current.volume.has_expendable():  # since a moment ago
                return None
        newest = self._tenant.group.newest_common
        if self._tenant.is_grouped and any(one.sequence > newest for one in current.checkpoints):
            return None  # until the other ranks have caught up
        protected = sorted(self._tenant.retention.protected)
        if protected:
            return failed(Cause.SLOTS_PROTECTED, protected[-1])
        return failed(Cause.SLOTS_BROKEN, current.quarantined)

    async def _recycled(self, checkpoint: Checkpoint) -> bool:
        """No slot is free: recycles what is no longer kept now, instead of with the next record,
        and in the end what only a reader keeps. Whether a slot became free."""
        if self._tenant.volumes.current is None:
            return False
        if self._tenant.is_grouped:
            late = await self._tenant.group.request_slot(self._tenant.key.rank)
            before = self._late
            if not late or not before:
                self._late_since_s = time.monotonic()
            self._late = late
        volumes = self._tenant.volumes
        if await volumes.recycle():
            return True
        waits = not checkpoint.skip_when_busy
        return self._tenant.end_lease(waits=waits) and await volumes.recycle()


def _error_of(code: str) -> _core.NativeError:
    """The core's error with this code, which it reported in an event."""
    error = _core.NativeError(code)
    error.code_name = code
    return error
