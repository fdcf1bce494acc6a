"""Beginning a tenant's checkpoints in the native core, and what its refusals mean."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from pccheck_native import _core
from pccheck_wire.messages import CheckpointState as State
from pccheckd.base.logs import LOG
from pccheckd.core.engine import translated

from .checkpoint import GIVEN_UP, Checkpoint
from .scheduler import BUSY, End

if TYPE_CHECKING:
    from .tenant import Tenant

#: How long a group's full volume waits for a rank that has asked for nothing: a request that is on
#: its way takes milliseconds, one that never comes must not hold training up at every checkpoint.
LAG_LIMIT_S = 2.0

#: Reason and hint, by the code, of what is not the volume's fault.
_REFUSED = {
    "ABORTED": ("the trainer let it go before it began", ""),
    "BAD_HANDLE": (
        "the GPU memory that it names is not what the trainer shares now",
        "the next checkpoint shares it anew, or is pushed",
    ),
    "DEVICE_LOST": (
        "the daemon has lost the GPU", "its tensors are pushed until pccheckd is started anew"
    ),
}  # fmt: skip


class Admission:
    """Owned by its tenant; the scheduler's queue asks it, one checkpoint at a time."""

    def __init__(self, tenant: Tenant) -> None:
        self.lock = asyncio.Lock()  # held while a sequence is taken
        self._tenant = tenant
        self._late = ""  # ranks that are waited for although they have asked for nothing ...
        self._late_since_s = 0.0  # ... and since when (time.monotonic)

    async def attempt(self, checkpoint: Checkpoint) -> str:
        """Tries to begin one; "" when it was begun or has ended, else why it has to wait."""
        tenant = self._tenant
        if tenant.port is None or checkpoint.state is not State.REQUESTED:
            return ""
        if tenant.group.gives_up(checkpoint.sequence):
            checkpoint.error = GIVEN_UP
            why = tenant.group.why_given_up(checkpoint.sequence)
            tenant.refuse(checkpoint, State.SKIPPED, why, "")
            return ""
        reopened = tenant.stopped or tenant.volume_lost
        try:
            if reopened:
                await tenant.reopen()
            sequence = await self._begin(checkpoint)
        except _core.NativeError as error:
            if error.code_name == "NO_SLOT" and await self._recycled():
                return await self.attempt(checkpoint)
            return self._refused(checkpoint, error, reopened)
        except Exception as error:  # the edge of this checkpoint: it fails, the others go on
            told = translated(error, f"the volume of {tenant.key}")
            checkpoint.error = told.code
            tenant.refuse(checkpoint, State.FAILED, told.message, told.hint)
            if not isinstance(error, OSError):
                LOG.warning("%s: cannot begin", tenant.key, exc_info=error)
            return ""
        if not sequence:
            reason = "the trainer ended before it was admitted"
            tenant.refuse(checkpoint, State.FAILED, reason, "")
            return ""
        self._late = ""
        if checkpoint.state is State.REQUESTED:  # its events may have come first
            checkpoint.advance(State.COPYING, time.monotonic_ns())
        return ""

    @property
    def _grouped(self) -> bool:
        owner = self._tenant.owner
        return owner is not None and owner.world_size > 1

    async def hopeless(self) -> End | None:
        """How a checkpoint ends for which no slot comes free by waiting; None when one may."""
        tenant = self._tenant
        if self._late and time.monotonic() - self._late_since_s > LAG_LIMIT_S:
            return End(
                State.SKIPPED,
                f"every slot is in use; a slot becomes free when rank {self._late} saves the "
                "checkpoints that this rank has",
                "call checkpoint() for the same steps on every rank; if only one rank saves, make "
                "its client with solo=True",
            )
        if tenant.ledger.in_flight or tenant.reading:  # a reader holds the slot that it reads
            return None
        await tenant.volumes.refresh()
        current = tenant.volumes.current
        if current is None or current.info.free_slots:
            return None
        with contextlib.suppress(ValueError):  # it is being reopened
            if current.volume.has_expendable():  # since a moment ago
                return None
        newest = tenant.group.newest_common
        if any(found.sequence > newest for found in current.checkpoints) and self._grouped:
            return None  # until the other ranks have caught up
        protected = sorted(tenant.retention.protected)
        if protected:
            return End(
                State.FAILED,
                f"the slots left hold checkpoints of the run before: {protected}",
                "call restore() or adopt() first, or start with fresh=True",
            )
        return End(
            State.FAILED,
            f"no slot of {current.path} is usable: {current.quarantined} quarantined",
            "check the disk",
        )

    async def _begin(self, checkpoint: Checkpoint) -> int:
        """The sequence; 0 when the page is another session's now."""
        tenant = self._tenant
        async with self.lock:
            port, owner = tenant.port, tenant.owner
            if port is None or owner is None or owner.session != checkpoint.session:
                return 0
            sequence = await tenant.engine.call(
                tenant.key.uid, port.channel.begin, checkpoint.snapshot, map=checkpoint.map,
                sequence=checkpoint.sequence, step=checkpoint.step,
                incarnation=checkpoint.incarnation, world_size=checkpoint.world_size,
                payload_bytes=checkpoint.payload_bytes, tree_offset=checkpoint.tree_offset,
                tree_bytes=checkpoint.tree_bytes,
            )  # fmt: skip
            tenant.ledger.last_sequence = max(tenant.ledger.last_sequence, sequence)
            return sequence

    def _refused(self, checkpoint: Checkpoint, error: _core.NativeError, reopened: bool) -> str:
        """What the core's answer means: one of BUSY, or the end of this checkpoint."""
        tenant = self._tenant
        if error.code_name in BUSY:
            return error.code_name
        if error.code_name == "STOPPED" and not reopened:
            tenant.stopped = True
            return "NO_LANE"
        checkpoint.error = error.code_name
        if error.code_name in _REFUSED:
            tenant.refuse(checkpoint, State.FAILED, *_REFUSED[error.code_name])
        else:
            told = translated(error, f"the volume of {tenant.key}")
            tenant.refuse(checkpoint, State.FAILED, told.message, told.hint)
        return ""

    async def _recycled(self) -> bool:
        """No slot is free: what is no longer kept goes now, instead of with the next record.
        Whether anything went."""
        tenant = self._tenant
        current = tenant.volumes.current
        if current is None:
            return False
        if self._grouped:
            late, before = tenant.group.wants_slot(tenant.key.rank), self._late
            if not late or not before:
                self._late_since_s = time.monotonic()
            self._late = late
        try:
            if not current.volume.has_expendable():
                return False
            await tenant.engine.call(tenant.key.uid, current.volume.recycle)
            await tenant.engine.call(tenant.key.uid, current.read)
        except (OSError, ValueError, _core.NativeError) as error:
            LOG.warning("%s: cannot recycle: %s", tenant.key, error)
            return False
        return current.info.free_slots > 0
