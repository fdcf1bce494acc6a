"""Waiting for a save: until it was read, copied, durable, or durable on all ranks. Any thread."""

from __future__ import annotations

import contextlib
import time

from pccheck_wire.ends import Cause, Why, sentence
from pccheck_wire.errors import CheckpointFailedError, DaemonUnreachableError, WaitTimeoutError
from pccheck_wire.messages import CheckpointState

from .in_flight import NOT_SAVED, InFlight, entry_of
from .phases import GOING, SAFE, SHOWN, Durable, Phase

FOREVER_NS = 2**63 - 1
_LONGEST_S = 1e9  # thirty years: float("inf") is a timeout, too


def wait_read(save: InFlight, timeout: float | None = None) -> None:
    """Returns once the tensors may be changed, whatever became of it. Raises WaitTimeoutError."""
    _wait(save, "read", timeout)
    if not save.is_read():
        raise _late(save, "read")


def wait_copied(save: InFlight, timeout: float | None = None) -> None:
    """Raises CheckpointFailedError, WaitTimeoutError."""
    if save.on_device:
        save.want()
    state = SHOWN[_wait(save, "copied", timeout)]
    if state in NOT_SAVED:
        raise _failed(save, state)
    if state < CheckpointState.COPIED:
        raise _late(save, "copied")


def wait_end(save: InFlight) -> None:
    """Returns when it has ended, or its daemon; nothing is written for that."""
    _wait(save, "durable", None)


def wait_durable(save: InFlight, timeout: float | None = None) -> Durable:
    """Raises CheckpointFailedError, WaitTimeoutError."""
    save, phase = _written(save, "durable", timeout)
    if phase in SAFE:
        return Durable(save.sequence, save.step)
    if phase is Phase.SUPERSEDED:
        return _replacement(save)
    if phase in GOING:
        raise _late(save, "durable")
    raise _failed(save, SHOWN[phase])


def wait_global(save: InFlight, timeout: float | None = None) -> Durable:
    """As wait_durable, on all ranks. Raises also when the daemon ended before that was known."""
    connection = save.connection
    if connection is None or connection.saves_alone:
        return wait_durable(save, timeout)
    save, phase = _written(save, "global", timeout)
    if phase in (Phase.DURABLE, Phase.GIVEN_UP) and entry_of(connection, save.snapshot) is None:
        save.ask_now()  # a younger snapshot has the entry, so the page says no more
        phase = save.phase
    if phase is Phase.GIVEN_UP:
        raise CheckpointFailedError(
            f"checkpoint of step {save.step} is durable on this rank, but will not be on all "
            f"ranks: {save.reason}"
        )
    if phase is not Phase.DURABLE:
        return wait_durable(save, 0)
    raise _late(save, "durable on all ranks") if connection.alive() else connection.gone()


def saved(save: InFlight, timeout: float, *, everywhere: bool) -> Durable | None:
    """What is durable within `timeout` seconds, or with `everywhere` on all ranks, or None."""
    connection = save.connection
    everywhere = everywhere and connection is not None and not connection.saves_alone
    phase = _wait(save, "global" if everywhere else "durable", timeout)
    if phase is Phase.GLOBAL or (phase in SAFE and not everywhere):
        return Durable(save.sequence, save.step)
    return None


def _written(save: InFlight, what: str, timeout: float | None) -> tuple[InFlight, Phase]:
    """Has a memory-only one written, or what took its place in memory, and waits for that."""
    end_s = None if timeout is None else time.monotonic() + timeout
    while True:
        save.want()
        left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
        phase = _wait(save, what, left_s)
        later = save.standing()
        if later is save:
            return save, phase
        save = later


def _wait(save: InFlight, what: str, timeout: float | None) -> Phase:
    deadline_ns = FOREVER_NS
    if timeout is not None:
        deadline_ns = time.monotonic_ns() + int(min(timeout, _LONGEST_S) * 1e9)
    if save.verdict is not None:
        save.verdict.wait(deadline_ns)
    connection, phase = save.connection, save.phase
    if connection is not None and (phase in GOING or (what == "global" and phase is Phase.DURABLE)):
        with contextlib.suppress(ValueError, OSError):  # closed, or the daemon has ended
            connection.native.wait(save.snapshot, what, deadline_ns)
        phase = save.phase
    return phase


def _replacement(save: InFlight) -> Durable:
    why, unknown = Why(Cause.REPLACED), "which"
    if save.why.cause == Cause.REPLACED_IN_MEMORY:
        why, unknown = save.why, "whether that is durable"
    elif save.inquiry.newer is None:  # the page has no name for one that was damaged since
        save.ask_now()
    if save.inquiry.newer is None:
        raise DaemonUnreachableError(
            f"checkpoint of step {save.step}: {sentence(why).reason}, and pccheckd did not report "
            f"{unknown}",
            hint="see: pccheckctl list",
        )
    return save.inquiry.newer


def _late(save: InFlight, what: str) -> WaitTimeoutError:
    return WaitTimeoutError(
        f"checkpoint of step {save.step} is not {what} yet",
        hint="wait longer, or see what delays it: pccheckctl status",
    )


def _failed(save: InFlight, state: CheckpointState) -> CheckpointFailedError:
    how = "was skipped" if state is CheckpointState.SKIPPED else "failed"
    reason = save.reason or "for an unknown reason"
    return CheckpointFailedError(f"checkpoint of step {save.step} {how}: {reason}")
