"""Admission: requested checkpoints wait here, first come first served, for a lane and a slot of
their volume. The client bounds the wait: it abandons a checkpoint at its stall limit."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING

from pccheck_native import _core
from pccheck_wire.ends import Cause, Why, in_words
from pccheck_wire.errors import InternalError
from pccheck_wire.messages import CheckpointState as State
from pccheckd.base.errors import translated
from pccheckd.base.logs import LOG

from .checkpoint import Checkpoint, End, failed

if TYPE_CHECKING:
    from .tenant import Tenant

PENDING_MAX = 64  # PCC_SNAPSHOTS: no honest client has more outstanding
#: A slot is freed a moment after the event that announces it, so waiting ones try again by time.
RETRY_S = 0.004
RETRY_MAX_S = 0.032  # many that wait long must not keep the threads busy
#: How long a full volume of a group waits for a rank that has requested nothing. A request that is
#: on its way takes milliseconds; a request that never comes must not delay training each time.
LAG_LIMIT_S = 2.0

#: Codes of the core that mean: not yet. The checkpoint waits and tries again.
BUSY = frozenset({"NO_LANE", "NO_SLOT"})
#: Codes of refusals that are not the volume's fault.
_REFUSED = frozenset({"ABORTED", "BAD_HANDLE", "DEVICE_LOST", "BAD_PEER"})


class Admission:
    """The queue of one tenant, in front of the native core. Owned by the tenant."""

    def __init__(self, tenant: Tenant) -> None:
        self._pending: deque[Checkpoint] = deque()
        self._task: asyncio.Task[None] | None = None
        self._tried: Checkpoint | None = None  # the core may have begun it, and may have copied it
        self._tenant = tenant
        #: Ranks that are waited for although they have requested nothing ...
        self._late: list[int] = []
        self._late_since_s = 0.0  # ... and since when (time.monotonic)

    def __len__(self) -> int:
        return len(self._pending)

    def submit(self, checkpoint: Checkpoint) -> None:
        """Queues a checkpoint, which is admitted, skipped or refused later."""
        if len(self._pending) >= PENDING_MAX:
            self._tenant.refuse(checkpoint, failed(Cause.QUEUE_FULL, PENDING_MAX))
            return
        self._pending.append(checkpoint)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    def drop(self, session: int) -> None:
        """Ends the waiting checkpoints of a session that has ended. The core ends the one that it
        is beginning: a copied checkpoint survives its trainer."""
        for checkpoint in [c for c in self._pending if c.session == session]:
            self._pending.remove(checkpoint)
            if checkpoint is self._tried:
                continue
            self._tenant.refuse(checkpoint, failed(Cause.ENDED_BEFORE))

    async def close(self) -> None:
        self._pending.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _run(self) -> None:
        """Processes the queue in order; ends when it is empty."""
        pause_s = RETRY_S
        while self._pending:
            checkpoint = self._pending[0]
            try:
                waits = await self._try_first(checkpoint)
            except Exception:  # the edge of this checkpoint: the next ones continue
                LOG.exception("%s: step %d cannot begin", self._tenant.key, checkpoint.step)
                self._end_first(checkpoint, failed(Cause.INTERNAL))
                continue
            if waits:
                await self.sleep(pause_s)
            pause_s = min(2 * pause_s, RETRY_MAX_S) if waits else RETRY_S

    async def _try_first(self, checkpoint: Checkpoint) -> bool:
        """Tries to begin the first one, or ends it; True when it has to wait."""
        self._tried = checkpoint
        try:
            answer = await self.attempt(checkpoint)
        finally:
            self._tried = None
        if not self._pending or self._pending[0] is not checkpoint:  # dropped meanwhile
            if answer in BUSY:
                self._tenant.refuse(checkpoint, failed(Cause.ENDED_BEFORE))
            return False
        if answer not in BUSY:
            self._pending.popleft()
            return False
        end = await self.end_without_slot() if answer == "NO_SLOT" else None
        if end is None and checkpoint.skip_when_busy:
            end = End(State.SKIPPED, Why(Cause.SLOTS_BUSY))
        if end is not None:
            self._end_first(checkpoint, end)
        return end is None

    def _end_first(self, checkpoint: Checkpoint, end: End) -> None:
        if self._pending and self._pending[0] is checkpoint:
            self._pending.popleft()
            self._tenant.refuse(checkpoint, end)

    async def attempt(self, checkpoint: Checkpoint) -> str:
        """Tries to begin a checkpoint: "" when it has begun or ended, else why it waits (BUSY)."""
        if checkpoint.state is not State.REQUESTED:
            return ""
        if self._tenant.group.gives_up(checkpoint.sequence):
            why = self._tenant.group.why_given_up(checkpoint.sequence)
            self._tenant.refuse(checkpoint, End(State.SKIPPED, why))
            return ""
        try:
            sequence = await self._tenant.begin_save(checkpoint)
        except Exception as error:  # the edge of this checkpoint: it fails, the others continue
            if checkpoint.state is not State.REQUESTED:
                return ""  # it was refused meanwhile, which changed its word
            code, number = "", 0
            if isinstance(error, _core.NativeError):
                code, number = error.code_name, error.code
            if code == "NO_SLOT" and await self._recycled(checkpoint):
                return await self.attempt(checkpoint)
            if code in BUSY:
                return code
            told = translated(error, f"the volume of {self._tenant.key}")
            why = Why(stage="begin", code=code, number=number)
            if code not in _REFUSED:
                why = in_words(told.message, told.hint, code or told.code)
            self._tenant.refuse(checkpoint, End(State.FAILED, why))
            if code not in _REFUSED and isinstance(told, InternalError):
                LOG.warning(
                    "%s: step %d cannot begin", self._tenant.key, checkpoint.step, exc_info=error
                )
            return ""
        if not sequence:
            self._tenant.refuse(checkpoint, failed(Cause.ENDED_BEFORE))
            return ""
        self._late = []
        if checkpoint.state is State.REQUESTED:  # its events may have come first
            checkpoint.advance(State.COPYING, time.monotonic_ns())
        return ""

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
