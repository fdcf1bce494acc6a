"""How often `should_checkpoint()` saves: from what steps and checkpoints take, as in section 3.4 of
the paper.

    f = max(ceil(T_w / (N q t)), ceil(c / ((q - 1) t)))

t: seconds of a step beside which nothing is saved. T_w: from the request of a checkpoint to
durable, with N in flight; less often than every T_w / N, and a checkpoint waits for no slot. Of a
memory-only one T_w is the time to copied, and N is 1. Where only every k-th goes to the disk,
T_w / k of those counts instead, so that one is written at a time.
c: what one checkpoint costs the steps beside it. q: the allowed slowdown, 1.03 for three percent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, median_low

from pccheck.flight.in_flight import NOT_SAVED, InFlight
from pccheck_wire.messages import CheckpointState

WARM_STEPS = 5  # before the first checkpoint; the very first step is not counted
GUESS = 10  # steps, while nothing is known
SHRINKS = 0.8  # the interval becomes shorter when at most this part of it was enough,
IN_A_ROW = 3  # at this many checkpoints
_STEPS_KEPT, _CHECKPOINTS_KEPT = 64, 5
_SAVED = (CheckpointState.DURABLE, CheckpointState.GLOBAL)


@dataclass(slots=True)
class _Flying:
    checkpoint: InFlight
    share: float  # N, when it was requested; k, of one of k; 1, of a memory-only one
    seen_s: float  # when it was last seen not to have ended


class Interval:
    """Decides after which steps to save. Training thread only."""

    def __init__(
        self, slowdown: float, agree: Callable[[int], int], durable_every: float = 1
    ) -> None:
        """`agree` gives the largest of a number over all ranks, to each of them. Every decision
        depends on steps and agreed numbers alone, so that all ranks save after the same steps."""
        self._slowdown = slowdown
        self._every = durable_every
        self._agree = agree
        self.steps = 0  #: between two checkpoints; 0 before the first one
        self._due_at: int | None = None
        self._began_at: int | None = None  # the step of the newest checkpoint
        self._shorter: list[int] = []
        self._call: tuple[int, float] | None = None  # the step and time of the last call
        self._busy = False  # something was in flight since then
        self._flying: list[_Flying] = []
        self._cost_s = 0.0  # of the newest checkpoint, so far
        self._idle_s: deque[float] = deque(maxlen=_STEPS_KEPT)  # each of a step
        self._steps_s: deque[float] = deque(maxlen=_STEPS_KEPT)
        # Each T_w / N, of checkpoints for the disk and of those that are memory-only.
        self._apart_s = [deque[float](maxlen=_CHECKPOINTS_KEPT) for _ in range(2)]
        self._costs_s: deque[float] = deque(maxlen=_CHECKPOINTS_KEPT)

    def due(self, step: int, now_s: float) -> bool:
        """Whether to save after this step, which has just ended."""
        self._note_step(step, now_s)
        if self._due_at is None:
            self._due_at = step + WARM_STEPS
        if step < self._due_at:
            return False
        self._choose(self._agree(self._wanted(now_s)))
        if self._began_at is not None:
            self._due_at = self._began_at + self.steps
            if step < self._due_at:
                return False
            self._costs_s.append(max(0.0, self._cost_s))
        self._cost_s, self._began_at, self._due_at = 0.0, step, step + self.steps
        return True

    def requested(self, checkpoint: InFlight) -> None:
        """What was made of the newest decision."""
        requested_s = checkpoint.requested_ns / 1e9
        share = self._every if self._every > 1 else len(self._flying) + 1
        share = 1.0 if checkpoint.in_memory else share
        self._flying.append(_Flying(checkpoint, share, requested_s))
        self._busy = True

    def _note_step(self, step: int, now_s: float) -> None:
        last, self._call = self._call, (step, now_s)
        busy, self._busy = self._busy, False
        self._note_ends(now_s)
        if last is None:
            return
        if step <= last[0]:  # the script went back: restore()
            self._due_at = self._began_at = None
            return
        if self._due_at is None:
            return  # the first step also warms up
        took_s = (now_s - last[1]) / (step - last[0])
        self._steps_s.append(took_s)
        if not busy:
            self._idle_s.append(took_s)
        elif (usual_s := self._step_s()) is not None:
            self._cost_s += (took_s - usual_s) * (step - last[0])

    def _note_ends(self, now_s: float) -> None:
        flying = []
        for item in self._flying:
            state = item.checkpoint.state
            in_memory = item.checkpoint.in_memory
            if state < (CheckpointState.COPIED if in_memory else CheckpointState.DURABLE):
                item.seen_s = now_s
                flying.append(item)
            elif state in _SAVED or (in_memory and state not in NOT_SAVED):
                ended_s = (item.seen_s + now_s) / 2  # since the last look: half of that is meant
                persist_s = ended_s - item.checkpoint.requested_ns / 1e9
                self._apart_s[in_memory].append(persist_s / item.share)
        self._flying = flying
        self._busy = bool(flying)

    def _step_s(self) -> float | None:
        """t. Steps that became faster while something is always in flight count, too."""
        if not self._idle_s:
            return median(self._steps_s) if self._steps_s else None
        return min(median(self._idle_s), median(self._steps_s))

    def _wanted(self, now_s: float) -> int:
        """What this rank has measured, in steps. The first checkpoint of a job takes longer than
        later ones: of two samples the shorter one counts, and a single cost does not."""
        step_s = self._step_s()
        waiting_s = [
            (now_s - item.checkpoint.requested_ns / 1e9) / item.share for item in self._flying
        ]
        measured_s = [median_low(one) for one in self._apart_s if one]
        if not step_s or not measured_s:
            return 2 * self.steps if waiting_s else GUESS
        apart_s = max(*measured_s, *waiting_s, 0.0)
        cost_s = median_low(self._costs_s) if len(self._costs_s) > 1 else 0.0
        q = self._slowdown
        return max(1, math.ceil(round(max(apart_s / q, cost_s / (q - 1)) / step_s, 6)))

    def _choose(self, wanted: int) -> None:
        """Saves less often at once, and more often when that was enough some times in a row."""
        if wanted >= self.steps:
            self.steps, self._shorter = wanted, []
            return
        self._shorter.append(wanted)
        if len(self._shorter) == IN_A_ROW:
            if max(self._shorter) <= SHRINKS * self.steps:
                self.steps = max(self._shorter)
            self._shorter = []
