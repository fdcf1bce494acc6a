"""Which checkpoints failed since the newest durable one, and what the user reads of them."""

from __future__ import annotations

import re

from pccheck.flight.in_flight import InFlight
from pccheck.state.changes import LOST, Moved
from pccheck.warn import LOG, Warner
from pccheck_wire.basics import plural
from pccheck_wire.ends import Cause
from pccheck_wire.errors import CheckpointFailedError
from pccheck_wire.messages import CheckpointState

#: What is reported, by the state of the checkpoint; a durable one is given up on another rank.
REPORTED = {
    CheckpointState.FAILED: "failed",
    CheckpointState.SKIPPED: "was skipped",
    CheckpointState.DURABLE: "will not be durable on all ranks",
}
#: Different reasons that are reported until a checkpoint is durable. More would say no more.
REASONS_MAX = 3


class Failures:
    """Training thread only. Checkpoints count in the order in which they were asked for."""

    def __init__(self, warner: Warner, *, raises: bool = False) -> None:
        """`raises`: what failed after `checkpoint()` had returned is raised by the next call."""
        self.count = 0  #: since the newest durable one
        self._warner = warner
        self._raises = raises
        self._ends = False  # close() was called
        self._to_raise: list[CheckpointFailedError] = []
        self._moved: list[tuple[int, Moved]] = []  # not reported yet
        self._durable_step: int | None = None
        self._durable_ns = 0  # when the newest durable one, ...
        self._failed_ns = 0  # ... and the newest failed one were asked for
        self._last: InFlight | None = None
        self._reported: list[str] = []  # kinds for the warner: reasons without their numbers

    def durable(self, step: int, requested_ns: int) -> None:
        """That checkpoint is durable."""
        if requested_ns > self._durable_ns:
            self._durable_ns, self._durable_step = requested_ns, step
        if self._failed_ns < self._durable_ns:
            self.count = 0
            self._warner.over(*self._reported)
            self._reported.clear()

    def failed(self, checkpoint: InFlight) -> None:
        """Counts it; `report` is for the user."""
        if checkpoint.requested_ns > self._durable_ns:
            self.count += 1
        if checkpoint.requested_ns > self._failed_ns:
            self._failed_ns, self._last = checkpoint.requested_ns, checkpoint

    def end(self) -> None:
        """There is no next call to raise in."""
        self._raises, self._ends = False, True

    def raise_next(self) -> None:
        """In a call of the training thread."""
        if self._to_raise:
            raise self._to_raise.pop(0)

    def failed_later(self, step: int, reason: str, state: CheckpointState) -> None:
        """One failed or was skipped after `checkpoint()` had returned: the next call raises or
        warns. It only warns of what is durable on this rank alone."""
        if self._ends and self.count:
            return  # close() warns of all of them
        if self._raises and state is not CheckpointState.DURABLE:
            self._to_raise.append(
                CheckpointFailedError(f"checkpoint of step {step} {REPORTED[state]}: {reason}")
            )
        else:
            self.report(step, reason, state)

    def moved(self, step: int, moved: Moved) -> None:
        """A tensor was changed while it was read. Any thread."""
        self._moved.append((step, moved))

    def report_moved(self) -> None:
        """Reports what has `moved`."""
        while self._moved:
            step, moved = self._moved.pop(0)
            text = f"checkpoint of step {step} failed: {why_moved(moved)}"
            if self._raises:
                self._to_raise.append(CheckpointFailedError(text))
            else:
                self._warner.once("lost" if moved.what == LOST else "moved", text)

    def report(
        self, step: int, reason: str, state: CheckpointState = CheckpointState.FAILED
    ) -> None:
        """Warns of the first failure, and of the first ones with other reasons; of another state
        once for each reason, because others may be durable on this rank in between."""
        how = REPORTED[state]
        kind = f"{how}: " + re.sub(r"\d+", "", reason)
        text = f"checkpoint of step {step} {how}: {reason}. Training continues; a restart resumes "
        if state is not CheckpointState.FAILED:
            self._warner.once(
                kind,
                f"{text}from the newest checkpoint that all ranks have, if there is one. Further "
                "ones with this reason are not reported (see: pccheckctl status)",
            )
            return
        if kind not in self._reported and len(self._reported) >= REASONS_MAX:
            LOG.debug("checkpoint of step %d failed: %s", step, reason)
            return
        self._reported.append(kind)
        self._warner.once(
            kind,
            f"{text}from the newest durable checkpoint, if there is one. Until a later checkpoint "
            "is durable, further failures with this reason are only counted (see: pccheckctl "
            "status)",
        )

    def report_last(self, saved_step: int | None, *, known: bool) -> None:
        """Warns at the end of a run whose last checkpoints failed. `saved_step` is the newest
        durable one, or None, if that is `known`; otherwise what this process knows counts, which
        says nothing about the runs before it."""
        if not self.count or self._last is None:
            return
        step = saved_step if known else self._durable_step
        since = "" if self._durable_step is None else f" since step {self._durable_step}"
        if step is not None:
            which, there = "durable checkpoint", "there"
            if not known:  # what the daemon had copied when it ended may be durable since
                which = "checkpoint that is known to be durable"
            if not known or self._last.is_broken:
                there = "there, or at a later one"
            then = (
                f"The newest {which} is step {step}: a restart resumes {there}, and repeats the "
                "steps after it"
            )
        elif known:
            then = "There is no durable checkpoint, so a restart begins at the start of training"
        else:
            then = (
                "No checkpoint of this run is known to be durable: a restart resumes from the "
                "newest one of an earlier run, or begins at the start of training"
            )
        reason = self._last.known_reason or "the reason is not known"
        if self._last.why.cause != Cause.INTERRUPTED:  # there a user ended it
            then += ". Remove the cause before the restart (see: pccheckctl status)"
        self._warner.once(
            "last",
            f"{plural(self.count, 'checkpoint')} failed{since}, up to step {self._last.step}: "
            f"{reason}. {then}",
        )


def why_moved(moved: Moved) -> str:
    """Which tensor was changed or lost while it was read, and what to do."""
    if moved.what == LOST:
        return (
            f"{moved.path} {moved.what}. Copy it into memory of its own (tensor.clone()), or write "
            "a new file instead of into the one that is mapped"
        )
    what = f"the frozen parameters of {moved.loose}" if moved.loose else "the whole state"
    return (
        f"{moved.path} {moved.what} while it was read, outside of an attached optimizer's step. "
        f"From now on checkpoint() returns only after reading {what}. To keep training meanwhile, "
        "call gate() before such a change, or attach the optimizer that makes it"
    )
