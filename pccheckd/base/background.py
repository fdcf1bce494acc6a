"""What runs beside the daemon's requests. Nothing here ends in silence: a task that fails is logged
with its traceback, and what has to go on is begun anew."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from .logs import LOG

#: Before a task that has failed begins anew: a lasting fault must not keep the loop busy.
RESTART_S = 1.0


class Background:
    """One task on the loop, from `start` to `close`. Subclasses say in `_run` what goes on; it is
    cancelled at the end, and begun anew when it fails before."""

    restart_s = RESTART_S
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            try:
                await self._run()
                return
            except Exception:
                LOG.exception("%s failed; it begins anew", type(self).__name__)
            await asyncio.sleep(self.restart_s)

    async def _run(self) -> None:
        raise NotImplementedError


class Tasks:
    """Pieces of work that nobody awaits; they are held until they end."""

    def __init__(self, owner: object) -> None:
        """`owner` is whom the log names."""
        self._owner = owner
        self._going: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._going.add(task)
        task.add_done_callback(self._ended)

    async def cancel(self) -> None:
        """Ends those of this moment; they are over on return."""
        for task in self._going:
            task.cancel()
        await self.settle()

    async def settle(self) -> None:
        """Waits until those of this moment have ended."""
        await asyncio.gather(*self._going, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._going.discard(task)
        if not task.cancelled() and task.exception() is not None:
            LOG.error("%s: background work failed", self._owner, exc_info=task.exception())
