"""Work beside the daemon's requests. A task that fails is logged with its traceback; one that must
not end is restarted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Self

from .logs import LOG

#: Before a failed task restarts: a lasting fault must not keep the loop busy.
RESTART_S = 1.0


async def happened(event: asyncio.Event, limit_s: float | None) -> bool:
    """Waits until it is set, no longer than the limit; whether it was."""
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(event.wait(), limit_s)
    return False


class Background:
    """One task on the loop, from `start` to `close`, or within `async with`. Subclasses implement
    `_run`, which is cancelled at the end and restarted when it fails before."""

    restart_s = RESTART_S
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _keep(self) -> None:
        while True:
            try:
                await self._run()
                return
            except Exception:
                LOG.exception("%s failed and restarts", type(self).__name__)
            await asyncio.sleep(self.restart_s)

    async def _run(self) -> None:
        raise NotImplementedError


class Tasks:
    """Work that no other task awaits; held until it ends."""

    def __init__(self, owner: object) -> None:
        """`owner` is named in the log."""
        self._owner = owner
        self._going: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._going.add(task)
        task.add_done_callback(self._ended)

    async def cancel(self) -> None:
        """Cancels the present ones; they have ended on return."""
        for task in self._going:
            task.cancel()
        await self.settle()

    async def settle(self) -> None:
        """Waits until the present ones have ended."""
        await asyncio.gather(*self._going, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._going.discard(task)
        if not task.cancelled() and task.exception() is not None:
            LOG.error("%s: background work failed", self._owner, exc_info=task.exception())
