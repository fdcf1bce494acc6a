"""What holds the next update back until the copy has read the tensors, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pccheck_wire.errors import PccheckError
from pccheck_wire.messages import CheckpointState, Describe

from .handle import Checkpoint
from .transport import Connection

_BACKOFF_DOUBLINGS_MAX = 6


@dataclass(slots=True)
class _Pending:
    checkpoint: Checkpoint
    connection: Connection
    owners: list[object]  # keeps the memory that is being read


class Gate:
    """Snapshots whose source is being read. Used by the training thread."""

    def __init__(
        self, stall_limit_s: float, on_expiry: Callable[[Checkpoint, Connection], None]
    ) -> None:
        self._stall_limit_s = stall_limit_s
        self._on_expiry = on_expiry
        self._pending: list[_Pending] = []

    def add(self, checkpoint: Checkpoint, connection: Connection, owners: list[object]) -> None:
        self._pending.append(_Pending(checkpoint, connection, owners))

    def collect(self) -> None:
        """Lets go of memory that has been read already."""
        if self._pending:
            self._pending = [item for item in self._pending if not item.checkpoint.source_read]

    def wait(self) -> None:
        """Returns when every tensor may be changed: at the latest after the stall limit.

        A snapshot that is not read by then is abandoned: by compare-and-swap against the daemon, so
        that it either was copied in time or will never be vouched for.
        """
        if not self._pending:
            return
        deadline_ns = time.monotonic_ns() + int(self._stall_limit_s * 1e9)
        pending, self._pending = self._pending, []
        try:
            for item in pending:
                read = _wait_read(item, deadline_ns)
                if not read and abandon(item.checkpoint, item.connection, self._stall_limit_s):
                    self._on_expiry(item.checkpoint, item.connection)
        except BaseException:  # Ctrl-C: nobody asks again before the tensors change
            for item in pending:
                abandon(item.checkpoint, item.connection, self._stall_limit_s)
            raise

    def release(self) -> None:
        """Forgets everything; only for a link that is closed or about to be."""
        self._pending.clear()


def _wait_read(item: _Pending, deadline_ns: int) -> bool:
    try:
        return item.connection.link.wait_read(item.checkpoint.snapshot, deadline_ns)
    except (ValueError, OSError):  # the daemon has ended: nothing is read any more
        return True


def abandon(checkpoint: Checkpoint, connection: Connection, limit_s: float) -> bool:
    """True when the snapshot was given up; False when it was complete, or refused, just in time."""
    try:
        won = connection.link.abandon(checkpoint.snapshot)
    except (ValueError, OSError):
        return False
    if won:
        checkpoint.end(
            CheckpointState.FAILED,
            f"abandoned: it was not copied within stall_limit_s={limit_s:g} s, or interrupted",
        )
    return won


class Breaker:
    """After an expired deadline checkpoints are skipped until the daemon shows progress.

    Progress is an answer to a request, and a step forward of a checkpoint that was in flight,
    if there was any. Expiries that follow each other without a copied checkpoint between them
    also make it stay open for a time that doubles, so that a disk that is too slow does not
    cost every interval.
    """

    def __init__(self, stall_limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_limit_s = stall_limit_s
        self._clock = clock
        self._open = False
        self._trips = 0
        self._until = 0.0
        self._answered = False
        self._marks: list[tuple[Checkpoint, CheckpointState]] = []

    def trip(self, connection: Connection, in_flight: list[Checkpoint], snapshot: int) -> None:
        doublings = min(self._trips, _BACKOFF_DOUBLINGS_MAX)
        self._open = True
        self._trips += 1
        self._until = self._clock() + self._stall_limit_s * (2**doublings - 1)
        self._answered = False
        self._marks = [(item, item.state) for item in in_flight]
        try:
            connection.ask(Describe(snapshot), self._hear)
        except PccheckError:
            self._answered = True  # a new connection will tell

    def _hear(self, _answer: object) -> None:
        self._answered = True

    def closed(self) -> bool:
        """Whether a checkpoint may be tried."""
        if self._open and self._answered and self._clock() >= self._until:
            moved = [item.state is not before for item, before in self._marks]
            self._open = bool(moved) and not any(moved)
        return not self._open

    def copied(self) -> None:
        """A snapshot was copied: all is well."""
        self._trips = 0

    def reset(self) -> None:
        """Another connection: what the old one did says nothing."""
        self._open = False
        self._marks = []
