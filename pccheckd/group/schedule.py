"""When the ranks of a job decide: in the next pass of the loop, or after a rest. One decision
serves all ranks that ask until then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

#: After a decision that took longer, the job makes none for RESTS times as long. So a user
#: with more than a hundred ranks leaves most of the loop to other users.
LONG_DECISION_S = 0.001
RESTS = 4


class Schedule:
    """Owned by the job. `decide` gets the ranks that have no slot for their next checkpoint."""

    def __init__(
        self, decide: Callable[[Collection[int]], None], clock: Callable[[], float]
    ) -> None:
        self._decide = decide
        self._clock = clock
        #: Ranks that wait for a slot, and whether they still do, until the next decision ...
        self._short: list[tuple[int, Callable[[], bool]]] = []
        self._decided = asyncio.Event()  # ... which sets this
        self._due: asyncio.Handle | None = None
        self._rests_until_s = 0.0
        self.is_held = False  #: not all ranks are known yet, so nothing is decided

    def soon(self) -> None:
        """The ranks may have to decide again."""
        if self._due is None:
            loop, left_s = asyncio.get_running_loop(), self._rests_until_s - self._clock()
            self._due = (
                loop.call_later(left_s, self.now) if left_s > 0 else loop.call_soon(self.now)
            )

    def now(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None
        if self.is_held:
            return
        asked, self._short = self._short, []
        short = {rank for rank, needs_it in asked if needs_it()}
        began_s = self._clock()
        try:
            self._decide(short)
        finally:
            took_s = self._clock() - began_s
            if took_s > LONG_DECISION_S:
                self._rests_until_s = self._clock() + RESTS * took_s
            self._decided.set()
            self._decided = asyncio.Event()

    async def for_slot(self, rank: int, needs_it: Callable[[], bool]) -> None:
        """Waits for the next decision, in which the rank has no slot for its next checkpoint,
        unless it has got one before."""
        self._short.append((rank, needs_it))
        decided = self._decided
        self.soon()
        await decided.wait()
