"""Beginning a tenant's checkpoints in the native core, and what its refusals mean."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from pccheck_native import _core
from pccheck_wire.messages import CheckpointState as State

from .checkpoint import Checkpoint
from .engine import translated
from .logs import LOG
from .scheduler import BUSY

if TYPE_CHECKING:
    from .tenants import Tenant

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

    async def attempt(self, checkpoint: Checkpoint) -> str:
        """Tries to begin one; "" when it was begun or has ended, else why it has to wait."""
        tenant = self._tenant
        if tenant.port is None or checkpoint.state is not State.REQUESTED:
            return ""
        reopened = tenant.stopped
        try:
            if reopened:
                await tenant.reopen()
            sequence = await self._begin(checkpoint)
        except _core.NativeError as error:
            return await self._refused(checkpoint, error, reopened)
        except Exception as error:  # the edge of this checkpoint: it fails, the others go on
            told = translated(error, f"the volume of {tenant.key}")
            checkpoint.error = told.code
            tenant.refuse(checkpoint, State.FAILED, told.message, told.hint)
            if not isinstance(error, OSError):
                LOG.warning("%s: cannot begin", tenant.key, exc_info=error)
            return ""
        if not sequence:
            return ""
        checkpoint.sequence = sequence
        if checkpoint.state is State.REQUESTED:  # its events may have come first
            checkpoint.advance(State.COPYING, time.monotonic_ns())
        return ""

    async def hopeless(self) -> tuple[str, str]:
        """Why no slot can come free by waiting; ("", "") when one can."""
        tenant = self._tenant
        if tenant.ledger.in_flight or tenant.reading:  # a reader holds the slot that it reads
            return "", ""
        await tenant.volumes.refresh()
        current, owner = tenant.volumes.current, tenant.owner
        if current is None or current.info.free_slots:
            return "", ""
        protected = sorted(tenant.retention.protected)
        if protected:
            return (
                f"the slots left hold checkpoints of the run before: {protected}",
                "call restore() first, or start with fresh=True",
            )
        if owner is not None and owner.world_size > 1 and tenant.retention.global_sequence:
            return "", ""  # when the other ranks have caught up
        return (
            f"no slot of {current.path} is usable: {current.quarantined} quarantined",
            "check the disk",
        )

    async def _begin(self, checkpoint: Checkpoint) -> int:
        """The sequence; 0 when the page is another session's by now: dropped with its own."""
        tenant = self._tenant
        async with self.lock:
            port, owner = tenant.port, tenant.owner
            if port is None or owner is None or owner.session != checkpoint.session:
                return 0
            sequence = await tenant.engine.call(
                tenant.key.uid, port.channel.begin, checkpoint.snapshot, map=checkpoint.map,
                step=checkpoint.step, incarnation=checkpoint.incarnation,
                world_size=checkpoint.world_size, payload_bytes=checkpoint.payload_bytes,
                tree_offset=checkpoint.tree_offset, tree_bytes=checkpoint.tree_bytes,
            )  # fmt: skip
            tenant.ledger.last_sequence = max(tenant.ledger.last_sequence, sequence)
            return sequence

    async def _refused(
        self, checkpoint: Checkpoint, error: _core.NativeError, reopened: bool
    ) -> str:
        """What the core's answer means: one of BUSY, or the end of this checkpoint."""
        tenant = self._tenant
        if error.code_name == "NO_SLOT":
            await self._recycle()
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

    async def _recycle(self) -> None:
        """No slot is free: what lost its flag since the last record may go, since none may follow
        that would say so. With saves in flight one will."""
        tenant = self._tenant
        current = tenant.volumes.current
        if current is None or tenant.ledger.in_flight:
            return
        try:
            await tenant.engine.call(tenant.key.uid, current.volume.recycle)
        except (OSError, ValueError, _core.NativeError) as error:
            LOG.warning("%s: cannot recycle: %s", tenant.key, error)
