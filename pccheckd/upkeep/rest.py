"""What ranks without a trainer keep: their memory and files, for a restart; no threads, and not for
ever."""

from __future__ import annotations

import asyncio
import time

from pccheckd.base.background import Background
from pccheckd.base.logs import LOG
from pccheckd.jobs.memory import LEFT_ALONE_S
from pccheckd.jobs.registry import Registry

#: A trainer that ended this long ago does not return at once: its rank keeps no writer threads.
REST_S = LEFT_ALONE_S


class Rest(Background):
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def look(self) -> None:
        """The writers first: a job that is closed has none."""
        before_ns = time.monotonic_ns() - int(REST_S * 1e9)
        for tenant in list(self._registry.tenants()):
            if tenant.quiet and tenant.seat.last_used_ns < before_ns:
                try:
                    await tenant.rest()
                except Exception:  # the others rest anyway
                    LOG.exception("%s: its writers could not be ended", tenant.key)
        await self._registry.trim()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(max(0.05, REST_S / 4))
            await self.look()
