"""What holds the next update back until the copy has read the tensors, and for how long."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pccheck.daemon.connection import Connection
from pccheck.flight.in_flight import InFlight
from pccheck.flight.phases import Phase
from pccheck.state import devices
from pccheck.state.extents import DevicePart
from pccheck_native import NativeError
from pccheck_wire.ends import Cause, Why
from pccheck_wire.errors import CheckpointFailedError, PccheckError
from pccheck_wire.messages import CheckpointState, Describe

_BACKOFF_DOUBLINGS_MAX = 6
_LAST_COPIES_NS = 1_000_000_000


@dataclass(slots=True)
class _Pending:
    save: InFlight
    owners: list[object]  # keeps the memory that is being read
    host: bool  # host memory is read in the background
    part: DevicePart | None
    held: set[tuple[int, int]] = field(default_factory=set)  # (GPU, stream) that will wait
    freed: set[int] = field(default_factory=set)  # GPUs on which new staging will wait

    @property
    def devices(self) -> tuple[int, ...]:
        return self.part.devices if self.part else ()

    def give_verdict(self) -> None:
        """For the training thread, after it has waited."""
        if self.save.verdict is not None:
            self.save.verdict.give()

    def wait(self, deadline_ns: int, *, host_only: bool = False) -> bool:
        """On the CPU; False when the deadline passed."""
        what, snapshot = "host_read" if host_only else "read", self.save.snapshot
        if self.save.on_device and not host_only:
            self.save.want()  # no stream withdraws it before a change: it is copied after all
        try:
            return self.save.native.wait(snapshot, what, deadline_ns)
        except (ValueError, OSError):  # the daemon has ended: nothing is read any more
            return True

    def reached(self) -> bool:
        """Whether its streams have reached it; before that nothing could be read."""
        try:
            return self.part is None or self.save.native.reached(self.save.snapshot)
        except (ValueError, OSError):
            return True

    def hold(self, deadline_ns: int) -> bool:
        """Streams wait for the GPU tensors, the CPU for the rest. False: not in time."""
        try:
            for place in self.here() - self.held:
                if not self.save.native.hold(self.save.snapshot, *place, deadline_ns):
                    return False
                self.held.add(place)
        except (NativeError, OSError):  # the stream cannot be made to wait
            return self.wait(deadline_ns)
        except ValueError:  # closed
            return True
        if self.host and not self.wait(deadline_ns, host_only=True):
            return False
        self.host = False
        return True

    def free_staging(self, deadline_ns: int) -> bool:
        """New copies into its staging memory wait, on the GPU. False: not in time."""
        try:
            for device in self.staging - self.freed:
                if not self.save.native.hold(self.save.snapshot, device, None, deadline_ns):
                    return False
                self.freed.add(device)
        except (NativeError, OSError):
            return self.wait(deadline_ns)
        except ValueError:  # closed
            pass
        return True

    @property
    def staging(self) -> set[int]:
        """GPUs on which it was staged."""
        return set(self.part.staging_bytes) if self.part else set()

    def here(self) -> set[tuple[int, int]]:
        """The streams that this thread uses now, on the snapshot's GPUs."""
        return {(device, devices.current_stream(device)) for device in self.devices}


@dataclass(slots=True)
class HeldTime:
    """How long the gate held training back since the last `take`."""

    at_ns: int = 0  # when it did so first; 0: not at all
    ns: int = 0  # in all

    def add(self, since_ns: int) -> None:
        """It did, from then until now."""
        self.at_ns = self.at_ns or since_ns
        self.ns += time.monotonic_ns() - since_ns

    def take(self) -> tuple[int, int]:
        """Since when and for how long; then counts from zero."""
        taken = self.at_ns, self.ns
        self.at_ns = self.ns = 0
        return taken


