"""Hands snapshots over to the native link and the daemon, and notes how each of them ends."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable
from operator import attrgetter

from pccheck.daemon.connection import Connection
from pccheck.daemon.session import Session
from pccheck.job.steps import Steps
from pccheck.options import Options
from pccheck.state import devices
from pccheck.state.changes import LOST, Moved, Reading
from pccheck.state.plan import Snapshot
from pccheck.warn import Warner
from pccheck_native import SNAPSHOTS, NativeError
from pccheck_wire.errors import (
    CheckpointFailedError,
    DaemonUnreachableError,
    DeviceError,
    PccheckError,
    RefusedError,
    WaitTimeoutError,
)
from pccheck_wire.messages import CheckpointState

from .exposure import Exposure, Handover
from .failures import INTERRUPTED, REPORTED, Failures
from .gate import Breaker, Gate, abandon, overdue
from .in_flight import FINAL, NOT_SAVED, Durable, InFlight, entry_of
from .verdict import LateVerdicts, Verdict, fail_moved

_NUMBER = attrgetter("snapshot")


class Saver:
    """Submits snapshots, watches them, holds the gate. Used by the training thread."""

    def __init__(
        self,
        session: Session,
        warner: Warner,
        options: Options,
        on_moved: Callable[[Moved], None],
    ) -> None:
        """`on_moved` learns of tensors that were changed while they were read, in any thread."""
        self._session = session
        self._warner = warner
        self._options = options
        self._raises = options.raises
        self._ends = False  # close() was called
        self._stall_limit_s = options.stall_limit_s
        self._gate = Gate(options.stall_limit_s, self._expired)
        self._breaker = Breaker(options.stall_limit_s)
        self._exposure: Exposure | None = None  # of the connection, once it has a GPU's tensors
        self._unfinished: list[InFlight] = []
        self._recent: dict[int, InFlight] = {}  # by entry of the page
        self._unexplained: list[InFlight] = []
        self._local: list[InFlight] = []  # durable here, and not known to be on all ranks
        self._unknown: list[InFlight] = []  # copied when their daemon ended
        self._newest: Durable | None = None  # what a restart of the job gets, as far as is known
        self._to_raise: list[CheckpointFailedError] = []
        self._late = LateVerdicts()
        self._on_moved = on_moved
        self.failures = Failures(warner)
        self._moved: list[tuple[int, Moved]] = []  # not reported yet

    def gate(self, *, on_cpu: bool = False) -> None:
        """Returns when the tensors may be changed; see Gate.wait."""
        self._gate.wait(on_cpu=on_cpu)
        self._report_moved()

    def capturing(self) -> bool:
        """Whether this thread records a CUDA graph."""
        return devices.capturing() or (self._exposure is not None and self._exposure.capturing())

    def ready(self) -> Connection:
        """The connection to use for a checkpoint. Raises CheckpointFailedError or the cause."""
        connection = self._session.current()
        if connection is None:
            self.leave()
            connection = self._session.reconnect()
        if connection is None:
            raise self._session.error or DaemonUnreachableError("no daemon is connected")
        connection.pump()
        self._find_out(connection)
        self._collect_ended()
        if self._to_raise:
            raise self._to_raise.pop(0)
        if not self._breaker.closed():
            raise CheckpointFailedError(
                "the daemon made no progress since it missed stall_limit_s="
                f"{self._stall_limit_s:g} s",
                hint="see: pccheckctl status",
            )
        return connection

    def submit(
        self, connection: Connection, step: int, snapshot: Snapshot, steps: Steps, interval: int
    ) -> InFlight:
        """Hands the snapshot over. Returns when it is "copied" or its source is "read", as its
        `wait` asks, or when that failed; without `wait` at once, and the gate holds the next update
        back. Raises NoStagingError before anything has begun."""
        wait = snapshot.wait
        handover = self._prepare(connection, snapshot)
        steps.of_start(self._session.incarnation)
        number = next(connection.snapshots)
        self._free_entry(number)
        checkpoint = InFlight(step, connection, number)
        connection.steps.pop(number - SNAPSHOTS, None)
        connection.steps[number] = step
        held_at_ns, held_ns = self._gate.held.take()
        try:
            _request(connection, number)
            if handover is not None:
                handover.enqueue(connection.link, number)
            connection.link.submit(
                number, *_sources(snapshot, handover, inline=not wait),
                step=step, skip=self._options.on_busy == "skip",
                map=handover.map if handover else 0, frozen_bytes=snapshot.worth_a_base,
                held_at_ns=held_at_ns, held_ns=held_ns,
                base=steps.base, turn=steps.base_turn, descents=steps.descents, row=steps.row,
                interval=interval, division=snapshot.division,
                provisional=snapshot.reading is not None, offered_bytes=snapshot.offered,
            )  # fmt: skip
            if snapshot.copying is not None and (moved := snapshot.copying.moved()):
                fail_moved(checkpoint, connection, moved)
            self._keep(checkpoint, connection, snapshot, handover)
            if wait:
                self._wait(checkpoint, connection, wait)
        except BaseException as error:  # Ctrl-C at any place: nothing would hold the update back
            counted = isinstance(error, Exception)  # by the caller
            abandon(checkpoint, connection, f"abandoned: {error}" if counted else INTERRUPTED)
            if counted and checkpoint in self._unfinished:
                self._unfinished.remove(checkpoint)
            if isinstance(error, NativeError):
                raise DeviceError(f"cannot start the copy from the GPU: {error}") from error
            if isinstance(error, OSError) and error.errno == errno.EFAULT:
                raise _lost(connection, number, snapshot) from error
            raise
        return checkpoint

    def _keep(
        self,
        checkpoint: InFlight,
        connection: Connection,
        snapshot: Snapshot,
        handover: Handover | None,
    ) -> None:
        """From now on its end is noted, and without `wait` the gate holds updates back."""
        self._recent[checkpoint.snapshot % SNAPSHOTS] = checkpoint
        self._unfinished.append(checkpoint)
        checkpoint.pulled = bool(handover and handover.map)
        waits = bool(snapshot.wait)
        if snapshot.reading is not None:
            on_moved = None if waits else self._note_moved
            checkpoint.verdict = Verdict(checkpoint, connection, snapshot.reading, on_moved)
        if waits:
            return
        if checkpoint.verdict is not None:
            self._late.add(checkpoint.verdict, snapshot.payload_bytes)
        host = bool(snapshot.ranges)
        self._gate.add(checkpoint, connection, snapshot.owners, host=host, part=snapshot.device)

    def _note_moved(self, step: int, moved: Moved) -> None:
        """Any thread."""
        self._on_moved(moved)
        self._moved.append((step, moved))

    def expose(self, connection: Connection, snapshot: Snapshot) -> Handover | None:
        """Makes the daemon map the GPU memory now. Raises PccheckError."""
        if snapshot.device is None:
            return None
        if self._exposure is None or self._exposure.connection is not connection:
            self._exposure = Exposure(connection, self._options.transfer, self._stall_limit_s)
        queued = any(  # for a slot
            item.pulled and item.state is CheckpointState.REQUESTED for item in self._unfinished
        )
        return self._exposure.prepare(snapshot.device, queued=queued)

    def _prepare(self, connection: Connection, snapshot: Snapshot) -> Handover | None:
        """Prepares GPUs and daemon. Memory is mapped first: the daemon then allocates its own near
        the GPU."""
        try:
            handover = self.expose(connection, snapshot)
            self._session.register(connection, snapshot.payload_bytes)
        except WaitTimeoutError:
            self._trip(connection, 0)
            raise
        except CheckpointFailedError as error:  # the daemon cannot save; it is not only busy
            raise RefusedError(error.message, hint=error.hint) from error
        if snapshot.device is not None and snapshot.device.staging_bytes:
            self._gate.free_staging(snapshot.device, skip=self._options.on_busy == "skip")
        return handover

    def _wait(self, checkpoint: InFlight, connection: Connection, what: str) -> None:
        since_ns = time.monotonic_ns()
        wait = checkpoint.wait_copied if what == "copied" else checkpoint.wait_read
        try:
            while not connection.link.reached(checkpoint.snapshot):  # that is no stall
                with contextlib.suppress(WaitTimeoutError):
                    wait(self._stall_limit_s)
                    break
            wait(self._stall_limit_s)
        except WaitTimeoutError:
            if abandon(checkpoint, connection, overdue(self._stall_limit_s)):
                self._expired(checkpoint, connection)
        except CheckpointFailedError:
            pass  # the handle has the reason, and `_collect_ended` reports it
        finally:
            self._gate.held.add(since_ns)

    def _free_entry(self, number: int) -> None:
        """Frees the entry in the page that the snapshot SNAPSHOTS before had."""
        before = self._recent.get(number % SNAPSHOTS)
        if before is None:
            return
        if before.state not in FINAL:
            if self._options.on_busy == "skip":
                raise _too_many()
            try:
                before.wait_durable(self._stall_limit_s)
            except CheckpointFailedError:
                pass  # its own handle has the reason
            except WaitTimeoutError as error:
                raise _too_many() from error
        self.note_saved(before.saved(0, everywhere=True))
        before.settle()
        del self._recent[number % SNAPSHOTS]

    def _expired(self, checkpoint: InFlight, connection: Connection) -> None:
        self._warner.once(
            "stall",
            f"checkpoint of step {checkpoint.step} failed: the daemon did not copy it within "
            f"stall_limit_s={self._stall_limit_s:g} s. Training continues; checkpoints are skipped "
            "until the daemon makes progress (see: pccheckctl status)",
        )
        self._trip(connection, checkpoint.snapshot)

    def _trip(self, connection: Connection, snapshot: int) -> None:
        in_flight = [item for item in self._unfinished if item.state not in FINAL]
        self._breaker.trip(connection, in_flight, snapshot)

    def _collect_ended(self) -> None:
        """Notes checkpoints that ended, and reports the first that failed, was skipped, or will not
        be durable on all ranks."""
        states = [(item, item.state) for item in self._unfinished]
        self._report_moved()
        self._gate.collect()  # after the states: what was abandoned by then has its reason now
        if self._gate.idle and self._exposure is not None:
            self._exposure.trim()
        for checkpoint, state in states:
            copied = state >= CheckpointState.COPIED and state not in NOT_SAVED
            if copied:
                self._breaker.copied()
            if checkpoint.pulled and (copied or checkpoint.copy_broke):
                checkpoint.pulled = False
                if not copied and self._exposure is not None:
                    self._exposure.broke()
            if state in FINAL:
                self._unfinished.remove(checkpoint)
                self._ended(checkpoint, state)
        given_up = [one for one in self._local if one.given_up]
        self._unexplained += given_up
        self._local = [one for one in self._local if one not in given_up and one.may_become_global]
        self._explain()

    def _find_out(self, connection: Connection) -> None:
        """What became of checkpoints that an earlier daemon had copied."""
        self._unknown = [checkpoint for checkpoint in self._unknown if checkpoint.is_unknown]
        for checkpoint in self._unknown:
            checkpoint.find_out(connection)

    def restored(self, restored: Durable, newest: Durable | None) -> None:
        """Training continues from that checkpoint, which is named if it was reported as failed.
        `newest`: what a restart gets."""
        self.note_saved(newest)
        self.failures.durable(restored.step, time.monotonic_ns())
        for checkpoint in (*self._unknown, *self._recent.values()):
            if checkpoint.is_unknown and checkpoint.sequence == restored.sequence:
                checkpoint.found_durable()

    def _ended(self, checkpoint: InFlight, state: CheckpointState) -> None:
        if state in (CheckpointState.DURABLE, CheckpointState.GLOBAL):
            self.failures.durable(checkpoint.step, checkpoint.requested_ns)
            self._warner.over("stall")
            self._local.append(checkpoint)
        elif state is CheckpointState.FAILED or (
            state is CheckpointState.SKIPPED and self._options.on_busy != "skip"
        ):
            self.failures.failed(checkpoint)
            checkpoint.describe_later()
            self._unexplained.append(checkpoint)
        elif state is CheckpointState.SUPERSEDED:
            checkpoint.describe_later()  # by which one: nobody can ask a daemon that has ended

    def _explain(self) -> None:
        """Reports failures whose reason has arrived; the user knows what was abandoned."""
        for checkpoint in list(self._unexplained):
            reason = checkpoint.known_reason
            if reason is None:
                checkpoint.describe_later()
            else:
                self._unexplained.remove(checkpoint)
                state = checkpoint.state
                if state in REPORTED and not checkpoint.reported:  # not superseded meanwhile
                    self._failed_later(checkpoint.step, reason, state)

    def _failed_later(self, step: int, reason: str, state: CheckpointState) -> None:
        """One failed or was skipped after `checkpoint()` had returned: the next call raises or
        warns. It only warns of what is durable on this rank alone."""
        if self._ends and self.failures.count:
            return  # close() warns of all of them
        if self._raises and state is not CheckpointState.DURABLE:
            self._to_raise.append(
                CheckpointFailedError(f"checkpoint of step {step} {REPORTED[state]}: {reason}")
            )
        else:
            self.failures.report(step, reason, state)

    def _report_moved(self) -> None:
        """Reports tensors that were changed while they were read. Training thread only."""
        while self._moved:
            step, moved = self._moved.pop(0)
            text = f"checkpoint of step {step} failed: {_cause(moved)}"
            if self._raises:
                self._to_raise.append(CheckpointFailedError(text))
            else:
                self._warner.once("lost" if moved.what == LOST else "moved", text)

    def leave(self) -> None:
        """Call it when the connection has ended or is about to be closed."""
        for checkpoint in self._recent.values():
            self.note_saved(checkpoint.saved(0, everywhere=True))
            checkpoint.settle()
        lost = (*self._unknown, *self._recent.values())
        self._unknown = [checkpoint for checkpoint in lost if checkpoint.is_unknown][-SNAPSHOTS:]
        self._collect_ended()
        self._recent.clear()
        self._unfinished.clear()
        self._gate.release()
        self._exposure = None
        self._breaker.reset()

    def end(self) -> None:
        """`leave`, for good."""
        self._late.end()
        self.leave()

    def note_saved(self, saved: Durable | None) -> None:
        """It is durable on all ranks; `flush` returns the newest one."""
        if saved is not None and (self._newest is None or saved.sequence > self._newest.sequence):
            self._newest = saved

    def known(self) -> Durable | None:
        """What `flush` returns when nothing else becomes durable. Changes nothing, and may come in
        the middle of every other call."""
        saved = [one.saved(0, everywhere=True) for one in list(self._recent.values())]
        return max((one for one in (self._newest, *saved) if one is not None), default=None)

    def flush(self, limit_s: float, *, everywhere: bool = True) -> Durable | None:
        """Waits until the newest checkpoint is durable, or with `everywhere` on all ranks; when it
        fails, the one before. Returns what a restart of the job gets, as far as is known."""
        deadline = time.monotonic() + limit_s
        found = None
        for checkpoint in sorted(self._recent.values(), key=_NUMBER, reverse=True):
            # Older ones end by themselves when a newer one is durable.
            left_s = max(0.0, deadline - time.monotonic())
            saved = checkpoint.saved(left_s, everywhere=everywhere and not found)
            found = found or saved
            self.note_saved(checkpoint.saved(0, everywhere=True))
        if self._session.current() is not None:
            self._collect_ended()
        return self._newest

    def drain(self, limit_s: float) -> bool:
        """Waits until everything in flight is durable, superseded or has failed. Returns whether
        all of it has. What is copied is then the daemon's, and has not failed."""
        self._raises, self._ends = False, True  # there is no next call to raise in
        self.flush(limit_s, everywhere=False)
        late = [item for item in self._unfinished if item.state not in FINAL]
        copied = [item for item in late if item.state >= CheckpointState.COPIED]
        self._gate.give_up()
        self._warn_of_late([item for item in late if item not in copied], copied)
        for item in copied:
            item.hand_over()
        if self._session.current() is not None:
            for checkpoint in (*self._unexplained, *self._recent.values()):
                _ = checkpoint.reason  # the last time that the daemon can be asked
            self._explain()
        return not late

    def _warn_of_late(self, lost: list[InFlight], copied: list[InFlight]) -> None:
        told = []
        if lost:
            told.append(
                f"checkpoint of step {lost[-1].step} is lost (state: {lost[-1].state}): close() "
                "stopped waiting (see: pccheckctl status)"
            )
        if copied:
            step = copied[-1].step
            told.append(
                f"checkpoint of step {step} is copied, and pccheckd is still writing it to the "
                "disk: close() stopped waiting, and this process may end. A restart can resume "
                f"from step {step} if pccheckd keeps running"
            )
        if told:
            self._warner.once("drain", ". ".join(told))


