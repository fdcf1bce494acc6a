"""What only a daemon knows about one save, and how it is asked for: the words of a reason, which
checkpoint replaced it, and, of another daemon, whether it is durable."""

from __future__ import annotations

import time

from pccheck.daemon.connection import Connection
from pccheck.warn import LOG
from pccheck_wire.ends import Cause, Sentence, Why, in_words, sentence
from pccheck_wire.errors import NoCheckpointError, PccheckError
from pccheck_wire.messages import CheckpointState, Describe, Described, Failure

from .phases import SHOWN, Course, Durable, Phase

_LIMIT_S = 2.0
_ASK_AGAIN_S = 5.0  # an answer is lost when the process that forwards it ends
_UNKNOWN = sentence(Why(Cause.UNKNOWN)).reason


class Inquiry:
    """Any thread; answers come in `Connection.pump`."""

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
        """Asks a daemon that came later what became of a save that is UNKNOWN. Call it until that
        is known."""
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
