"""Checks once a second that the storage directory and the volumes' files are where they were, so
that a removal is noticed before the next checkpoint, and also when no rank saves."""

from __future__ import annotations

import asyncio
import os

from pccheckd.base.background import Background
from pccheckd.jobs.registry import Registry
from pccheckd.tenancy.tenant import Tenant

PERIOD_S = 1.0


class FileWatch(Background):
    """A disk that does not answer blocks one check of each rank, and nothing else."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._going: set[Tenant] = set()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self._registry.engine.lacks_storage(os.getuid())
            if self._registry.survey.faults:
                await self._registry.engine.call(os.getuid(), self._registry.survey.look)
            for tenant in list(self._registry.tenants()):
                if tenant not in self._going and not tenant.seat.is_closed:
                    self._going.add(tenant)
                    tenant.tasks.spawn(self._look(tenant))

    async def _look(self, tenant: Tenant) -> None:
        try:
            await tenant.readiness.look(listing=False)
        finally:
            self._going.discard(tenant)
