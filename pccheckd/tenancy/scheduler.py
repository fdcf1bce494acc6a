"""Admission: snapshots that asked to be copied wait here, first come first served, for a lane and a
slot of their volume. Waiting is bounded by the client, which abandons at its stall limit."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from pccheck_wire.messages import CheckpointState as State
from pccheckd.base.logs import LOG

from .checkpoint import Checkpoint

PENDING_MAX = 64  # PCC_SNAPSHOTS: no honest client has more outstanding
#: A slot is freed a moment after the event that announces it, so waiting ones try again by time.
RETRY_S = 0.004
RETRY_MAX_S = 0.032  # many that wait long must not keep the threads busy

#: Answers of an attempt that may change by waiting.
BUSY = frozenset({"NO_LANE", "NO_SLOT"})


class End(NamedTuple):
    """How a checkpoint that was never admitted ends."""

    to: State
    reason: str
    hint: str


Attempt = Callable[[Checkpoint], Awaitable[str]]
Refuse = Callable[[Checkpoint, State, str, str], None]


class Scheduler:
    """The queue of one tenant.

    `attempt` tries to begin a checkpoint and returns "" or the native code's name; `refuse` ends
    one; `hopeless` says how one ends for which no slot will come free, or None.
    """

    def __init__(
        self,
        attempt: Attempt,
        refuse: Refuse,
        hopeless: Callable[[], Awaitable[End | None]],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._attempt = attempt
        self._refuse = refuse
        self._hopeless = hopeless
        self._sleep = sleep
        self._pending: deque[Checkpoint] = deque()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._pending)

    def submit(self, checkpoint: Checkpoint) -> None:
        """Queues one; it is admitted, skipped or refused later."""
        if len(self._pending) >= PENDING_MAX:
            self._refuse(checkpoint, State.FAILED, f"more than {PENDING_MAX} snapshots wait", "")
            return
        self._pending.append(checkpoint)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self.run())

    def drop(self, session: int, reason: str) -> None:
        """Ends what a session that is gone still has waiting."""
        for checkpoint in [c for c in self._pending if c.session == session]:
            self._pending.remove(checkpoint)
            self._refuse(checkpoint, State.FAILED, reason, "")

    async def run(self) -> None:
        """Works the queue off in order; ends when it is empty."""
        pause_s = RETRY_S
        while self._pending:
            checkpoint = self._pending[0]
            try:
                waits = await self._settle(checkpoint)
            except Exception:  # the edge of this checkpoint: those behind it go on
                LOG.exception("the checkpoint of step %d could not be begun", checkpoint.step)
                self._take(checkpoint, State.FAILED, "a fault of the daemon", "its log has it")
                continue
            if waits:
                await self._sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MAX_S)
            else:
                pause_s = RETRY_S

    async def _settle(self, checkpoint: Checkpoint) -> bool:
        """Tries to begin the first one, or ends it; True when it has to wait."""
        answer = await self._attempt(checkpoint)
        if not self._pending or self._pending[0] is not checkpoint:
            return False  # dropped meanwhile
        if answer not in BUSY:
            self._pending.popleft()
            return False
        end = await self._hopeless() if answer == "NO_SLOT" else None
        if end is None and checkpoint.skip_when_busy:
            end = End(State.SKIPPED, "every slot was busy", 'on_busy="wait" waits')
        if end is not None:
            self._take(checkpoint, *end)
        return end is None

    async def close(self) -> None:
        self._pending.clear()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _take(self, checkpoint: Checkpoint, state: State, reason: str, hint: str) -> None:
        if self._pending and self._pending[0] is checkpoint:
            self._pending.popleft()
            self._refuse(checkpoint, state, reason, hint)
