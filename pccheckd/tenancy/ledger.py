"""A tenant's recent checkpoints and their states; counters; the newest durable one."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from itertools import islice

from pccheck_native import _core
from pccheck_wire.ends import Cause, Why, sentence
from pccheck_wire.messages import CheckpointState as State
from pccheckd.base.background import happened

from .checkpoint import End, RankCheckpoint

HISTORY = 256
COUNT_MAX = 1 << 53  # what JSON keeps exactly
REQUESTS = 16  # that the interval is averaged over
_WAIT_STEP_S = 0.25
_NOT_COMPLETE = sentence(Why(stage="copy", code="ABORTED"))


class Ledger:
    """Owned by its tenant; only the loop touches it."""

    def __init__(self) -> None:
        self.checkpoints: OrderedDict[tuple[int, int], RankCheckpoint] = OrderedDict()
        #: The one requested last with each sequence, of those that are remembered.
        self.by_sequence: dict[int, RankCheckpoint] = {}
        self.counters: Counter[str] = Counter()
        self._moving: list[RankCheckpoint] = []  # not ended when last checked, oldest first
        self._alone: list[RankCheckpoint] = []  # durable here, and not global
        self.last_sequence = 0  # that this daemon has used
        self.newest: tuple[int, int] | None = None  # (sequence, step) of the newest durable one
        self._newest_global: tuple[int, int] | None = None  # ... and of the newest on all ranks
        self.failing = 0  # checkpoints that failed in a row, since one became durable ...
        self.last_failure = ""  # ... and why the last of them failed
        self._trainer = 0  # the session of the present trainer, or of the last one ...
        self._has_saved = False  # ... a checkpoint of it became durable ...
        self._has_ended = False  # ... and it has ended
        #: CLOCK_MONOTONIC; 0 before the first. The first one is of the present session.
        self.first_request_ns = self.last_request_ns = 0
        self._requested_ns: deque[int] = deque(maxlen=REQUESTS + 1)
        self.bytes_per_s = 0.0  # from the first write to durable, at best; 0: not known
        #: Durable and not yet read from the volume: sequence and world size.
        self.appearing: dict[int, int] = {}
        self._waiters: set[asyncio.Event] = set()

    def add(self, checkpoint: RankCheckpoint) -> None:
        """The core reports each snapshot of a session once."""
        self.checkpoints[checkpoint.session, checkpoint.snapshot] = checkpoint
        self.numbered(checkpoint)
        self._moving = [*self.live(), checkpoint]
        self.last_request_ns = checkpoint.requested_ns
        self.first_request_ns = self.first_request_ns or checkpoint.requested_ns
        if not checkpoint.in_memory:
            self._requested_ns.append(checkpoint.requested_ns)
        # Between two on the disk there may be any number that were in memory only.
        ended: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        for key, one in self.checkpoints.items():
            if not one.live:
                ended[one.state in (State.DURABLE, State.GLOBAL)].append(key)
        for old in (*ended[True][:-HISTORY], *ended[False][:-HISTORY]):
            forgotten = self.checkpoints.pop(old)
            if self.by_sequence.get(forgotten.id.sequence) is forgotten:
                del self.by_sequence[forgotten.id.sequence]

    def numbered(self, checkpoint: RankCheckpoint) -> None:
        """Call it when a checkpoint has got its sequence."""
        if checkpoint.id.sequence:
            self.by_sequence[checkpoint.id.sequence] = checkpoint

    def failed(self, count: int, why: Why | None = None) -> None:
        """Counts failures. Without `why` they are those that the client reports, unchecked."""
        self.counters["failed"] = min(self.counters["failed"] + count, COUNT_MAX)
        if self._has_ended and why is not None and _is_of_trainer(why):
            return  # the trainer's own end is the cause, and no trouble
        self.failing = min(self.failing + count, COUNT_MAX)
        self.last_failure = sentence(why).reason if why is not None else self.last_failure

    def trainer_came(self, session: int) -> None:
        """Failures of an earlier trainer count until a checkpoint is durable."""
        self._trainer, self._has_saved, self._has_ended = session, False, False
        self.first_request_ns = 0

    def trainer_ended(self) -> None:
        """If the trainer has saved something, only what fails from now on counts as trouble."""
        self._has_ended = True
        if self._has_saved:
            self._succeeded()

    def _succeeded(self) -> None:
        self.failing, self.last_failure = 0, ""

    def inherit(self, checkpoint: RankCheckpoint) -> None:
        """One that the previous daemon had copied."""
        checkpoint.advance(State.COPIED, time.monotonic_ns())
        self.add(checkpoint)

    def forget(self) -> None:
        """The volumes were deleted, and nothing is on its way to them."""
        self.checkpoints.clear()
        self.by_sequence.clear()
        self._alone.clear()
        self.newest = None

    def sequences(self, session: int) -> set[int]:
        """Those of one session's checkpoints."""
        return {found.id.sequence for (one, _), found in self.checkpoints.items() if one == session}

    def interval_s(self) -> float:
        """Between the last requests for the disk, on average; 0 when there were fewer than two."""
        asked = self._requested_ns
        return (asked[-1] - asked[0]) / (len(asked) - 1) / 1e9 if len(asked) > 1 else 0.0

    def next_s(self, now_ns: int) -> float:
        """Until the next request for the disk, as far as the last ones tell; inf before the first.
        One that is late by some time is expected to stay away for as long again."""
        if not self._requested_ns:
            return math.inf
        return abs(self.interval_s() - (now_ns - self._requested_ns[-1]) / 1e9)

    def recent(self, count: int, session: int | None = None) -> list[RankCheckpoint]:
        """The last ones, of one session or of all; oldest first."""
        last = reversed(self.checkpoints.values())
        mine = (c for c in last if session is None or c.session == session)
        return list(islice(mine, count))[::-1]

    def find(self, session: int, snapshot: int) -> RankCheckpoint | None:
        return self.checkpoints.get((session, snapshot))

    def of_sequence(self, sequence: int) -> RankCheckpoint | None:
        """The one requested last with this sequence, if it is remembered."""
        return self.by_sequence.get(sequence)

    def live(self) -> list[RankCheckpoint]:
        """Checkpoints that have not ended. Called often, for many ranks, so those that have ended
        are not visited again."""
        self._moving = [checkpoint for checkpoint in self._moving if checkpoint.live]
        return list(self._moving)

    def copied(self) -> list[RankCheckpoint]:
        """Checkpoints that will become durable, whatever happens to their trainer."""
        return [one for one in self.live() if one.state in (State.COPIED, State.WRITING)]

    def moving(self) -> list[RankCheckpoint]:
        """Checkpoints that have not ended, without those of level memory that nothing writes."""
        return [one for one in self.live() if not one.parks]

    def parked(self) -> list[RankCheckpoint]:
        """Checkpoints that are in memory only, oldest first."""
        return [one for one in self.live() if one.is_parked]

    def pending(self) -> dict[int, int]:
        """Requested sequences that have not ended and that the volume does not list as durable,
        each with the world size of the start that requested it."""
        live = (found for found in self.live() if found.id.sequence)
        return {found.id.sequence: found.id.world_size for found in live} | self.appearing

    @property
    def in_flight(self) -> bool:
        """Some have a slot and have not ended."""
        return any(one.state is not State.REQUESTED for one in self.moving())

    async def settled(self, limit_s: float, up_to: int) -> bool:
        """Waits until none with a sequence up to `up_to` is live; False at the limit."""
        return await self.until(
            lambda: not any(found.id.sequence <= up_to for found in self.live()), limit_s
        )

    async def until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Waits for a condition, checked after every event; False at the limit."""
        deadline = time.monotonic() + limit_s
        moved = asyncio.Event()
        self._waiters.add(moved)
        try:
            while not condition():
                if time.monotonic() > deadline:
                    return False
                moved.clear()
                await happened(moved, _WAIT_STEP_S)
            return True
        finally:
            self._waiters.discard(moved)

    def passed(self, sequence: int) -> None:
        """A sequence is in use."""
        self.last_sequence = max(self.last_sequence, sequence)

    def refuse(self, checkpoint: RankCheckpoint, end: End) -> None:
        """The end of one that was never admitted."""
        checkpoint.end(end.to, time.monotonic_ns(), end.why)
        if end.to is State.FAILED:
            self.failed(1, end.why)
        else:
            self.counters[end.to.name.lower()] += 1
        self._notify()

    def apply(
        self, event: _core.Event, why_given_up: Callable[[int], Why]
    ) -> RankCheckpoint | None:
        """Moves the checkpoint that an event is about; None when it has ended or is not known."""
        checkpoint = self.find(event.session, event.id)
        if checkpoint is None or not checkpoint.live:
            return None
        now_ns = time.monotonic_ns()
        checkpoint.note(event, now_ns)
        if event.kind == "writing":
            if checkpoint.state is State.COPIED:
                checkpoint.advance(State.WRITING, now_ns)
        elif event.kind == "copied":
            to = State.WRITING if checkpoint.first_write_ns else State.COPIED
            checkpoint.advance(to, now_ns)
        elif event.kind == "durable":
            checkpoint.advance(State.DURABLE, now_ns)
            self.counters["durable"] += 1
            self._note_speed(checkpoint)
            self._succeeded()
            self._has_saved = self._has_saved or checkpoint.session == self._trainer
            if checkpoint.id.world_size > 1:
                self._alone = [*self._alone[-HISTORY:], checkpoint]
            self.newest = max(self.newest or (0, 0), (checkpoint.id.sequence, checkpoint.id.step))
        elif event.kind == "superseded":
            checkpoint.advance(State.COPYING, now_ns)
            checkpoint.end(State.SUPERSEDED, now_ns, Why(Cause.REPLACED))
            self.counters["superseded"] += 1
        elif event.kind == "given_up":
            self.refuse(checkpoint, End(State.SKIPPED, why_given_up(checkpoint.id.sequence)))
        elif event.kind == "failed":
            why = Why(Cause.CODE, os.geteuid(), event.stage, event.error_name, event.error)
            self.refuse(checkpoint, End(State.FAILED, why))
        self._notify()
        return checkpoint

    def _note_speed(self, durable: RankCheckpoint) -> None:
        begun_ns, ended_ns = (durable.times_ns.get(name, 0) for name in ("first_write", "durable"))
        if begun_ns and ended_ns > begun_ns:
            speed = durable.written_bytes / ((ended_ns - begun_ns) / 1e9)
            self.bytes_per_s = max(self.bytes_per_s, speed)

    def became_global(self, newest: int, common: Collection[int]) -> list[RankCheckpoint]:
        """All ranks have the sequences in `common`, up to `newest`; the checkpoints that moved. One
        that this rank alone has durable is superseded."""
        now_ns = time.monotonic_ns()
        if (newer := self.of_sequence(newest)) is not None:
            self._newest_global = newest, newer.id.step
        moved = [found for found in self._alone if found.id.sequence <= newest]
        self._alone = [found for found in self._alone if found.id.sequence > newest]
        for found in moved:
            if found.id.sequence in common:
                found.move(State.GLOBAL, now_ns)
                found.why = None  # of one whose damage flag was removed
            else:
                found.end(State.SUPERSEDED, now_ns, Why(Cause.REPLACED_ON_ALL))
        return moved

    def newer_than(self, found: RankCheckpoint) -> tuple[int, int] | None:
        """Sequence and step of what superseded a checkpoint, on all ranks if there are several.
        None until the event of that one, which may come later, has arrived."""
        if found.newer is not None:
            return found.newer
        newest = self._newest_global if found.id.world_size > 1 else self.newest
        return newest if newest is not None and newest[0] > found.id.sequence else None

    def knows_newer(self, found: RankCheckpoint) -> bool:
        """False while the event of what superseded it has not come."""
        return found.state is not State.SUPERSEDED or self.newer_than(found) is not None

    def undecided(self) -> list[int]:
        """Sequences of checkpoints that are durable here, and may still become global."""
        return [found.id.sequence for found in self._alone if found.why is None]

    def gave_up(self, why_never: Callable[[int], Why | None]) -> list[RankCheckpoint]:
        """Notes why checkpoints that are durable here will never be global, where `why_never` has
        a reason. Returns those that were not noted before."""
        open_ones = [found for found in self._alone if found.why is None]
        for found in open_ones:
            found.why = why_never(found.id.sequence)
        return [found for found in open_ones if found.why is not None]

    def is_late(self, newest: int) -> bool:
        """Whether a checkpoint became durable after all ranks had a newer one, `newest`."""
        return any(found.id.sequence <= newest for found in self._alone)

    def _notify(self) -> None:
        for waiter in self._waiters:
            waiter.set()


def _is_of_trainer(why: Why) -> bool:
    """Whether the trainer's end is enough to explain it."""
    return why.cause == Cause.ENDED_BEFORE or sentence(why) == _NOT_COMPLETE
