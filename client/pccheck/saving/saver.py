"""Hands snapshots over to the native client and the daemon, and notes how each of them ends."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable

from pccheck.daemon.connection import Connection
from pccheck.daemon.session import Session
from pccheck.flight.in_flight import FINAL, NOT_SAVED, InFlight
from pccheck.flight.phases import SAFE, SHOWN, Durable, Phase
from pccheck.flight.verdict import LateVerdicts, Verdict, fail_moved
from pccheck.flight.waiting import wait_copied, wait_durable, wait_read
from pccheck.job.steps import Steps
from pccheck.options import Options
from pccheck.state import devices
from pccheck.state.changes import Moved, Reading
from pccheck.state.plan import Snapshot
from pccheck.warn import Warner
from pccheck_native import LEVEL_DEVICE, LEVEL_DISK, SNAPSHOTS, NativeError
from pccheck_wire.ends import Cause, Why, in_words
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
from .failures import Failures, why_moved
from .followed import Followed
from .gate import Breaker, Gate, abandon
from .levels import Levels


class Saver:
    """Submits snapshots, watches them, holds the gate. Used by the training thread."""

    def __init__(
        self, session: Session, warner: Warner, options: Options, on_moved: Callable[[Moved], None]
    ) -> None:
        """`on_moved` learns of tensors that were changed while they were read, in any thread."""
        self._session, self._warner, self._options = session, warner, options
        self._stall_limit_s = options.stall_limit_s
        self._gate = Gate(options.stall_limit_s, self._expired)
        self._breaker = Breaker(options.stall_limit_s)
        self._exposure: Exposure | None = None  # of the connection, once it has a GPU's tensors
        self._late = LateVerdicts()
        self._on_moved = on_moved
        self.levels = Levels(options, warner)
        self.failures = Failures(warner, raises=options.raises)
        self.followed = Followed(self.failures, skips=options.on_busy == "skip")

    def gate(self, *, on_cpu: bool = False) -> None:
        """Returns when the tensors may be changed; see Gate.wait."""
        self._gate.wait(on_cpu=on_cpu)
        self.failures.report_moved()

    def capturing(self) -> bool:
        """Whether this thread records a CUDA graph."""
        return devices.capturing() or (self._exposure is not None and self._exposure.capturing())

    def make_way(self) -> None:
        """Disconnects if a snapshot of this process is about to be taken, unless something is
        being copied; then the next call does."""
        connection = self._session.current()
        if connection is None or not connection.has_to_make_way():
            return
        going = (save for save in self.followed.going() if not save.on_device)
        if any(save.state < CheckpointState.COPIED for save in going):
            return
        known = self.followed.known()
        self.leave()
        self._session.make_way(known.sequence if known is not None else None)

    def ready(self) -> Connection:
        """The connection to use for a checkpoint. Raises CheckpointFailedError or the cause."""
        self.make_way()
        connection = self._session.current()
        if connection is None:
            self.leave()
            connection = self._session.reconnect()
        if connection is None:
            raise self._session.error or DaemonUnreachableError("no daemon is connected")
        connection.pump()
        self.followed.find_out(connection)
        self._collect()
        self.failures.raise_next()
        if not self._breaker.closed():
            raise CheckpointFailedError(
                "the daemon made no progress since it missed stall_limit_s="
                f"{self._stall_limit_s:g} s",
                hint="see: pccheckctl status",
            )
        return connection

    def submit(
        self, connection: Connection, step: int, snapshot: Snapshot, steps: Steps, interval: int,
        level: int,
    ) -> InFlight:  # fmt: skip
        """Hands the snapshot over. Returns when it is "copied" or its source is "read", as its
        `wait` asks, or when that failed; without `wait` at once, and the gate holds the next update
        back. Raises NoStagingError before anything has begun."""
        wait = snapshot.wait
        handover = self._prepare(connection, snapshot)
        state_bytes = self._session.state_bytes(connection.native.chunk_bytes)
        level = self.levels.fitting(level, state_bytes, self._session.room_bytes)
        on_device, in_memory = level == LEVEL_DEVICE, level != LEVEL_DISK
        if on_device:
            pulls = bool(handover and handover.map)
            self.levels.require_device(on_gpu=snapshot.device is not None, pulls=pulls, wait=wait)
        steps.of_start(self._session.incarnation)
        number = next(connection.snapshots)
        self._free_entry(number)
        checkpoint = InFlight(step, connection, number)
        checkpoint.in_memory, checkpoint.on_device = in_memory, on_device
        connection.steps.pop(number - SNAPSHOTS, None)
        connection.steps[number] = step
        held_at_ns, held_ns = self._gate.held.take()
        try:
            connection.native.request(number)
            if handover is not None:
                handover.enqueue(connection.native, number)
            connection.native.submit(
                number, snapshot.ranges, snapshot.volatile, snapshot.tree, snapshot.tree_offset,
                *(handover.sources() if handover else ()),
                step=step, skip=on_device or self._options.on_busy == "skip",
                map=handover.map if handover else 0,
                frozen_bytes=0 if in_memory else snapshot.worth_a_base, level=level,
                held_at_ns=held_at_ns, held_ns=held_ns,
                base=steps.base, turn=steps.base_turn, descents=steps.descents, row=steps.row,
                interval=interval, division=snapshot.division,
                # One on the device has to be whole at any moment: nobody confirms it after a death.
                provisional=snapshot.reading is not None and not on_device,
                offered_bytes=0 if in_memory else snapshot.offered,
            )  # fmt: skip
            if snapshot.copying is not None and (moved := snapshot.copying.moved()):
                fail_moved(checkpoint, moved)
            checkpoint.pulled = bool(handover and handover.map)
            self._keep(checkpoint, snapshot)
            if wait:
                self._wait(checkpoint, wait)
        except BaseException as error:  # Ctrl-C at any place: nothing would hold the update back
            counted = isinstance(error, Exception)  # by the caller
            why = in_words(f"abandoned: {error}") if counted else Why(Cause.INTERRUPTED)
            abandon(checkpoint, why)
            if counted:
                self.followed.drop(checkpoint)
            if isinstance(error, NativeError):
                raise DeviceError(f"cannot start the copy from the GPU: {error}") from error
            if isinstance(error, OSError) and error.errno == errno.EBUSY:
                raise _too_many() from error  # a GPU still copies what had the entry before
            if isinstance(error, OSError) and error.errno == errno.EFAULT:
                raise _lost(checkpoint, snapshot) from error
            raise
        return checkpoint

    def _keep(self, checkpoint: InFlight, snapshot: Snapshot) -> None:
        """From now on its end is noted, and without `wait` the gate holds updates back."""
        self.followed.add(checkpoint)
        waits = bool(snapshot.wait)
        if snapshot.reading is not None:
            on_moved = None if waits else self._note_moved
            checkpoint.verdict = Verdict(checkpoint, snapshot.reading, on_moved)
        if waits:
            return
        if checkpoint.verdict is not None:
            self._late.add(checkpoint.verdict, snapshot.payload_bytes)
        host = bool(snapshot.ranges)
        self._gate.add(checkpoint, snapshot.owners, host=host, part=snapshot.device)

    def _note_moved(self, step: int, moved: Moved) -> None:
        """Any thread."""
        self._on_moved(moved)
        self.failures.moved(step, moved)

    @property
    def pushed(self) -> frozenset[int]:
        """See `Shape.pushed`."""
        return self._exposure.pushed if self._exposure is not None else frozenset()

    @property
    def replica(self) -> bool:
        """See `Shape.replica`."""
        exposes = self._exposure is None or self._exposure.exposes_replica
        return self.levels.uses_device and exposes

    def exposes(self, connection: Connection) -> bool:
        """Whether the daemon was already asked to map the GPU memory, or refused to."""
        return self._exposure is not None and self._exposure.connection is connection

    def expose(self, connection: Connection, snapshot: Snapshot) -> Handover | None:
        """Makes the daemon map the GPU memory now. Raises PccheckError."""
        if snapshot.device is None:
            return None
        if self._exposure is None or self._exposure.connection is not connection:
            self._exposure = Exposure(connection, self._options.transfer, self._stall_limit_s)
        queued = any(  # for a slot
            save.pulled and phase is Phase.REQUESTED for save, phase in self.followed.look()
        )
        return self._exposure.prepare(snapshot.device, queued=queued)

    def _prepare(self, connection: Connection, snapshot: Snapshot) -> Handover | None:
        """Prepares GPUs, then the daemon, which pins the chunks that it allocates after that."""
        try:
            handover = self.expose(connection, snapshot)
            self._session.register(connection, snapshot.payload_bytes, self.levels.used)
        except WaitTimeoutError:
            self._trip(connection)
            raise
        except CheckpointFailedError as error:  # the daemon cannot save; it is not only busy
            raise RefusedError(error.message, hint=error.hint) from error
        if snapshot.device is not None and snapshot.device.staging_bytes:
            self._gate.free_staging(snapshot.device, skip=self._options.on_busy == "skip")
        return handover

    def _wait(self, checkpoint: InFlight, what: str) -> None:
        since_ns = time.monotonic_ns()
        wait = wait_copied if what == "copied" else wait_read
        try:
            while not checkpoint.native.reached(checkpoint.snapshot):  # that is no stall
                with contextlib.suppress(WaitTimeoutError):
                    wait(checkpoint, self._stall_limit_s)
                    break
            wait(checkpoint, self._stall_limit_s)
        except WaitTimeoutError:
            if abandon(checkpoint, Why(Cause.OVERDUE, self._stall_limit_s)):
                self._expired(checkpoint)
        except CheckpointFailedError:
            pass  # the handle has the reason, and `_collect` reports it
        finally:
            self._gate.held.add(since_ns)

    def _free_entry(self, number: int) -> None:
        """Frees the entry in the page that the snapshot SNAPSHOTS before had."""
        before = self.followed.before(number)
        if before is None:
            return
        if before.state not in FINAL:
            try:
                wait_durable(before, 0 if self._options.on_busy == "skip" else self._stall_limit_s)
            except CheckpointFailedError:
                pass  # its own handle has the reason
            except WaitTimeoutError as error:
                raise _too_many() from error
        self.followed.release(before)

    def _expired(self, checkpoint: InFlight) -> None:
        self._warner.once(
            "stall",
            f"checkpoint of step {checkpoint.step} failed: the daemon did not copy it within "
            f"stall_limit_s={self._stall_limit_s:g} s. Training continues; checkpoints are skipped "
            "until the daemon makes progress (see: pccheckctl status)",
        )
        if checkpoint.connection is not None:
            self._trip(checkpoint.connection)

    def _trip(self, connection: Connection) -> None:
        self._breaker.trip(connection, self.followed.going())

    def _collect(self) -> None:
        """Notes how far saves have come, and reports those that failed, here or on other ranks."""
        seen = self.followed.look()
        self.failures.report_moved()
        self._gate.collect()  # comes second: what was let go by then has its reason now
        if self._gate.idle and self._exposure is not None:
            self._exposure.trim()
        for save, phase in seen:
            self._note(save, save.phase if phase is Phase.LET_GO else phase)

    def _note(self, save: InFlight, phase: Phase, *, told: bool = False) -> None:
        before = self.followed.note(save, phase, told=told)
        if phase is not before and SHOWN[phase] >= CheckpointState.COPIED:
            if SHOWN[phase] not in NOT_SAVED:
                self._breaker.copied()
            elif save.pulled and phase is Phase.REFUSED and self._exposure is not None:
                self._exposure.broke(save.why)
        if phase in SAFE:
            self._warner.over("stall")

    def raised(self, save: InFlight) -> None:
        """checkpoint() itself raises why it failed, and no later call does so again."""
        self._note(save, save.phase, told=True)
        self.followed.drop(save)

    def leave(self) -> None:
        """Call it when the connection has ended or is about to be closed."""
        self.followed.release_all()
        self._collect()
        self.followed.forget()
        self._gate.release()
        self._exposure = None
        self._breaker.reset()

    def end(self) -> None:
        """`leave`, for good."""
        self._late.end()
        self.leave()

    def flush(self, limit_s: float, *, everywhere: bool = True) -> Durable | None:
        """Waits until the newest checkpoint is durable, or with `everywhere` on all ranks; when it
        fails, the one before. Returns what a restart of the job gets, as far as is known."""
        self.followed.wait_saved(limit_s, everywhere=everywhere)
        if self._session.current() is not None:
            self._collect()
        return self.followed.newest

    def drain(self, limit_s: float) -> bool:
        """Waits until everything in flight is durable, superseded or has failed. Returns whether
        all of it has, and the daemon has to look for nothing with other ranks. What is copied is
        then the daemon's, and has not failed."""
        self.failures.end()
        self.flush(limit_s, everywhere=False)
        late = self.followed.going()
        copied = [save for save in late if save.state >= CheckpointState.COPIED]
        self._gate.give_up()
        self._warn_of_late([save for save in late if save not in copied], copied)
        for save in copied:
            save.hand_over()
        if self._session.current() is not None:
            self.followed.explain_all()
        return not (late or self.followed.has_broken())

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


def _too_many() -> CheckpointFailedError:
    return CheckpointFailedError(
        f"{SNAPSHOTS} checkpoints are in flight, and no more fit",
        hint="save less often, or see what delays the oldest one: pccheckctl status",
    )


def _lost(checkpoint: InFlight, snapshot: Snapshot) -> PccheckError:
    """Why memory that is copied at once could not be read."""
    now = checkpoint.entry()
    at_once = snapshot.copying or Reading(())
    return PccheckError(why_moved(at_once.lost(now.fault if now is not None else 0)))
