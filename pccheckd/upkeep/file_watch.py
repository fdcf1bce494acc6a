"""Once a second: are the storage directory and the volumes' files where they were? What was removed
is noticed before the next checkpoint then, and also where nobody saves."""

from __future__ import annotations

import asyncio
import os

from pccheckd.base.background import Background
from pccheckd.core.engine import Engine
from pccheckd.jobs.registry import Registry
from pccheckd.tenancy.tenant import Tenant

PERIOD_S = 1.0


class FileWatch(Background):
    """Started and stopped by the daemon's start and stop. A disk that does not answer keeps one
    look of each rank waiting, and nobody else."""

    def __init__(self, engine: Engine, registry: Registry) -> None:
        self._engine = engine
        self._registry = registry
        self._going: set[Tenant] = set()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self._engine.lacks_storage(os.getuid())
            for tenant in list(self._registry.tenants()):
                if tenant not in self._going and not tenant.closed:
                    self._going.add(tenant)
                    tenant.spawn(self._look(tenant))

    async def _look(self, tenant: Tenant) -> None:
        try:
            await tenant.look(listing=False)
        finally:
            self._going.discard(tenant)