def _cause(moved: Moved) -> str:
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


def _too_many() -> CheckpointFailedError:
    return CheckpointFailedError(
        f"{SNAPSHOTS} checkpoints are in flight, and no more fit",
        hint="save less often, or see what delays the oldest one: pccheckctl status",
    )


def _lost(connection: Connection, number: int, snapshot: Snapshot) -> PccheckError:
    """Why memory that is copied at once could not be read."""
    now = entry_of(connection, number)
    at_once = snapshot.copying or Reading(())
    return PccheckError(_cause(at_once.lost(now.fault if now is not None else 0)))


def _request(connection: Connection, number: int) -> None:
    """Takes the snapshot's entry in the page. Raises CheckpointFailedError while a GPU still copies
    the ended snapshot that had it before."""
    try:
        connection.link.request(number)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise _too_many() from error
        raise


def _sources(
    snapshot: Snapshot, handover: Handover | None, *, inline: bool
) -> tuple[bytes, bytes, bytes, int, bytes, int, int]:
    """What Link.submit reads, up to `pulled_devices`. Without `inline` nothing changes before it
    was read, and volatile ranges need no copy of their own."""
    ranges, volatile = snapshot.ranges, snapshot.volatile
    if not inline:
        ranges, volatile = ranges + volatile, b""
    device_ranges, pulled_bytes, pulled_devices = b"", 0, 0
    if handover is not None and handover.map:
        pulled_bytes, pulled_devices = handover.part.nbytes, handover.part.mask
    elif handover is not None:
        device_ranges = handover.ranges
    return (
        ranges, volatile, snapshot.tree, snapshot.tree_offset, device_ranges,
        pulled_bytes, pulled_devices,
    )  # fmt: skip
