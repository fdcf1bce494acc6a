"""An event loop that counts its passes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class Loop(asyncio.SelectorEventLoop):
    passes = 0

    def _run_once(self) -> None:
        self.passes += 1
        super()._run_once()  # type: ignore[misc]


def run(work: Callable[[Loop], Awaitable[None]], limit_s: float = 60.0) -> None:
    """Runs `work`, which gets the loop as argument."""

    async def all_of_it() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        async with asyncio.timeout(limit_s):
            await work(loop)

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(all_of_it())
