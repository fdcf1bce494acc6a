"""A checkpoint after `checkpoint()`, as the client keeps it: its phase, which follows its entry in
the session page, and why it ended. Users get a `Checkpoint` (`handle.py`)."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from pccheck.daemon.connection import Connection
from pccheck.warn import LOG
from pccheck_native import WORD_ABANDONED, Client, ClientState
from pccheck_wire.ends import Cause, Sentence, Why, in_words, sentence
from pccheck_wire.errors import NoCheckpointError, PccheckError
from pccheck_wire.messages import CheckpointState, Describe, Described, Failure

from .phases import EXPLAINED, GOING, OPEN, SAFE, SHOWN, Course, Durable, Now, Phase, in_page

if TYPE_CHECKING:
    from .verdict import Verdict

NOT_SAVED = frozenset((CheckpointState.SKIPPED, CheckpointState.FAILED))
FINAL = NOT_SAVED | {CheckpointState.DURABLE, CheckpointState.GLOBAL, CheckpointState.SUPERSEDED}
_LIMIT_S = 2.0
_ASK_AGAIN_S = 5.0  # an answer is lost when the process that forwards it ends
_UNKNOWN = sentence(Why(Cause.UNKNOWN)).reason
_UNTOLD = "the daemon ended before it gave the reason"
_BROKEN = (
    "CUDA has reported an error. If another rank has this step on its GPU when this process ends, "
    "pccheckd reads it there"
)


def entry_of(connection: Connection, snapshot: int) -> ClientState | None:
    """The snapshot's entry in the page; None of a closed core, and when a younger one has it."""
    try:
        return connection.native.state(snapshot)
    except (ValueError, OSError):
        return None


def _with_sequence(connection: Connection, sequence: int) -> Durable | None:
    """The snapshot of this session with the sequence, while both have their entries."""
    for snapshot, step in connection.steps.copy().items():
        entry = entry_of(connection, snapshot)
        if entry is not None and entry.sequence == sequence:
            return Durable(sequence, step)
    return None


class Inquiry:
    """What only a daemon knows about one save: the words of a reason, which checkpoint replaced it,
    and, of another daemon, whether it is durable. Any thread; answers come in `Connection.pump`."""

    def __init__(self, step: int, snapshot: int, course: Course) -> None:
        self.told: dict[Phase, str] = {}  #: the daemon's words, by the phase that they explain
        self.newer: Durable | None = None  #: what replaced it
        self._step, self._snapshot = step, snapshot
        self._course = course
        self._asked_s: float | None = None  # until the answer arrives

    def ask(self, connection: Connection) -> None:
        """The answer comes later."""
        if self._is_due():
            try:
                connection.ask(Describe(self._snapshot), self._take)
            except PccheckError:  # the daemon ended, or this client was closed
                self._asked_s = None

    def ask_now(self, connection: Connection) -> str:
        """Waits for the answer. Why there is none; "" otherwise."""
        if not connection.alive():
            return ""
        try:
            self._take(connection.request(Describe(self._snapshot), timeout_s=_LIMIT_S))
        except PccheckError as error:
            return f"unknown: {error.message}"
        return ""

    def find_out(self, connection: Connection, sequence: int) -> None:
        """Asks a later daemon what became of an UNKNOWN save. Call it until that is known."""
        if self._is_due():
            connection.ask(
                Describe(self._snapshot, sequence), lambda answer: self._take_fate(answer, sequence)
            )

    def found(self, sequence: int) -> None:
        """It is durable, and is named, since it was reported as failed."""
        if self._course.move(Phase.FOUND, Why(Cause.SAVED, sequence)):
            LOG.warning(
                "PCcheck: the checkpoint of step %d is durable (sequence %d). It was reported as "
                "failed: %s", self._step, sequence, _UNKNOWN,
            )  # fmt: skip

    def _is_due(self) -> bool:
        now_s = time.monotonic()
        due = self._asked_s is None or now_s >= self._asked_s + _ASK_AGAIN_S
        if due:
            self._asked_s = now_s
        return due

    def _take(self, answer: object) -> None:
        self._asked_s = None
        if isinstance(answer, Failure):
            self._hear(answer.message, answer.hint)
        if not isinstance(answer, Described):
            return
        if answer.newer_step is not None:
            self.newer = Durable(answer.newer_sequence, answer.newer_step)
        given_up = answer.state is CheckpointState.DURABLE and bool(answer.reason)
        phase = Phase.GIVEN_UP if given_up else Phase[answer.state.name]
        self._course.move(phase, in_words(answer.reason, answer.hint))
        if SHOWN[self._course.now().phase] is answer.state and answer.reason:
            self._hear(answer.reason, answer.hint)

    def _hear(self, reason: str, hint: str) -> None:
        self.told[self._course.now().phase] = str(Sentence(reason, hint, asks=False))

    def _take_fate(self, answer: object, sequence: int) -> None:
        if isinstance(answer, Failure) and answer.code != NoCheckpointError.code:
            return  # asked again later
        state = CheckpointState.FAILED
        if isinstance(answer, Described) and answer.step == self._step:
            state = answer.state
        if state in (CheckpointState.DURABLE, CheckpointState.GLOBAL):
            self.found(sequence)
        elif state < CheckpointState.DURABLE:
            self._asked_s = None  # that daemon is still writing it
        else:
            self._course.move(Phase.MISSING, Why(Cause.LOST))


