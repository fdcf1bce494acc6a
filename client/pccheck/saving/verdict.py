"""Notices tensors that were changed while a snapshot still read them, although no gate was passed.

torch counts the in-place changes of every tensor (`_version`). The counts are taken in
`checkpoint()`, before anything is read, and compared when everything was read, or when a gate holds
further changes back. The last chunk of the snapshot waits for that verdict (`Link.confirm`), so
that the daemon never vouches for a snapshot with tensors of two steps.

torch counts a change when its operation has ended. So equal counts prove something only where the
thread that trains is in no such operation: in a gate, or in another call of this client. For a
trainer that makes none for a while (a long step, an idle notebook) a thread compares, too: when
everything was read, and again some time later, longer than an operation takes that began before.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable

from pccheck.daemon.transport import Connection
from pccheck.state.changes import Moved, Reading
from pccheck_wire.messages import CheckpointState

from .in_flight import InFlight

_FOREVER_NS = 2**63 - 1
_IDLE_S = 10.0
#: One operation that changes tensors in place ends within that much time, and that much more for
#: the state's bytes, on a busy machine, too.
_OPERATION_S, _OPERATION_BYTES_PER_S = 0.5, 512e6
#: At most so long: meanwhile a chunk of the daemon's memory is held, which it may want back.
_LATE_LIMIT_S = 20.0
_TICK_S = 0.05


_NOTHING = Reading([], lambda _: None)


class Verdict:
    """On one snapshot, once: whether its tensors were left alone until they were read. Any thread,
    but see the top of this file."""

    def __init__(
        self,
        checkpoint: InFlight,
        connection: Connection,
        reading: Reading,
        on_moved: Callable[[InFlight, Moved], None],
    ) -> None:
        self.checkpoint = checkpoint
        self.given = threading.Event()
        self._link = connection.link
        self._reading = reading
        self._on_moved = on_moved
        self._thread = threading.get_ident()
        self._lock = threading.RLock()  # a signal handler may close the client in the middle

    def give(self) -> None:
        """Everything was read, or changes are held back from now on; and no operation that changes
        tensors is going on."""
        with self._lock:
            if self.given.is_set():
                return
            reading = self._reading
            moved = reading.moved()
            with contextlib.suppress(ValueError, OSError):  # closed
                if moved is None:
                    self._link.confirm(self.checkpoint.snapshot)
                elif self._link.abandon(self.checkpoint.snapshot):
                    reading.on_moved(moved)
                    self._failed(moved)
            self._reading = _NOTHING  # a handle that is kept keeps no tensors
            # Before the caller goes on: what it changes then is none of this snapshot's business.
            self.given.set()

    def _failed(self, moved: Moved) -> None:
        self.checkpoint.end(
            CheckpointState.FAILED,
            f"abandoned: {moved.path} was changed before it was read, and gate() was not called "
            "before the change",
            told=True,
        )
        self._on_moved(self.checkpoint, moved)

    def ask(self) -> None:
        """In a call of the client: gives the verdict if that can be done now."""
        if threading.get_ident() == self._thread and not self.given.is_set() and self._was_read():
            self.give()

    def wait(self, deadline_ns: int) -> None:
        """The same, and waits until it can be given. For the thread that trains: it changes nothing
        meanwhile."""
        if threading.get_ident() == self._thread and not self.given.is_set():
            with contextlib.suppress(ValueError, OSError):
                self._link.wait_read(self.checkpoint.snapshot, deadline_ns)
            self.ask()

    def give_late(self, nbytes: int) -> None:
        """In a thread of its own, for a trainer that does not call."""
        with contextlib.suppress(ValueError, OSError):
            if not self._link.wait_read(self.checkpoint.snapshot, _FOREVER_NS):
                return
            limit_s = min(_LATE_LIMIT_S, _OPERATION_S + nbytes / _OPERATION_BYTES_PER_S)
            # In many short waits: while the process is stopped no operation goes on, either.
            for _ in range(int(limit_s / _TICK_S)):
                if self._reading.moved() is not None or self.given.wait(_TICK_S):
                    break
            self.give()

    def _was_read(self) -> bool:
        try:
            now = self._link.state(self.checkpoint.snapshot)
        except (ValueError, OSError):
            return True
        return now is None or now.source_read


class LateVerdicts:
    """A thread that gives verdicts when nobody else has, oldest first. It sleeps nearly always, and
    ends when there is nothing to do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[tuple[Verdict, int]] = queue.SimpleQueue()
        self._runs = False

    def add(self, verdict: Verdict, nbytes: int) -> None:
        """A verdict that is due when the tensors, of so many bytes, were read."""
        with self._lock:
            self._waiting.put((verdict, nbytes))
            if self._runs:
                return
            self._runs = True
        try:
            threading.Thread(target=self._run, name="pccheck-verdicts", daemon=True).start()
        except RuntimeError:  # no more threads: the gate, and calls of the client, do it
            self._runs = False

    def _run(self) -> None:
        while True:
            try:
                verdict, nbytes = self._waiting.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._waiting.empty():
                        self._runs = False
                        return
                continue
            verdict.give_late(nbytes)
            del verdict
