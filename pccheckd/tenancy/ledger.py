"""A tenant's recent checkpoints and their states; counters; the newest durable one."""

from __future__ import annotations

import asyncio
import errno
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection
from itertools import islice

from pccheck_native import _core
from pccheck_wire.messages import CheckpointState as State
from pccheckd.base.background import happened
from pccheckd.base.errors import CHECK_DISK, fix_of

from .checkpoint import GIVEN_UP, Checkpoint, End

HISTORY = 256
COUNT_MAX = 1 << 53  # what JSON keeps exactly
REQUESTS = 16  # that the interval is averaged over
ENDED_BEFORE = "the trainer ended, or pccheckd stopped, before the checkpoint began"
_NOT_COMPLETE = (
    "the trainer ended or abandoned it, or pccheckd stopped, before its copy was complete", ""
)  # fmt: skip
DEVICE_LOST = "the daemon has lost the GPU", "GPU tensors are pushed until pccheckd is restarted"
BAD_HANDLE = (
    "the trainer no longer shares the GPU memory of this checkpoint",
    "the next checkpoint shares the memory again, or is pushed",
)
#: Reason and hint, by the error, of copies that did not fail by the trainer's end.
_COPY_FAILED = {
    "DEVICE": ("the GPU driver failed to copy it", "the kernel's log may say more: dmesg"),
    "DEVICE_LOST": DEVICE_LOST,
    "DAMAGED": (
        "its copy in memory changed before a new pccheckd had written it",
        "look for a process that writes into pccheckd's memory",
    ),
    "BAD_HANDLE": BAD_HANDLE,
}  # fmt: skip
_BASE_LOST = (
    "the earlier checkpoint that holds its unchanged tensors is damaged or cannot be read",
    "the next checkpoint is written whole; run pccheckctl verify, and look at the kernel's log",
)
_RESET_HINT = (
    "nothing to do: a later checkpoint goes into a new volume. Only if the storage directory "
    "itself was removed, create it again. To remove a job's checkpoints use: pccheckctl drop"
)
#: By the error: the volume was not in its place when the record was to be written.
_FILE_GONE = {
    "REMOVED": "the volume's file was removed or moved away, so what is saved there would be lost",
    "REPLACED": "the volume's file was replaced by another one, so what is saved would be lost",
    "TRUNCATED": "the volume's file was truncated, so what was saved there is lost",
}
_WAIT_STEP_S = 0.25