class InFlight:
    """Any thread may ask and wait; nothing here stops training."""

    def __init__(self, step: int, connection: Connection | None = None, snapshot: int = 0) -> None:
        self.step = step  #: as it was when `checkpoint()` was called
        self.snapshot = snapshot  #: its number in the session
        self.requested_ns = time.monotonic_ns()
        self.verdict: Verdict | None = None  #: whether its tensors were left alone
        self.pulled = False  #: its device part is the daemon's to read
        self.on_device = False  #: its device part stays there until it is wanted or withdrawn
        self.in_memory = False  #: it is written only when it is wanted on the disk ...
        self.is_wanted = False  #: ... which somebody has said
        self.is_broken = False  #: its GPU has failed: the daemon looks for it with other ranks
        self.noted = Phase.REQUESTED  #: what the training thread has taken note of
        #: None: it never reached a daemon, or the client has closed.
        self.connection = connection
        self._course = Course()
        self._sequence = 0
        self._in_its_place = 0  # in memory: the sequence of a newer one
        self.inquiry = Inquiry(step, snapshot, self._course)  #: what only a daemon knows of it

    @classmethod
    def ended(cls, step: int, state: CheckpointState, reason: str) -> InFlight:
        """One that never reached the daemon."""
        made = cls(step)
        made._course.move(Phase[state.name], in_words(reason))
        return made

    def fail(self, why: Why, *, reported: bool = True) -> bool:
        """The client ends it; False when it has ended before. `reported`: the user knows why."""
        return self._course.move(Phase.ABANDONED if reported else Phase.FAILED, why)

    def hand_over(self) -> None:
        """The client closes, and its daemon has all of it: it stays as far as it has come."""
        if self.phase in GOING:
            self.connection = None

    @property
    def phase(self) -> Phase:
        return self._look().phase

    @property
    def state(self) -> CheckpointState:
        return SHOWN[self._look().phase]

    @property
    def sequence(self) -> int:
        self._look()
        return self._sequence

    @property
    def why(self) -> Why:
        """The cause of its end; words that only the daemon has are missing."""
        return self._look().why

    @property
    def reason(self) -> str:
        """Why it ended so; waits for the daemon where the page has no room for the words."""
        now = self._look()
        if now.phase not in EXPLAINED:
            return ""
        known = self.known_reason
        if known is None:
            failed = self.ask_now()
            known = self.known_reason or str(sentence(now.why)) or failed
        return known

    @property
    def known_reason(self) -> str | None:
        """The reason if it is known without asking."""
        now = self._course.now()
        told = self.inquiry.told.get(now.phase)
        made = sentence(now.why)
        if told is not None or not made.asks:
            return told or str(made)
        lives = self.connection is not None and self.connection.alive()
        return None if lives else str(made) or _UNTOLD

    def want(self) -> None:
        """A memory-only one is to be written. Any thread, any number of times."""
        self.is_wanted = True
        if self.in_memory and self.phase in GOING:
            with contextlib.suppress(ValueError, OSError):  # closed
                self.is_broken = not self.native.write(self.snapshot)
                if self.is_broken:
                    self.fail(in_words(_BROKEN), reported=False)

    def standing(self) -> InFlight:
        """What took its place in memory, and may be wanted instead; otherwise itself."""
        connection, found = self.connection, []
        if connection is None or not self._in_its_place:
            return self
        for snapshot, step in connection.steps.copy().items():
            entry = entry_of(connection, snapshot)
            if entry is None or entry.cause == Cause.REPLACED_IN_MEMORY:  # which was replaced, too
                continue
            ended_well = SHOWN[in_page(entry, lives=True).phase] not in NOT_SAVED
            if entry.sequence == self._in_its_place or (
                entry.sequence > self._in_its_place and ended_well
            ):
                found.append((entry.sequence, step, snapshot))
        if not found:
            return self
        _, step, snapshot = min(found)
        made = InFlight(step, connection, snapshot)
        made.in_memory = True
        return made

    def keep_standing(self) -> None:
        """The core is about to be closed: notes which durable one stands in its place."""
        last = self.standing()
        if last is not self and last.phase in SAFE:
            self.inquiry.newer = Durable(last.sequence, last.step)

    def ask(self) -> None:
        """Asks for words that the page has no room for. Call it until they are known."""
        phase, connection = self._course.now().phase, self.connection
        newer = self.inquiry.newer or self._in_its_place
        missing = phase is Phase.SUPERSEDED and not newer
        wanted = phase in EXPLAINED and (missing or self.known_reason is None)
        if connection is not None and wanted:
            self.inquiry.ask(connection)

    def ask_now(self) -> str:
        """Waits for what the daemon has to say. Why it said nothing; "" otherwise."""
        return self.inquiry.ask_now(self.connection) if self.connection is not None else ""

    @property
    def native(self) -> Client:
        """Its core. Raises ValueError where there is none, as a closed one does."""
        if self.connection is None:
            raise ValueError("this save has no core")
        return self.connection.native

    def entry(self) -> ClientState | None:
        return None if self.connection is None else entry_of(self.connection, self.snapshot)

    def is_read(self) -> bool:
        """Whether the tensors may be changed: they were read, or never will be. Asks the core, even
        of an abandoned save: copies under way may still be at it."""
        now, connection = self.entry(), self.connection
        return now is None or now.source_read or not (connection and connection.alive())

    def settle(self) -> None:
        """Call it before the entry in the page is used again, or the core is closed."""
        connection = self.connection
        if self.phase in GOING and connection is not None:
            self._lose(connection)
        self.ask()

    def _look(self) -> Now:
        if self.verdict is not None:
            self.verdict.give_if_read()
        now, connection = self._course.now(), self.connection
        if now.phase not in OPEN or connection is None:
            return now
        if now.phase is Phase.DURABLE and connection.saves_alone:
            return now
        alive = connection.alive()  # first: what a daemon wrote before it ended still counts
        entry = entry_of(connection, self.snapshot)
        if entry is not None:
            self._note(entry, connection)
        now = self._course.now()
        if now.phase in GOING and (entry is None or not alive):
            self._lose(connection)
        elif now.phase not in GOING and entry is None and alive:  # used again
            self.inquiry.ask(connection)  # it may have become global since
        return self._course.now()

    def _note(self, entry: ClientState, connection: Connection) -> None:
        # A core that lost its daemon notes that before it gives up everything.
        lives = entry.word != WORD_ABANDONED or connection.alive()
        phase, why = in_page(entry, lives=lives)
        if entry.sequence:
            self._sequence = entry.sequence
        if why.cause == Cause.REPLACED_IN_MEMORY:
            self._in_its_place = entry.newer
        elif entry.newer and self.inquiry.newer is None:
            self.inquiry.newer = _with_sequence(connection, entry.newer)
        self._course.move(phase, why)

    def _lose(self, connection: Connection) -> None:
        """Its daemon does not report any more how it ends. The client abandons what was not copied,
        but the copy may have become complete a moment before."""
        entries = (entry_of(connection, snapshot) for snapshot in connection.steps.copy())
        replaced = (e for e in entries if e is not None and e.cause != Cause.REPLACED_IN_MEMORY)
        newer = {entry.newer for entry in replaced} - {0}
        if self._sequence in newer:  # so it is durable, on all ranks if there are several
            alone = connection.saves_alone
            self._course.move(Phase.DURABLE if alone else Phase.GLOBAL, Why())
            return
        phase, cause = Phase.ABANDONED, Cause.DAEMON_ENDED
        if self._sequence > 0:
            phase, cause = Phase.UNKNOWN, Cause.UNKNOWN
        self._course.move(phase, Why(Cause.FORKED if connection.pid != os.getpid() else cause))
