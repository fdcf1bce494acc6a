"""A checkpoint after `checkpoint()`, as the client keeps it: its entry in the session page, its
end, and waiting for it. Users get a `Checkpoint` (`handle.py`)."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from pccheck.daemon.connection import Connection
from pccheck.warn import LOG
from pccheck_native import (
    OUTCOME_GIVEN_UP,
    WORD_ABANDONED,
    WORD_COPIED,
    WORD_COPYING,
    WORD_REFUSED,
    LinkState,
)
from pccheck_wire.errors import (
    CheckpointFailedError,
    DaemonUnreachableError,
    NoCheckpointError,
    PccheckError,
    WaitTimeoutError,
)
from pccheck_wire.messages import CheckpointState, Describe, Described, Failure

if TYPE_CHECKING:
    from .verdict import Verdict

_DESCRIBE_LIMIT_S = 2.0
_DESCRIBE_PAUSE_S = 0.005
_ASK_AGAIN_S = 5.0  # an answer is lost when the process that forwards it ends
FOREVER_NS = 2**63 - 1
_LONGEST_S = 1e9  # thirty years: float("inf") is a timeout, too
_SAFE = frozenset((CheckpointState.DURABLE, CheckpointState.GLOBAL, CheckpointState.SUPERSEDED))
NOT_SAVED = frozenset((CheckpointState.SKIPPED, CheckpointState.FAILED))
FINAL = _SAFE | NOT_SAVED
TIMED_OUT = "ETIMEDOUT"
UNREADABLE = "EFAULT"
_LOST = "the daemon ended before the checkpoint was durable"
_FORKED = "only the parent of a forked process learns how the checkpoint ends"
_UNTOLD = "the daemon ended before it gave the reason"
_REPLACED = "a newer checkpoint became durable first"
_NOT_ON_ALL = "another rank did not save this checkpoint"
#: It may be durable. What was reported as failed stays so, and is named when it is durable.
_UNKNOWN = "the connection to pccheckd ended before it reported how the checkpoint ended"
_SEE = "whether it is durable: pccheckctl list"


class Durable(NamedTuple):
    """What is durable: the checkpoint itself, or the newer one that superseded it."""

    sequence: int
    step: int


def entry_of(connection: Connection, snapshot: int) -> LinkState | None:
    """The snapshot's entry in the session page; None when the link is closed."""
    try:
        return connection.link.state(snapshot)
    except (ValueError, OSError):
        return None


def _with_sequence(connection: Connection, sequence: int) -> Durable | None:
    """The snapshot of this session that has the sequence; a newer one supersedes while both have
    their entries."""
    for snapshot, step in connection.steps.copy().items():
        entry = entry_of(connection, snapshot)
        if entry is not None and entry.sequence == sequence:
            return Durable(sequence, step)
    return None


def _has_superseded(connection: Connection, sequence: int) -> bool:
    """Whether the page has it as the newer one of another snapshot: then it is durable, on all
    ranks if there are several, although its own entry does not say so yet."""
    entries = (entry_of(connection, snapshot) for snapshot in connection.steps.copy())
    return sequence > 0 and any(one is not None and one.newer == sequence for one in entries)


def is_read(connection: Connection, snapshot: int) -> bool:
    """Whether its source was read, or never will be. Asks the link, even of an abandoned one:
    copies under way may still be at it."""
    now = entry_of(connection, snapshot)
    return now is None or now.source_read or not connection.alive()


def abandoned_because(name: str) -> str:
    """The reason of a checkpoint that the link abandoned by itself."""
    if name == TIMED_OUT:
        return "abandoned: it was not copied within stall_limit_s, and a GPU stream waited for it"
    if name == UNREADABLE:  # until the verdict says which
        return "abandoned: memory of a tensor was freed or moved while it was copied"
    return f"its tensors could not be copied ({name}); for a GPU see nvidia-smi and dmesg"