class Ledger:
    """Owned by its tenant; only the loop touches it."""

    def __init__(self) -> None:
        self.checkpoints: OrderedDict[tuple[int, int], Checkpoint] = OrderedDict()
        #: The one requested last with each sequence, of those that are remembered.
        self.by_sequence: dict[int, Checkpoint] = {}
        self.counters: Counter[str] = Counter()
        self._moving: list[Checkpoint] = []  # not ended when last checked, oldest first
        self._alone: list[Checkpoint] = []  # durable here, and not global
        self.last_sequence = 0  # that this daemon has used
        self.newest: tuple[int, int] | None = None  # (sequence, step) of the newest durable one
        self._newest_global: tuple[int, int] | None = None  # ... and of the newest on all ranks
        self.failing = 0  # checkpoints that failed in a row, since one became durable ...
        self.last_failure = ""  # ... and why the last of them failed
        self._trainer = 0  # the session of the present trainer, or of the last one ...
        self._has_saved = False  # ... a checkpoint of it became durable ...
        self._has_ended = False  # ... and it has ended
        self._requested_ns: deque[int] = deque(maxlen=REQUESTS + 1)
        self._waiters: set[asyncio.Event] = set()

    def add(self, checkpoint: Checkpoint) -> None:
        """The core reports each snapshot of a session once."""
        self.checkpoints[checkpoint.session, checkpoint.snapshot] = checkpoint
        self.numbered(checkpoint)
        self._moving = [*self.live(), checkpoint]
        self._requested_ns.append(checkpoint.requested_ns)
        for old in [k for k, c in self.checkpoints.items() if not c.live][: -HISTORY or None]:
            forgotten = self.checkpoints.pop(old)
            if self.by_sequence.get(forgotten.sequence) is forgotten:
                del self.by_sequence[forgotten.sequence]

    def numbered(self, checkpoint: Checkpoint) -> None:
        """Call it when a checkpoint has got its sequence."""
        if checkpoint.sequence:
            self.by_sequence[checkpoint.sequence] = checkpoint

    def failed(self, count: int, reason: str = "") -> None:
        """Counts failures. Without a reason they are those that the client reports, unchecked."""
        self.counters["failed"] = min(self.counters["failed"] + count, COUNT_MAX)
        if self._has_ended and reason in (ENDED_BEFORE, _NOT_COMPLETE[0]):
            return  # the trainer's own end is the cause, and no trouble
        self.failing = min(self.failing + count, COUNT_MAX)
        self.last_failure = reason or self.last_failure

    def trainer_came(self, session: int) -> None:
        """Failures of an earlier trainer count until a checkpoint is durable."""
        self._trainer, self._has_saved, self._has_ended = session, False, False

    def trainer_ended(self) -> None:
        """If the trainer has saved something, only what fails from now on counts as trouble."""
        self._has_ended = True
        if self._has_saved:
            self._succeeded()

    def _succeeded(self) -> None:
        self.failing, self.last_failure = 0, ""

    def inherit(self, checkpoint: Checkpoint) -> None:
        """One that the previous daemon had copied."""
        checkpoint.advance(State.COPIED, time.monotonic_ns())
        self.add(checkpoint)

    def sequences(self, session: int) -> set[int]:
        """Those of one session's checkpoints."""
        return {found.sequence for (one, _), found in self.checkpoints.items() if one == session}

    @property
    def last_request_ns(self) -> int:
        """CLOCK_MONOTONIC; 0 before the first."""
        return self._requested_ns[-1] if self._requested_ns else 0

    def interval_s(self) -> float:
        """Between the last requests, on average; 0 when there were fewer than two."""
        asked = self._requested_ns
        return (asked[-1] - asked[0]) / (len(asked) - 1) / 1e9 if len(asked) > 1 else 0.0

    def recent(self, count: int, session: int | None = None) -> list[Checkpoint]:
        """The last ones, of one session or of all; oldest first."""
        last = reversed(self.checkpoints.values())
        mine = (c for c in last if session is None or c.session == session)
        return list(islice(mine, count))[::-1]

    def find(self, session: int, snapshot: int) -> Checkpoint | None:
        return self.checkpoints.get((session, snapshot))

    def of_sequence(self, sequence: int) -> Checkpoint | None:
        """The one requested last with this sequence, if it is remembered."""
        return self.by_sequence.get(sequence)

    def live(self) -> list[Checkpoint]:
        """Checkpoints that have not ended. Called often, for many ranks, so those that have ended
        are not visited again."""
        self._moving = [checkpoint for checkpoint in self._moving if checkpoint.live]
        return list(self._moving)

    def copied(self) -> list[Checkpoint]:
        """Checkpoints that will become durable, whatever happens to their trainer."""
        return [one for one in self.live() if one.state in (State.COPIED, State.WRITING)]

    @property
    def in_flight(self) -> bool:
        """Some have a slot and have not ended."""
        return any(checkpoint.state is not State.REQUESTED for checkpoint in self.live())

    async def settled(self, limit_s: float, up_to: int) -> bool:
        """Waits until none with a sequence up to `up_to` is live; False at the limit."""
        return await self.until(
            lambda: not any(found.sequence <= up_to for found in self.live()), limit_s
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

    def refuse(self, checkpoint: Checkpoint, end: End) -> None:
        """The end of one that was never admitted."""
        checkpoint.end(end.to, time.monotonic_ns(), end.reason, end.hint)
        checkpoint.error = end.error or checkpoint.error
        if end.to is State.FAILED:
            self.failed(1, end.reason)
        else:
            self.counters[end.to.name.lower()] += 1
        self._notify()

    def apply(self, event: _core.Event, why_given_up: Callable[[int], str]) -> Checkpoint | None:
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
            self._succeeded()
            self._has_saved = self._has_saved or checkpoint.session == self._trainer
            if checkpoint.world_size > 1:
                self._alone = [*self._alone[-HISTORY:], checkpoint]
            self.newest = max(self.newest or (0, 0), (checkpoint.sequence, checkpoint.step))
        elif event.kind == "superseded":
            checkpoint.advance(State.COPYING, now_ns)
            checkpoint.replaced(now_ns, "durable")
            self.counters["superseded"] += 1
        elif event.kind == "given_up":
            why = why_given_up(checkpoint.sequence)
            self.refuse(checkpoint, End(State.SKIPPED, why, error=GIVEN_UP))
        elif event.kind == "failed":
            checkpoint.end(State.FAILED, now_ns, *failure_text(event))
            self.failed(1, checkpoint.reason)
        self._notify()
        return checkpoint

    def became_global(self, newest: int, common: Collection[int]) -> list[Checkpoint]:
        """All ranks have the sequences in `common`, up to `newest`; the checkpoints that moved. One
        that this rank alone has durable is superseded."""
        now_ns = time.monotonic_ns()
        if (newer := self.of_sequence(newest)) is not None:
            self._newest_global = newest, newer.step
        moved = [found for found in self._alone if found.sequence <= newest]
        self._alone = [found for found in self._alone if found.sequence > newest]
        for found in moved:
            if found.sequence in common:
                found.move(State.GLOBAL, now_ns)
                found.reason = ""  # of one whose damage flag was removed
            else:
                found.replaced(now_ns, "global")
        return moved

    def newer_than(self, found: Checkpoint) -> tuple[int, int] | None:
        """Sequence and step of what superseded a checkpoint, on all ranks if there are several.
        None until the event of that one, which may come later, has arrived."""
        newest = self._newest_global if found.world_size > 1 else self.newest
        return newest if newest is not None and newest[0] > found.sequence else None

    def undecided(self) -> list[int]:
        """Sequences of checkpoints that are durable here, and may still become global."""
        return [found.sequence for found in self._alone if not found.reason]

    def gave_up(self, why_never: Callable[[int], str]) -> list[Checkpoint]:
        """Notes why checkpoints that are durable here will never be global, where `why_never` has
        a reason. Returns those that were not noted before."""
        open_ones = [found for found in self._alone if not found.reason]
        for found in open_ones:
            found.reason = why_never(found.sequence)
        return [found for found in open_ones if found.reason]

    def is_late(self, newest: int) -> bool:
        """Whether a checkpoint became durable after all ranks had a newer one, `newest`."""
        return any(found.sequence <= newest for found in self._alone)

    def _notify(self) -> None:
        for waiter in self._waiters:
            waiter.set()


def failure_text(event: _core.Event) -> tuple[str, str]:
    """Reason and hint of a failed checkpoint."""
    if event.stage == "copy":
        return _COPY_FAILED.get(event.error_name, _NOT_COMPLETE)
    if event.stage == "base":
        return _BASE_LOST
    if event.error_name in _FILE_GONE:
        return _FILE_GONE[event.error_name], _RESET_HINT
    if event.error_name == "ENOSPC":
        return f"{event.stage}: the disk is full", "free space on the disk"
    fix = fix_of(getattr(errno, event.error_name, 0)) or CHECK_DISK
    return f"{event.stage}: {event.error_name}", fix
