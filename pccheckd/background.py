"""What runs beside the daemon's requests: one task on the loop, from `start` to `close`."""

from __future__ import annotations

import asyncio


class Background:
    """Subclasses say in `_run` what goes on; it is cancelled at the end."""

    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        raise NotImplementedError