class InFlight:
    """Any thread may ask and wait; nothing here stops training."""

    def __init__(self, step: int, connection: Connection | None = None, snapshot: int = 0) -> None:
        self.step = step  #: as it was when `checkpoint()` was called
        self.snapshot = snapshot  #: its number in the session
        self.requested_ns = time.monotonic_ns()
        self._connection = connection  # None when the client knows the end
        # A verdict ends it in another thread; a signal handler may ask in the middle.
        self._lock = threading.RLock()
        self._state = CheckpointState.REQUESTED
        self._sequence = 0
        self._newer: Durable | None = None  # what superseded it, once that is known
        self._reason = ""
        self._described = False  # the reason is known
        self._given_up = False  # it is durable here, and never will be on all ranks
        self._asked_s: float | None = None  # when the reason was asked for, until it arrives
        self.copy_broke = False  #: the daemon failed it before it was copied
        #: Its daemon ended before it reported how: it has failed here, and may be durable.
        self.is_unknown = False
        self.verdict: Verdict | None = None  #: whether its tensors were left alone
        self.pulled = False  #: the daemon pulls its device part, and has not yet
        self.reported = False  #: the user knows why it failed
        self._settled = False  # its entry in the page says no more about it
        self._end: tuple[CheckpointState, str] | None = None  # and why, if the client ended it
        self._looks = 0  # at the page

    @classmethod
    def ended(cls, step: int, state: CheckpointState, reason: str) -> InFlight:
        """One that never reached the daemon."""
        made = cls(step)
        made.end(state, reason)
        return made

    def end(self, state: CheckpointState, reason: str, *, reported: bool = False) -> None:
        """The client itself knows how it ended; the page is not read any more."""
        with self._lock:
            self._end = state, reason
            self._looks += 1
            self._state, self._reason, self._described = state, reason, True
            self.reported |= reported
            self._connection = None

    def hand_over(self) -> None:
        """The client closes, and its daemon has all of it: it stays as far as it has come."""
        state = self.state
        if state not in FINAL:
            self.end(state, "")

    @property
    def state(self) -> CheckpointState:
        if self.verdict is not None:
            self.verdict.give_if_read()
        connection = self._connection
        if connection is not None and not self._settled:
            self._look(connection)
        elif connection is not None and self._may_become_global(connection):
            self._described = False
            self.describe_later()
        return self._state

    def _may_become_global(self, connection: Connection) -> bool:
        return self._state is CheckpointState.DURABLE and not connection.saves_alone

    @property
    def sequence(self) -> int:
        if self.state is CheckpointState.SUPERSEDED and self._sequence == 0:
            self._describe()
        return self._sequence

    @property
    def reason(self) -> str:
        ended = self.state in NOT_SAVED or self._state is CheckpointState.SUPERSEDED
        if ended or self._given_up:
            self._describe()
        return self._reason

    @property
    def may_become_global(self) -> bool:
        """Whether it is durable here, and may yet be on all ranks or be given up."""
        connection = self._connection
        durable = self.state is CheckpointState.DURABLE
        return connection is not None and durable and not (connection.saves_alone or self._settled)

    @property
    def given_up(self) -> bool:
        """Whether it is durable here, and never will be on all ranks."""
        return self.state is CheckpointState.DURABLE and self._given_up

    @property
    def known_reason(self) -> str | None:
        """The reason if it is known without asking."""
        return self._reason if self._described else None

    @property
    def link_error(self) -> str:
        """What made the link abandon it by itself, as long as the client has not noted that: the
        deadline of a stream (ETIMEDOUT), or a failed copy; "" otherwise."""
        connection = self._connection
        if connection is None or self._settled:
            return ""
        now = entry_of(connection, self.snapshot)
        # `alive` comes last: a link that lost its daemon notes that before it abandons everything.
        if now is None or now.word != WORD_ABANDONED or not connection.alive():
            return ""
        if self.verdict is not None:
            self.verdict.give_if_read()  # another thread may be giving it
        return "" if self._connection is None else now.error_name or TIMED_OUT

    @property
    def source_read(self) -> bool:
        """Whether the tensors may be changed: they were read, or never will be."""
        if self.verdict is not None:
            self.verdict.give_if_read()
        connection = self._connection
        return connection is None or is_read(connection, self.snapshot)

    def wait_read(self, timeout: float | None = None) -> None:
        """Returns once the tensors may be changed, whatever became of it. Raises WaitTimeoutError
        after `timeout` seconds."""
        self._wait("read", timeout)
        if not self.source_read:
            raise self._late("read")

    def wait_copied(self, timeout: float | None = None) -> None:
        self._wait("copied", timeout)
        if self._state in NOT_SAVED:
            raise self._failed()
        if self._state < CheckpointState.COPIED:
            raise self._late("copied")

    def wait_durable(self, timeout: float | None = None) -> Durable:
        self._wait("durable", timeout)
        if self._state is CheckpointState.SUPERSEDED:
            if self._newer is None:  # the page has no name for one that was damaged since
                self._describe()
            if self._newer is None:
                raise DaemonUnreachableError(
                    f"checkpoint of step {self.step}: {_REPLACED}, and pccheckd did not report "
                    "which",
                    hint="see: pccheckctl list",
                )
            return self._newer
        if self._state in _SAFE:
            return Durable(self._sequence, self.step)
        if self._state in FINAL:
            raise self._failed()
        raise self._late("durable")

    def wait_global(self, timeout: float | None = None) -> Durable:
        connection = self._connection
        if connection is None or connection.saves_alone:
            return self.wait_durable(timeout)
        self._wait("global", timeout)
        if self._state is CheckpointState.DURABLE and self._settled:
            self._described = False
            self._describe()
        if self._state is not CheckpointState.DURABLE:
            return self.wait_durable(0)
        if self._given_up:
            self._describe()
            raise CheckpointFailedError(
                f"checkpoint of step {self.step} is durable on this rank, but will not be on all "
                f"ranks: {self._reason or _NOT_ON_ALL}"
            )
        if not connection.alive():
            raise connection.gone()
        raise self._late("durable on all ranks")

    def saved(self, timeout: float, *, everywhere: bool) -> Durable | None:
        """It, once it is durable, or with `everywhere` on all ranks; None when it is not within
        `timeout` seconds, or never will be."""
        connection = self._connection
        everywhere = everywhere and connection is not None and not connection.saves_alone
        self._wait("global" if everywhere else "durable", timeout)
        durable = self._state is CheckpointState.DURABLE and not everywhere
        if durable or self._state is CheckpointState.GLOBAL:
            return Durable(self._sequence, self.step)
        return None

    def _wait(self, what: str, timeout: float | None) -> None:
        deadline_ns = FOREVER_NS
        if timeout is not None:
            deadline_ns = time.monotonic_ns() + int(min(timeout, _LONGEST_S) * 1e9)
        if self.verdict is not None:
            self.verdict.wait(deadline_ns)
        connection, state = self._connection, self.state
        if connection is not None and (
            state not in FINAL or (what == "global" and state is CheckpointState.DURABLE)
        ):
            with contextlib.suppress(ValueError, OSError):  # closed, or the daemon has ended
                connection.link.wait(self.snapshot, what, deadline_ns)
            _ = self.state

    def settle(self) -> None:
        """Call it before the entry in the page is used again, or the link is closed."""
        connection = self._connection
        if connection is None or self._settled:
            return
        if self.state not in FINAL:
            self._lose()
        elif self._state in NOT_SAVED or self._state is CheckpointState.SUPERSEDED:
            self.describe_later()
        self._settled = True

    def _look(self, connection: Connection) -> None:
        with self._lock:
            if self._settled:  # in another thread
                return
            looks = -1
            # Again when a signal handler looked, or ended it, in the middle: what this call had
            # read before is older.
            while looks != self._looks:
                looks = self._looks = self._looks + 1
                if self._end is None:
                    # This comes first: what a daemon wrote before it ended still counts.
                    alive = connection.alive()
                    self._note(entry_of(connection, self.snapshot), alive)
                    if self._state is CheckpointState.DURABLE and connection.saves_alone:
                        self._settled = True
                else:
                    self._state, self._reason = self._end
                    self._described = True

    def _note(self, now: LinkState | None, alive: bool) -> None:
        """Takes over what the page has of it, and whether its daemon lived then."""
        if now is not None:
            self._state = state = _state_of(now)
            given_up = state is CheckpointState.DURABLE and now.outcome == OUTCOME_GIVEN_UP
            if self._given_up != given_up:
                self._given_up, self._described, self._reason = given_up, False, ""
            self.copy_broke = now.word == WORD_REFUSED and state is CheckpointState.FAILED
            if now.word == WORD_ABANDONED and now.error_name and alive:
                self._reason, self._described = abandoned_because(now.error_name), True
                self.reported |= now.error_name == TIMED_OUT
            if now.sequence:
                self._sequence = now.sequence
            if now.newer and self._newer is None and self._connection is not None:
                self._newer = _with_sequence(self._connection, now.newer)
        if (now is None or not alive) and self._state not in FINAL:
            self._lose()
        elif now is not None and not alive and not self._described:
            self._reason = _untold(now, self._state)

    def _lose(self) -> None:
        """Its daemon does not report any more how it ends. The client abandons what was not copied,
        but the copy may have become complete a moment before."""
        connection = self._connection
        if connection is not None and _has_superseded(connection, self._sequence):
            alone = connection.saves_alone
            self.end(CheckpointState.DURABLE if alone else CheckpointState.GLOBAL, "")
            return
        self.is_unknown = self._sequence > 0
        reason = f"{_UNKNOWN} ({_SEE})" if self.is_unknown else _LOST
        if connection is not None and connection.pid != os.getpid():
            reason = _FORKED
        self.end(CheckpointState.FAILED, reason, reported=True)

    def find_out(self, connection: Connection) -> None:
        """Asks another daemon what became of one that `is_unknown`. Call it until that is known."""
        now_s = time.monotonic()
        if self._asked_s is None or now_s >= self._asked_s + _ASK_AGAIN_S:
            connection.ask(Describe(self.snapshot, self._sequence), self._learn)
            self._asked_s = now_s

    def _learn(self, answer: object) -> None:
        if isinstance(answer, Failure) and answer.code != NoCheckpointError.code:
            return  # asked again later
        state = CheckpointState.FAILED
        if isinstance(answer, Described) and answer.step == self.step:
            state = answer.state
        if state not in FINAL:
            self._asked_s = None  # that daemon is still writing it
        elif state in (CheckpointState.DURABLE, CheckpointState.GLOBAL):
            self.found_durable()
        else:
            self._known("it is not durable")

    def found_durable(self) -> None:
        """Another daemon has it: it is named, since it was reported as failed."""
        self._known(f"it is durable, as sequence {self._sequence}")
        LOG.warning(
            "PCcheck: the checkpoint of step %d is durable (sequence %d). It was reported as "
            "failed: %s", self.step, self._sequence, _UNKNOWN,
        )  # fmt: skip

    def _known(self, end: str) -> None:
        self.is_unknown, self._reason = False, f"{_UNKNOWN}; {end}"

    def _describe(self) -> None:
        connection = self._connection
        if self._described or connection is None:
            return
        deadline = time.monotonic() + _DESCRIBE_LIMIT_S
        while connection.alive():
            try:
                self._take(connection.request(Describe(self.snapshot), timeout_s=_DESCRIBE_LIMIT_S))
            except CheckpointFailedError as error:  # before it was known there
                self._take(Failure(error.code, error.message, error.hint))
            except PccheckError as error:
                self._reason = self._reason or f"unknown: {error.message}"
                return
            if self._described or time.monotonic() >= deadline:
                return
            time.sleep(_DESCRIBE_PAUSE_S)
        self._reason = self._reason or _LOST

    def describe_later(self) -> None:
        """The reason arrives with a later answer, and is not waited for. Call this until the
        reason is known."""
        connection, now_s = self._connection, time.monotonic()
        waits = self._asked_s is not None and now_s < self._asked_s + _ASK_AGAIN_S
        if connection is not None and not (self._described or waits):
            try:
                connection.ask(Describe(self.snapshot), self._take)
                self._asked_s = now_s
            except PccheckError:  # the daemon ended, or this client was closed
                if self._given_up or self._state is not CheckpointState.DURABLE:
                    self._reason = "unknown: the daemon did not answer"

    def _take(self, answer: object) -> None:
        if not isinstance(answer, (Described, Failure)):
            return
        self._asked_s = None
        reason = answer.message if isinstance(answer, Failure) else answer.reason
        if isinstance(answer, Described):
            if answer.state not in FINAL:
                return  # the page changes before the daemon's records do
            if self._settled and answer.state in _SAFE:
                self._state = answer.state  # it may have become global since
                self._given_up = answer.state is CheckpointState.DURABLE and bool(reason)
            if answer.newer_step is not None:
                self._newer = Durable(answer.newer_sequence, answer.newer_step)
            self._sequence = self._sequence or answer.sequence
        self._described = True
        self._reason = f"{reason} ({answer.hint})" if answer.hint else reason

    def _late(self, what: str) -> WaitTimeoutError:
        return WaitTimeoutError(
            f"checkpoint of step {self.step} is not {what} yet",
            hint="wait longer, or see what delays it: pccheckctl status",
        )

    def _failed(self) -> CheckpointFailedError:
        how = "was skipped" if self._state is CheckpointState.SKIPPED else "failed"
        reason = self.reason or "for an unknown reason"
        return CheckpointFailedError(f"checkpoint of step {self.step} {how}: {reason}")

    def __repr__(self) -> str:
        return f"<InFlight step={self.step} {self.state}>"


def _untold(now: LinkState, state: CheckpointState) -> str:
    """Why it ended so, as far as the page of a daemon that has ended shows."""
    if state is CheckpointState.SUPERSEDED:
        return _REPLACED
    if state in NOT_SAVED:
        return _LOST if now.word == WORD_ABANDONED else _UNTOLD
    return ""


def _state_of(now: LinkState) -> CheckpointState:
    if now.word == WORD_COPIED:
        if now.outcome == OUTCOME_GIVEN_UP:
            return CheckpointState.DURABLE
        return CheckpointState(max(now.outcome, CheckpointState.COPIED))
    if now.word == WORD_REFUSED and now.outcome == CheckpointState.SKIPPED:
        return CheckpointState.SKIPPED
    if now.word in (WORD_REFUSED, WORD_ABANDONED):
        return CheckpointState.FAILED
    return CheckpointState.COPYING if now.word == WORD_COPYING else CheckpointState.REQUESTED
