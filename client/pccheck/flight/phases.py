"""The phases of a save on the client's side, and the moves between them: one table. The daemon's
table is MOVES in pccheckd/tenancy/checkpoint.py."""

from __future__ import annotations

import enum
from typing import NamedTuple

from pccheck_native import (
    OUTCOME_GIVEN_UP,
    WORD_ABANDONED,
    WORD_COPIED,
    WORD_COPYING,
    WORD_REFUSED,
    ClientState,
)
from pccheck_wire.ends import Cause, Why
from pccheck_wire.messages import CheckpointState


class Phase(enum.IntEnum):
    """Finer than `CheckpointState`: who ended a save, and whether that is the last word."""

    REQUESTED = enum.auto()
    COPYING = enum.auto()
    COPIED = enum.auto()
    WRITING = enum.auto()
    DURABLE = enum.auto()  # on this rank; of several ranks another one may still lack it
    GIVEN_UP = enum.auto()  # durable on this rank, and never on all
    GLOBAL = enum.auto()
    SUPERSEDED = enum.auto()
    SKIPPED = enum.auto()
    REFUSED = enum.auto()  # the daemon failed it before it was copied
    FAILED = enum.auto()  # the daemon failed it later, or the client did; not reported yet
    LET_GO = enum.auto()  # the core gave up the copy; the gate or the verdict says more
    ABANDONED = enum.auto()  # the client gave it up, or its daemon ended, and that was reported
    UNKNOWN = enum.auto()  # as ABANDONED, but it may be durable: another daemon knows
    FOUND = enum.auto()  # another daemon has it
    MISSING = enum.auto()  # no daemon has it


_GIVEN = frozenset({Phase.FAILED, Phase.ABANDONED})  # how the client ends it
_KEPT = frozenset({Phase.GLOBAL, Phase.GIVEN_UP, Phase.SUPERSEDED})
_WRITTEN = _KEPT | {Phase.DURABLE, Phase.SKIPPED, Phase.FAILED, Phase.UNKNOWN}
_COPIED = _WRITTEN | {Phase.WRITING}
_BEGUN = _COPIED | {Phase.COPIED, Phase.REFUSED, Phase.LET_GO, Phase.ABANDONED}

#: From each phase to those that may follow. Two threads, or a signal handler, may look at the page
#: at once: what one saw earlier is not listed after what the other has noted, and is dropped.
MOVES: dict[Phase, frozenset[Phase]] = {
    Phase.REQUESTED: _BEGUN | {Phase.COPYING},
    Phase.COPYING: _BEGUN,
    Phase.COPIED: _COPIED,
    Phase.WRITING: _WRITTEN,
    Phase.DURABLE: _KEPT,
    Phase.GIVEN_UP: _KEPT - {Phase.GIVEN_UP},
    Phase.LET_GO: _GIVEN,
    Phase.UNKNOWN: frozenset({Phase.FOUND, Phase.MISSING}),
    **dict.fromkeys(
        (
            Phase.GLOBAL, Phase.SUPERSEDED, Phase.SKIPPED, Phase.REFUSED, Phase.FAILED,
            Phase.ABANDONED, Phase.FOUND, Phase.MISSING,
        ),
        frozenset(),
    ),
}  # fmt: skip

#: What users see.
SHOWN = dict.fromkeys(Phase, CheckpointState.FAILED)
SHOWN |= {Phase[state.name]: state for state in CheckpointState}
SHOWN[Phase.GIVEN_UP] = CheckpointState.DURABLE

#: It has not ended: the daemon that has it can still become lost.
GOING = frozenset({Phase.REQUESTED, Phase.COPYING, Phase.COPIED, Phase.WRITING})
#: The page may show more.
OPEN = GOING | {Phase.DURABLE, Phase.GIVEN_UP}
SAFE = frozenset({Phase.DURABLE, Phase.GIVEN_UP, Phase.GLOBAL})
#: It has a reason.
EXPLAINED = frozenset(Phase) - GOING - {Phase.DURABLE, Phase.GLOBAL}
#: The user has read why.
REPORTED = frozenset({Phase.ABANDONED, Phase.UNKNOWN, Phase.FOUND, Phase.MISSING})

#: Why the core gave up a copy by itself, by its error.
TIMED_OUT, UNREADABLE, OTHER_BYTES = "ETIMEDOUT", "EFAULT", "OTHER_BYTES"
_LET_GO = {
    "": Why(Cause.STREAM_OVERDUE),
    TIMED_OUT: Why(Cause.STREAM_OVERDUE),
    UNREADABLE: Why(Cause.SOURCE_GONE),
    OTHER_BYTES: Why(Cause.CODE, stage="copy", code=OTHER_BYTES),
}


class Durable(NamedTuple):
    """What is durable: the checkpoint itself, or the newer one that superseded it."""

    sequence: int
    step: int


class Now(NamedTuple):
    phase: Phase
    why: Why


_BEGIN = Now(Phase.REQUESTED, Why())


class Course:
    """The moves that one save has made. A move is atomic without a lock: of all that would leave a
    phase the first one counts, also where a signal handler comes between."""

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: dict[Phase, Now] = {}  # by the phase that was left

    def now(self) -> Now:
        at = _BEGIN
        while (later := self._made.get(at.phase)) is not None:
            at = later
        return at

    def move(self, to: Phase, why: Why) -> bool:
        """One listed move, which this call made; False where the save has come further."""
        made = Now(to, why)
        while to in MOVES[(at := self.now()).phase]:
            if self._made.setdefault(at.phase, made) is made:
                return True
        return False


def in_page(entry: ClientState, *, lives: bool) -> Now:
    """What an entry shows. A daemon that ended made the core give up what was not copied."""
    why = Why(entry.cause, entry.argument, entry.stage, entry.code)
    if entry.word == WORD_COPIED:
        if entry.outcome == OUTCOME_GIVEN_UP:
            return Now(Phase.GIVEN_UP, why)
        shown = CheckpointState(max(entry.outcome, CheckpointState.COPIED))
        if shown is CheckpointState.SUPERSEDED and why.cause == Cause.CODE:
            why = Why(Cause.REPLACED)
        return Now(Phase[shown.name], why)
    if entry.word == WORD_REFUSED:
        skipped = entry.outcome == CheckpointState.SKIPPED
        return Now(Phase.SKIPPED if skipped else Phase.REFUSED, why)
    if entry.word == WORD_ABANDONED and lives:
        name = entry.error_name
        return Now(Phase.LET_GO, _LET_GO.get(name, Why(Cause.NOT_READ, code=name)))
    if entry.word == WORD_ABANDONED:
        return Now(Phase.ABANDONED, Why(Cause.DAEMON_ENDED))
    return Now(Phase.COPYING if entry.word == WORD_COPYING else Phase.REQUESTED, why)