class Gate:
    """Snapshots whose source is being read. Used by the training thread."""

    def __init__(self, stall_limit_s: float, on_expiry: Callable[[InFlight], None]) -> None:
        self._stall_limit_s = stall_limit_s
        self._on_expiry = on_expiry
        self._pending: list[_Pending] = []
        self.held = HeldTime()

    def add(
        self, checkpoint: InFlight, owners: list[object], *, host: bool, part: DevicePart | None
    ) -> None:
        self._pending.append(_Pending(checkpoint, owners, host, part))

    @property
    def idle(self) -> bool:
        return not self._pending

    def collect(self) -> None:
        """Releases memory that was read, and notes snapshots that the core's thread abandoned at
        their deadline while a stream waited for them."""
        for item in self._pending:
            if item.save.verdict is not None:
                item.save.verdict.give_if_read()
            if item.save.phase is Phase.LET_GO:
                overdue = item.save.why.cause == Cause.STREAM_OVERDUE
                if item.save.fail(item.save.why, reported=overdue) and overdue:
                    self._on_expiry(item.save)
        self._pending = [item for item in self._pending if not item.save.is_read()]

    def wait(self, *, on_cpu: bool = False) -> None:
        """Returns when every tensor may be changed by this thread and in the streams that it uses,
        after the stall limit in any case. For GPU tensors the streams wait, unless `on_cpu`.

        A snapshot that is not read at the limit is abandoned by compare-and-swap against the
        daemon: it either was copied in time or is never accepted.
        """
        if not self._pending:
            return
        since_ns = time.monotonic_ns()
        deadline_ns = since_ns + int(self._stall_limit_s * 1e9)
        waiting = list(self._pending)
        try:
            for item in waiting:  # a copy that is of no use ends at once
                if item.save.verdict is not None and not item.save.is_read():
                    item.save.verdict.fail_if_moved()
            while waiting:
                item = waiting[0]
                wait = item.hold if item.devices and not on_cpu else item.wait
                in_time, deadline_ns = self._wait(item, deadline_ns, wait)
                if not in_time:
                    self._expire(item)
                item.give_verdict()
                waiting.pop(0)
        except BaseException:  # Ctrl-C: nothing waits any more before the tensors change
            for item in waiting:
                abandon(item.save, Why(Cause.INTERRUPTED))
            raise
        finally:
            self.held.add(since_ns)
            self._pending = [one for one in self._pending if one.devices and not one.save.is_read()]

    def give_up(self) -> None:
        """Abandons what was not read yet, and waits for copies under way, which end soon then."""
        for item in self._pending:
            abandon(item.save, Why(Cause.RUN_ENDED))
        deadline_ns = time.monotonic_ns() + _LAST_COPIES_NS
        for item in self._pending:
            item.wait(deadline_ns)
        self._pending.clear()

    def free_staging(self, part: DevicePart, *, skip: bool) -> None:
        """Returns when copies into staging memory may be enqueued: while it is in use, they wait
        on the GPU.

        Raises CheckpointFailedError if it is in use and `skip`, and when they cannot be made to
        wait in time.
        """
        for item in self._pending:
            shared = item.staging & part.staging_bytes.keys()
            # A stream that waits for this part keeps the order; with staging aside for less.
            ordered = not part.all_staged and not (item.part and item.part.all_staged)
            if not shared or (ordered and item.here() <= item.held) or item.save.is_read():
                continue
            if skip:
                raise CheckpointFailedError("staging memory still holds the previous checkpoint")
            if not self._wait(item, self._deadline_ns(), item.free_staging)[0]:
                self._expire(item)
                raise CheckpointFailedError(
                    "staging memory still holds the previous checkpoint after stall_limit_s="
                    f"{self._stall_limit_s:g} s"
                )

    def _wait(
        self, item: _Pending, deadline_ns: int, wait: Callable[[int], bool]
    ) -> tuple[bool, int]:
        """Whether the wait ended in time, and the deadline of the next one. A GPU that is still
        busy with the work before the snapshot is no stall of the daemon."""
        while not item.reached():
            in_time = wait(deadline_ns)
            deadline_ns = self._deadline_ns()
            if in_time:
                return True, deadline_ns
        return wait(deadline_ns), deadline_ns

    def release(self) -> None:
        """Drops everything; only for a core that is closed or about to be."""
        for item in self._pending:
            item.give_verdict()  # else a thread would wait to do it
        self._pending.clear()

    def _expire(self, item: _Pending) -> None:
        if abandon(item.save, Why(Cause.OVERDUE, self._stall_limit_s)):
            self._on_expiry(item.save)

    def _deadline_ns(self) -> int:
        return time.monotonic_ns() + int(self._stall_limit_s * 1e9)


def abandon(checkpoint: InFlight, why: Why) -> bool:
    """True when the snapshot was abandoned; False when it was complete or refused just before."""
    try:
        won = checkpoint.native.abandon(checkpoint.snapshot)
    except (ValueError, OSError):
        return False
    if won:
        checkpoint.fail(why)
    return won


class Breaker:
    """After an expired deadline checkpoints are skipped until the daemon shows progress.

    Progress is an answer to a request, and a state change of a checkpoint that was in flight, if
    there was any. Each expiry without a copied checkpoint since the last one doubles the time for
    which checkpoints are skipped: a disk that is too slow does not cost every interval.
    """

    def __init__(self, stall_limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_limit_s = stall_limit_s
        self._clock = clock
        self._open = False
        self._trips = 0
        self._until = 0.0
        self._answered = False
        self._marks: list[tuple[InFlight, CheckpointState]] = []
        self._question: Connection | None = None
        self._asked_at = 0.0

    def trip(self, connection: Connection, in_flight: list[InFlight]) -> None:
        doublings = min(self._trips, _BACKOFF_DOUBLINGS_MAX)
        self._open = True
        self._trips += 1
        self._until = self._clock() + self._stall_limit_s * (2**doublings - 1)
        self._answered = False
        self._marks = [(item, item.state) for item in in_flight]
        self._question = connection
        self._ask()

    def _ask(self) -> None:
        if self._question is None:
            return
        self._asked_at = self._clock()
        try:
            self._question.ask(Describe(0), self._note_answer)  # is answered at once: there is none
        except PccheckError:
            self._answered = True  # a new connection is another daemon

    def _note_answer(self, _answer: object) -> None:
        self._answered = True

    def closed(self) -> bool:
        """Whether a checkpoint may be tried."""
        if self._open and not self._answered:
            if self._clock() >= self._asked_at + self._stall_limit_s:
                self._ask()  # the question or its answer was lost
            return False
        if self._open and self._clock() >= self._until:
            moved = [item.state is not before for item, before in self._marks]
            self._open = bool(moved) and not any(moved)
        return not self._open

    def copied(self) -> None:
        """A snapshot was copied: the next expiry counts as the first."""
        self._trips = 0

    def reset(self) -> None:
        """The connection is new: the stalls of the old one do not count."""
        self._open = False
        self._marks = []
        self._question = None
