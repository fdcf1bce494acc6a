"""Passes of the event loop, which all users share."""

from __future__ import annotations

import asyncio


class Passes:
    """Gives each user one step in a pass of the loop, however many of its tasks are ready. So a
    pass is as long as one step of each user."""

    def __init__(self) -> None:
        self._turns: dict[int, asyncio.Lock] = {}

    async def next(self, uid: int) -> None:
        """Returns in a pass in which no other caller returns for this user; first come, first
        served."""
        async with self._turns.setdefault(uid, asyncio.Lock()):
            await asyncio.sleep(0)
