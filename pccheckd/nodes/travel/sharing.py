"""What this node lets the other nodes of a job read: parts of checkpoints that it has offered to
them. The peer server asks (`pccheckd/peer/`)."""

from __future__ import annotations

import os
from pathlib import Path

from pccheck_native.nodes import peer
from pccheck_native.nodes.facts import FullName, SaveName
from pccheck_wire.errors import NoCheckpointError
from pccheckd.core.engine import Engine
from pccheckd.group.job import Job
from pccheckd.nodes.names import Names
from pccheckd.peer.grant import ReadGrant
from pccheckd.tenancy.tenant import Tenant

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class Sharing:
    """Owned by the wide job."""

    def __init__(self, job: Job, engine: Engine, names: Names) -> None:
        self._job, self._engine, self._names = job, engine, names

    async def allow(self, ask: peer.Ask) -> ReadGrant:
        """The file of the part that is asked for. Raises PccheckError."""
        tenant, sequence = self._find(ask)
        item = tenant.volumes.find(sequence)
        one = tenant.volumes.checkpoint(sequence)
        if item is None or one is None or not tenant.retention.is_usable(one):
            raise NoCheckpointError(f"this node has no intact part of rank {ask.part}")
        descriptor = await self._engine.call(self._job.uid, _opened, item.path)
        return ReadGrant(str(item.path), sequence, one.wall_ns, descriptor)

    async def damaged(self, ask: peer.Ask, sequence: int) -> None:
        """The peer server found the part damaged. Raises PccheckError."""
        tenant, known = self._find(ask)
        if known == sequence:
            await tenant.retention.damaged(sequence)

    def _find(self, ask: peer.Ask) -> tuple[Tenant, int]:
        full = FullName(ask.start, SaveName(*ask.name))
        sequence, tenant = self._names.sequence(full), self._job.tenants.get(ask.part)
        if sequence is None or tenant is None:
            raise NoCheckpointError(f"this node has no part of rank {ask.part} of that checkpoint")
        return tenant, sequence


def _opened(path: Path) -> int:
    return os.open(path, _READ)
