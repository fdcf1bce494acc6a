"""What is released when no trainer uses it: the threads of ranks, jobs that nothing uses, GPUs."""

from __future__ import annotations

import asyncio
import os
import time

from pccheckd.base.background import Background
from pccheckd.base.logs import LOG
from pccheckd.jobs.memory import LEFT_ALONE_S
from pccheckd.jobs.registry import Registry

#: A trainer that ended this long ago does not return at once: its rank keeps no writer threads.
REST_S = LEFT_ALONE_S
#: The longest pause between two looks at GPUs; shorter with a short `gpu_release_s`.
GPU_LOOK_S = 10.0


class Rest(Background):
    """Ranks without a trainer keep their memory and files, for a restart; no threads, and not for
    ever."""

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


class GpuRelease(Background):
    """A context takes hundreds of megabytes of a GPU, and keeps its clocks up."""

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
            await asyncio.sleep(min(GPU_LOOK_S, max(0.1, self._registry.config.gpu_release_s / 4)))
            await self.look()
