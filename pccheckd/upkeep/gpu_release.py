"""Releases GPUs whose memory no trainer shares: a context takes hundreds of megabytes of the GPU,
and keeps its clocks up."""

from __future__ import annotations

import asyncio
import os

from pccheckd.base.background import Background
from pccheckd.base.logs import LOG
from pccheckd.jobs.registry import Registry

#: The longest pause between two checks; shorter with a short `gpu_release_s`.
LOOK_S = 10.0


class GpuRelease(Background):
    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def look(self) -> None:
        """First the memory that was pinned for a GPU, then the GPU."""
        gpus = self._registry.engine.driver.gpus
        if gpus is None or not gpus.info():
            return
        after_s = self._registry.config.gpu_release_s
        for tenant in list(self._registry.tenants()):
            if tenant.binding.port is None:
                continue
            try:
                await tenant.binding.port.rest(after_s)
            except Exception:  # the others' memory is released anyway
                LOG.exception("%s: DRAM could not be unpinned", tenant.key)
        await self._registry.engine.drive(os.getuid(), gpus.rest, after_s)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(min(LOOK_S, max(0.1, self._registry.config.gpu_release_s / 4)))
            await self.look()
