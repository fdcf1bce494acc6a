"""A checkpoint that was asked for, as the client keeps it: its entry in the page, its end, and
waiting for it. Users get a `Checkpoint` (handle.py), which asks this."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import NamedTuple, Protocol

from pccheck.daemon.transport import Connection
from pccheck_native import (
    WORD_ABANDONED,
    WORD_COPIED,
    WORD_COPYING,
    WORD_REFUSED,
    LinkState,
)
from pccheck_wire.errors import CheckpointFailedError, PccheckError, WaitTimeoutError
from pccheck_wire.messages import CheckpointState, Describe, Described, Failure

_DESCRIBE_LIMIT_S = 2.0
_DESCRIBE_PAUSE_S = 0.005
_ASK_AGAIN_S = 5.0  # an answer may be lost with the process that passes it on
_FOREVER_NS = 2**63 - 1
_LONGEST_S = 1e9  # thirty years: float("inf") is a timeout, too
FINAL = frozenset(
    (
        CheckpointState.DURABLE,
        CheckpointState.GLOBAL,
        CheckpointState.SUPERSEDED,
        CheckpointState.SKIPPED,
        CheckpointState.FAILED,
    )
)
_ENDED = {CheckpointState.SKIPPED: "was skipped", CheckpointState.FAILED: "failed"}
_SAFE = frozenset((CheckpointState.DURABLE, CheckpointState.GLOBAL, CheckpointState.SUPERSEDED))
TIMED_OUT = "ETIMEDOUT"
_LOST = "the daemon ended before the checkpoint was durable"


class Durable(NamedTuple):
    """What is durable: the checkpoint itself, or the newer one that superseded it."""

    sequence: int
    step: int | None


class _WaitCall(Protocol):
    def __call__(self, snapshot: int, deadline_ns: int) -> bool: ...


class _Verdict(Protocol):
    """See verdict.py."""

    def ask(self) -> None: ...
    def wait(self, deadline_ns: int) -> None: ...


def let_go(name: str) -> str:
    """The reason of a checkpoint that the link abandoned by itself."""
    if name == TIMED_OUT:
        return "abandoned: it was not copied within stall_limit_s, and a GPU stream waited for it"
    return f"its part on a GPU could not be copied ({name})"


class InFlight:
    """Any thread may ask and wait; nothing here stops training."""

    def __init__(self, step: int, connection: Connection | None = None, snapshot: int = 0) -> None:
        self.step = step  #: as it was when `checkpoint()` was called
        self.snapshot = snapshot
        self._connection = connection
        # A verdict ends it in another thread; a signal handler may ask in the middle.
        self._lock = threading.RLock()
        self._state = CheckpointState.REQUESTED
        self._sequence = 0
        self._newer = Durable(0, None)
        self._reason = ""
        self._described = False
        self._asked_s: float | None = None  # when for its reason, and the answer is not here yet
        self._broke = False
        self.verdict: _Verdict | None = None  #: on whether its tensors were left alone
        self.told = False  #: the user was warned of what made it fail
        self._settled = False  # its entry in the page is another snapshot's by now

    @classmethod
    def ended(cls, step: int, state: CheckpointState, reason: str) -> InFlight:
        """One that never reached the daemon."""
        made = cls(step)
        made.end(state, reason)
        return made

    def end(self, state: CheckpointState, reason: str, *, told: bool = False) -> None:
        """The client itself knows how it ended; the page is not asked any more. `told`: so does the
        user."""
        with self._lock:
            self._state, self._reason, self._described = state, reason, True
            self.told = told
            self._connection = None

    @property
    def state(self) -> CheckpointState:
        """Where it is now; ends are DURABLE, GLOBAL, SUPERSEDED, SKIPPED and FAILED."""
        if self.verdict is not None:
            self.verdict.ask()
        connection = self._connection
        if connection is not None and not self._settled:
            self._look(connection)
        return self._state

    @property
    def sequence(self) -> int:
        """Its place in the order of checkpoints of the volume; 0 before it was admitted."""
        if self.state is CheckpointState.SUPERSEDED and self._sequence == 0:
            self._describe()
        return self._sequence

    @property
    def reason(self) -> str:
        """Why it was skipped or failed, or what superseded it; "" otherwise."""
        if self.state in (
            CheckpointState.SKIPPED, CheckpointState.FAILED, CheckpointState.SUPERSEDED,
        ):  # fmt: skip
            self._describe()
        return self._reason

    @property
    def source_read(self) -> bool:
        """Whether the tensors may be changed: they were read, or never will be."""
        if self.verdict is not None:
            self.verdict.ask()
        connection = self._connection
        if connection is None:
            return True
        try:
            now = connection.link.state(self.snapshot)
        except (ValueError, OSError):
            return True
        return now is None or now.source_read or not connection.alive()

    @property
    def given_up(self) -> str:
        """What made the link abandon it by itself, when nobody has taken note yet: the deadline of
        a stream that waits for it (ETIMEDOUT), or what failed; "" when it has not."""
        connection = self._connection
        if connection is None or self._settled:
            return ""
        try:
            now = connection.link.state(self.snapshot)
        except (ValueError, OSError):
            return ""
        # Asked last: a link that lost its daemon says so before it abandons everything.
        if now is None or now.word != WORD_ABANDONED or not connection.alive():
            return ""
        if self.verdict is not None:
            self.verdict.ask()  # another thread may be giving it
        if self._connection is None:
            return ""
        return now.error_name or TIMED_OUT

    @property
    def copy_broke(self) -> bool:
        """Whether the daemon gave it up before it was copied."""
        return self._broke

    def wait_read(self, timeout: float | None = None) -> None:
        """Returns once the tensors may be changed, whatever became of it. Raises WaitTimeoutError
        after `timeout` seconds."""
        self._wait("wait_read", timeout)
        if not self.source_read:
            raise WaitTimeoutError(f"the checkpoint of step {self.step} is not read yet")

    def wait_copied(self, timeout: float | None = None) -> None:
        """Returns once the daemon has a complete copy, which outlives this process.

        Raises CheckpointFailedError when it never will, WaitTimeoutError after `timeout` seconds.
        """
        self._wait("wait_copied", timeout)
        if self._state in (CheckpointState.SKIPPED, CheckpointState.FAILED):
            raise self._failed()
        if self._state < CheckpointState.COPIED:
            raise WaitTimeoutError(f"the checkpoint of step {self.step} is not copied yet")

    def wait_durable(self, timeout: float | None = None) -> Durable:
        """Returns once it, or a newer one, will be found after power loss; says which.

        Raises CheckpointFailedError when it was skipped or failed, WaitTimeoutError after
        `timeout` seconds.
        """
        self._wait("wait_durable", timeout)
        if self._state is CheckpointState.SUPERSEDED:
            self._describe()
            return self._newer
        if self._state in _SAFE:
            return Durable(self._sequence, self.step)
        if self._state in FINAL:
            raise self._failed()
        raise WaitTimeoutError(f"the checkpoint of step {self.step} is not durable yet")

    def wait_global(self, timeout: float | None = None) -> Durable:
        """Returns once every rank of the job has it, or a newer one, durable: what a restore of the
        job gives from then on. Says which. For a rank that saves alone it is `wait_durable`.

        Raises CheckpointFailedError when it was skipped or failed here, WaitTimeoutError after
        `timeout` seconds, DaemonUnreachableError when the daemon ended before all ranks had it.
        """
        connection = self._connection
        if connection is None or connection.saves_alone:
            return self.wait_durable(timeout)
        self._wait("wait_global", timeout)
        if self._state is CheckpointState.DURABLE and self._settled:
            self._described = False
            self._describe()
        if self._state is CheckpointState.DURABLE and not connection.alive():
            raise connection.gone()
        if self._state is CheckpointState.DURABLE:
            raise WaitTimeoutError(
                f"the checkpoint of step {self.step} is durable on this rank, not yet on all",
                hint="see: pccheckctl status",
            )
        return self.wait_durable(0)

    def _wait(self, what: str, timeout: float | None) -> None:
        deadline_ns = _FOREVER_NS
        if timeout is not None:
            deadline_ns = time.monotonic_ns() + int(min(timeout, _LONGEST_S) * 1e9)
        if self.verdict is not None:
            self.verdict.wait(deadline_ns)
        connection = self._connection
        if connection is not None and (
            self.state not in FINAL
            or (what == "wait_global" and self._state is CheckpointState.DURABLE)
        ):
            wait: _WaitCall = getattr(connection.link, what)
            with contextlib.suppress(ValueError, OSError):  # closed, or the daemon has ended
                wait(self.snapshot, deadline_ns)
        _ = self.state

    def settle(self) -> None:
        """Before its entry in the page is used again, or the link is closed."""
        connection = self._connection
        if connection is None or self._settled:
            return
        if self.state not in FINAL:
            self.end(CheckpointState.FAILED, _LOST, told=True)
        elif self._state in (CheckpointState.SKIPPED, CheckpointState.FAILED):
            self.describe_later()
        self._settled = True

    def _look(self, connection: Connection) -> None:
        alive = connection.alive()  # asked first: what a daemon wrote before it ended still counts
        try:
            now = connection.link.state(self.snapshot)
        except (ValueError, OSError):
            now = None
        with self._lock:
            if self._connection is connection:  # else it was ended meanwhile
                self._note(now, alive)

    def _note(self, now: LinkState | None, alive: bool) -> None:
        """What the page says of it, and whether its daemon lived then."""
        if now is None:
            if self._state not in FINAL:
                self.end(CheckpointState.FAILED, _LOST, told=True)
            return
        state = self._state_of(now.word, now.outcome)
        self._state = state
        self._broke = now.word == WORD_REFUSED and state is CheckpointState.FAILED
        if now.word == WORD_ABANDONED and now.error_name and alive:
            self._reason, self._described = let_go(now.error_name), True
            self.told = now.error_name == TIMED_OUT
        if state is CheckpointState.SUPERSEDED:
            self._newer = Durable(now.sequence, None)
        elif now.sequence:
            self._sequence = now.sequence
        if not alive and state not in FINAL:
            self.end(CheckpointState.FAILED, _LOST, told=True)

    @staticmethod
    def _state_of(word: int, outcome: int) -> CheckpointState:
        if word == WORD_ABANDONED:
            return CheckpointState.FAILED
        if word == WORD_REFUSED:
            return CheckpointState.SKIPPED if outcome == CheckpointState.SKIPPED else (
                CheckpointState.FAILED
            )  # fmt: skip
        if word == WORD_COPIED:
            return CheckpointState(max(outcome, CheckpointState.COPIED))
        return CheckpointState.COPYING if word == WORD_COPYING else CheckpointState.REQUESTED

    def _describe(self) -> None:
        connection = self._connection
        if self._described or connection is None:
            return
        deadline = time.monotonic() + _DESCRIBE_LIMIT_S
        while connection.alive():
            try:
                self._take(connection.request(Describe(self.snapshot), timeout_s=_DESCRIBE_LIMIT_S))
            except CheckpointFailedError as error:  # before it was known there
                self._never_began(error.message, error.hint)
                return
            except PccheckError as error:
                self._reason = self._reason or f"unknown: {error.message}"
                return
            if self._described or time.monotonic() >= deadline:
                return
            time.sleep(_DESCRIBE_PAUSE_S)
        self._reason = self._reason or _LOST

    def describe_later(self) -> None:
        """The reason arrives with a later answer; nobody waits for it. Call it again until it is
        known."""
        connection, now_s = self._connection, time.monotonic()
        waits = self._asked_s is not None and now_s < self._asked_s + _ASK_AGAIN_S
        if connection is not None and not (self._described or waits):
            try:
                connection.ask(Describe(self.snapshot), self._take)
                self._asked_s = now_s
            except PccheckError:
                self._reason = "unknown: the daemon did not answer"

    @property
    def known_reason(self) -> str | None:
        """The reason if it is known without asking."""
        return self._reason if self._described else None

    def _take(self, answer: object) -> None:
        if isinstance(answer, Failure):
            self._asked_s = None
            self._never_began(answer.message, answer.hint)
        if isinstance(answer, Described):
            self._asked_s = None
            if answer.state not in FINAL:
                return  # the page tells before the daemon's records do
            self._described = True
            if self._settled and answer.state in _SAFE:
                self._state = answer.state  # it may have become global since
            self._reason = f"{answer.reason} ({answer.hint})" if answer.hint else answer.reason
            if answer.state is CheckpointState.SUPERSEDED:
                self._newer = Durable(answer.newer_sequence, answer.newer_step)
            self._sequence = self._sequence or answer.sequence

    def _never_began(self, message: str, hint: str) -> None:
        self._described = True
        self._reason = f"{message} ({hint})" if hint else message

    def _failed(self) -> CheckpointFailedError:
        reason = self.reason or "for an unknown reason"
        return CheckpointFailedError(
            f"the checkpoint of step {self.step} {_ENDED[self._state]}: {reason}"
        )

    def __repr__(self) -> str:
        return f"<InFlight step={self.step} {self.state}>"
