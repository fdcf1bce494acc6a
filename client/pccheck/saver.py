"""One checkpoint, from a snapshot plan to the native link; and what became of those before."""

from __future__ import annotations

import contextlib
import time

from pccheck_native import SNAPSHOTS
from pccheck_wire.errors import (
    CheckpointFailedError,
    DaemonUnreachableError,
    PccheckError,
    WaitTimeoutError,
)
from pccheck_wire.messages import Begin, CheckpointState

from .gate import Breaker, Gate, abandon
from .handle import Checkpoint
from .plan import Snapshot
from .session import Session
from .transport import Connection
from .warn import LOG, Warner

_ENDS = (
    CheckpointState.DURABLE, CheckpointState.GLOBAL, CheckpointState.SUPERSEDED,
    CheckpointState.SKIPPED, CheckpointState.FAILED,
)  # fmt: skip


class Saver:
    """Submits snapshots, watches them, holds the gate. Used by the training thread."""

    def __init__(
        self, session: Session, warner: Warner, *, on_busy: str, raises: bool, stall_limit_s: float
    ) -> None:
        self._session = session
        self._warner = warner
        self._on_busy = on_busy
        self._raises = raises
        self._stall_limit_s = stall_limit_s
        self._gate = Gate(stall_limit_s, self._expired)
        self._breaker = Breaker(stall_limit_s)
        self._unfinished: dict[int, Checkpoint] = {}
        self._recent: dict[int, Checkpoint] = {}  # by entry of the page
        self._unexplained: list[Checkpoint] = []
        self._to_raise: list[CheckpointFailedError] = []
        self.counts: dict[CheckpointState, int] = {}

    def gate(self) -> None:
        """Returns when the tensors may be changed."""
        self._gate.wait()

    def ready(self) -> Connection:
        """The connection to use for a checkpoint. Raises CheckpointFailedError or the cause."""
        connection = self._session.current()
        if connection is None:
            self.leave()
            connection = self._session.at_hand()
        if connection is None:
            raise self._session.error or DaemonUnreachableError("there is no daemon")
        connection.pump()
        self._look_around()
        if self._to_raise:
            raise self._to_raise.pop(0)
        if not self._breaker.closed():
            raise CheckpointFailedError(
                "the daemon did not keep up with stall_limit_s="
                f"{self._stall_limit_s:g} s and has shown no progress since"
            )
        return connection

    def submit(
        self, connection: Connection, step: int, snapshot: Snapshot, *, wait_copied: bool
    ) -> Checkpoint:
        """Hands the snapshot over. With `wait_copied` it returns when the copy is complete or has
        failed; otherwise at once, and the gate holds the next update back."""
        try:
            self._session.register(connection, snapshot.payload_bytes)
        except WaitTimeoutError:
            self._trip(connection, 0)
            raise
        number = connection.next_snapshot()
        self._free_entry(number)
        checkpoint = Checkpoint(step, connection, number)
        link = connection.link
        ranges, volatile = snapshot.ranges, snapshot.volatile
        if wait_copied:  # nothing changes meanwhile: no need for a copy of the copy
            ranges, volatile = ranges + volatile, b""
        link.request(number)
        try:
            connection.post(
                Begin(
                    number,
                    step,
                    snapshot.payload_bytes,
                    snapshot.tree_offset,
                    len(snapshot.tree),
                    self._on_busy,
                )
            )
            link.submit(number, ranges, volatile, snapshot.tree, snapshot.tree_offset)
        except BaseException:
            abandon(checkpoint, connection, self._stall_limit_s)
            raise
        self._recent[number % SNAPSHOTS] = self._unfinished[number] = checkpoint
        if wait_copied:
            self._wait_copied(checkpoint, connection)
        else:
            self._gate.add(checkpoint, connection, snapshot.owners)
        return checkpoint

    def _wait_copied(self, checkpoint: Checkpoint, connection: Connection) -> None:
        try:
            checkpoint.wait_copied(self._stall_limit_s)
        except WaitTimeoutError:
            if abandon(checkpoint, connection, self._stall_limit_s):
                self._expired(checkpoint, connection)
        except CheckpointFailedError:
            pass  # the handle says so, and `_look_around` tells
        except BaseException:  # Ctrl-C: the source may change from here on
            abandon(checkpoint, connection, self._stall_limit_s)
            raise

    def _free_entry(self, number: int) -> None:
        """The page's entry of the snapshot SNAPSHOTS before is about to be used again."""
        before = self._recent.pop(number % SNAPSHOTS, None)
        if before is None:
            return
        if before.state not in _ENDS:
            if self._on_busy == "skip":
                raise CheckpointFailedError(f"{SNAPSHOTS} checkpoints are in flight already")
            with contextlib.suppress(CheckpointFailedError):
                before.wait_durable(self._stall_limit_s)
        before.settle()

    def _expired(self, checkpoint: Checkpoint, connection: Connection) -> None:
        self._warner.once(
            "stall",
            f"the checkpoint of step {checkpoint.step} was given up, because the daemon had not "
            f"copied it within stall_limit_s={self._stall_limit_s:g} s; checkpoints are skipped "
            "until it shows progress (see: pccheckctl status)",
        )
        self._trip(connection, checkpoint.snapshot)

    def _trip(self, connection: Connection, snapshot: int) -> None:
        in_flight = [item for item in self._unfinished.values() if item.state not in _ENDS]
        self._breaker.trip(connection, in_flight, snapshot)

    def _look_around(self) -> None:
        """Takes note of checkpoints that ended, and tells of the first that failed."""
        self._gate.collect()
        for number, checkpoint in list(self._unfinished.items()):
            state = checkpoint.state
            if state >= CheckpointState.COPIED and state is not CheckpointState.FAILED:
                self._breaker.copied()
            if state in _ENDS:
                del self._unfinished[number]
                self._count(checkpoint, state)
        self._explain()

    def _count(self, checkpoint: Checkpoint, state: CheckpointState) -> None:
        self.counts[state] = self.counts.get(state, 0) + 1
        if state in (CheckpointState.DURABLE, CheckpointState.GLOBAL):
            self._warner.over("storage")
            self._warner.over("stall")
        elif state is CheckpointState.FAILED:
            checkpoint.describe_later()
            self._unexplained.append(checkpoint)

    def _explain(self) -> None:
        """Reasons arrive with later answers; what was abandoned has been told already."""
        for checkpoint in list(self._unexplained):
            reason = checkpoint.known_reason
            if reason is not None:
                self._unexplained.remove(checkpoint)
                if not reason.startswith(("abandoned", "the daemon ended")):
                    self._failed_later(checkpoint.step, reason)

    def _failed_later(self, step: int, reason: str) -> None:
        """One failed after `checkpoint()` had returned: the next call says so."""
        if self._raises:
            self._to_raise.append(
                CheckpointFailedError(f"the checkpoint of step {step} failed: {reason}")
            )
        else:
            self.tell_failed(step, reason)

    def tell_failed(self, step: int, reason: str) -> None:
        self._warner.once(
            "storage",
            f"the checkpoint of step {step} failed: {reason}. Training goes on; later failures are "
            "only counted until one succeeds.",
        )

    def leave(self) -> None:
        """The connection has died or is about to be closed."""
        for checkpoint in self._recent.values():
            checkpoint.settle()
        self._look_around()
        self._recent.clear()
        self._unfinished.clear()
        self._gate.release()
        self._breaker.reset()

    def drain(self, limit_s: float) -> None:
        """Waits until everything in flight is durable, superseded or has failed."""
        self._raises = False  # there is no next call: what fails now is a warning
        deadline = time.monotonic() + limit_s
        for checkpoint in list(self._unfinished.values()):
            try:
                checkpoint.wait_durable(max(0.0, deadline - time.monotonic()))
            except WaitTimeoutError:
                self._warner.once(
                    "drain",
                    f"the checkpoint of step {checkpoint.step} is {checkpoint.state.name.lower()} "
                    f"after {limit_s:g} s; what is copied becomes durable without this process",
                )
                break
            except PccheckError as error:
                LOG.debug("%s", error)
        connection = self._session.current()
        if connection is not None:
            self._look_around()
            if self._unexplained:
                for checkpoint in self._unexplained:
                    _ = checkpoint.reason
                self._explain()
