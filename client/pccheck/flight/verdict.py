"""Detects tensors that were changed, freed or moved while a snapshot was read, without a gate.

torch counts the in-place changes of every tensor (`_version`). The counts are taken in
`checkpoint()`, before anything is read, and compared when everything was read, or when a gate holds
further changes back. The last chunk of the snapshot waits for that verdict (`Client.confirm`), so
that the daemon never accepts a snapshot with tensors of two steps. A call that waits for its copy
gives the verdict before it returns: another thread may change the tensors meanwhile. What the call
copies at once is compared directly after that.

torch counts a change when its operation has ended. So equal counts prove something only where the
training thread runs no such operation: in a gate, or in another call of this client. Memory may be
freed by any thread (a queue's feeder shares what is sent), so the addresses are compared when all
was read, also in a gate. For a trainer without a call for a while (an idle notebook) a thread
compares, too: when everything was read, and again after more time than an earlier operation could
still take.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import TypeAlias

from pccheck.state.changes import LOST, Moved, Reading
from pccheck_wire.ends import in_words

from .in_flight import InFlight
from .phases import OTHER_BYTES, UNREADABLE
from .waiting import FOREVER_NS

#: An operation that changes tensors in place ends within this time, plus the time for the state's
#: bytes at this rate, on a busy machine, too.
_OPERATION_S, _OPERATION_BYTES_PER_S = 0.5, 512e6
#: The upper limit: meanwhile a chunk of the daemon's memory stays in use.
_LATE_LIMIT_S = 20.0
_TICK_S = 0.05
_OnMoved: TypeAlias = Callable[[int, Moved], None]  # with the step

_UNGATED = "without a call of gate() before the change"
_ELSEWHERE = (
    "before checkpoint() returned, so by another thread or a signal handler. Call checkpoint() in "
    "the thread that changes the state, between two changes; or hold a lock around checkpoint() "
    "that every other thread holds for its changes"
)


def fail_moved(
    save: InFlight, moved: Moved, on_moved: _OnMoved | None = None, *, faulted: bool = False
) -> None:
    """Abandons it, unless it has ended, and calls `on_moved`, which reports that. Without
    `on_moved` the change came while `checkpoint()` ran. `faulted`: the core or the daemon has
    given it up. Raises ValueError and OSError for a core that is closed."""
    if not (faulted or save.native.abandon(save.snapshot)):
        return
    if on_moved is not None:
        on_moved(save.step, moved)
    how = _ELSEWHERE if on_moved is None else _UNGATED
    what = moved.what if moved.what == LOST else f"{moved.what} while it was copied, {how}"
    save.fail(in_words(f"abandoned: {moved.path} {what}"), reported=on_moved is not None)


class Verdict:
    """Whether the tensors of one snapshot were left alone until they were read. Given once, by any
    thread within the rules at the top of this file."""

    def __init__(self, save: InFlight, reading: Reading, on_moved: _OnMoved | None) -> None:
        """`on_moved` learns of a change; None when `checkpoint()` itself gives the verdict."""
        self.given = False
        self._save = save
        self._reading = reading
        self._on_moved = on_moved
        self._thread = threading.get_ident()
        self._lock = threading.RLock()  # a signal handler may close the client in the middle

    def give(self) -> None:
        """Call it when everything was read, and no operation that changes tensors runs."""
        with self._lock:
            if self.given or self.fail_if_moved():
                return
            with contextlib.suppress(ValueError, OSError):  # closed
                self._save.native.confirm(self._save.snapshot)
            self._end()

    def fail_if_moved(self) -> bool:
        """Fails the checkpoint if a tensor is not as it was, and says whether one is not. Call it
        when no operation that changes tensors runs."""
        with self._lock:
            if self.given:
                return False
            now = self._save.entry()
            unreadable = now is not None and now.error_name == UNREADABLE
            moved = self._reading.lost(now.fault) if now and unreadable else self._reading.moved()
            if moved is None:
                return False
            # Daemon or core may have seen the change, too: they do not know which tensor it was.
            faulted = unreadable or (now is not None and OTHER_BYTES in (now.code, now.error_name))
            with contextlib.suppress(ValueError, OSError):  # closed
                fail_moved(self._save, moved, self._on_moved, faulted=faulted)
            self._end()
            return True

    def _end(self) -> None:
        self._reading = Reading(())  # a handle that is kept keeps no tensors
        # Before the caller returns: what it changes later does not concern this snapshot.
        self.given = True

    def give_if_read(self) -> None:
        """In a call of the client: gives the verdict if everything was read."""
        if threading.get_ident() == self._thread and not self.given:
            now = self._save.entry()
            if now is None or now.source_read:
                self.give()

    def wait(self, deadline_ns: int) -> None:
        """Waits until the verdict is possible, and gives it: only in the training thread."""
        if threading.get_ident() == self._thread and not self.given:
            with contextlib.suppress(ValueError, OSError):
                self._save.native.wait(self._save.snapshot, "read", deadline_ns)
            self.give_if_read()

    def give_late(self, nbytes: int) -> None:
        """In a thread of its own, for a trainer that does not call."""
        with contextlib.suppress(ValueError, OSError):
            if not self._save.native.wait(self._save.snapshot, "read", FOREVER_NS):
                return
            limit_s = min(_LATE_LIMIT_S, _OPERATION_S + nbytes / _OPERATION_BYTES_PER_S)
            # In many short waits: a stopped process runs no operation, either.
            for _ in range(int(limit_s / _TICK_S)):
                if self.given or self._reading.moved() is not None:
                    break
                time.sleep(_TICK_S)
            self.give()


class LateVerdicts:
    """A thread that gives the verdicts that the training thread did not, oldest first."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Verdict, int] | None] = queue.SimpleQueue()
        self._runs = False

    def add(self, verdict: Verdict, nbytes: int) -> None:
        """Adds a verdict on tensors of `nbytes` bytes. Training thread only."""
        self._waiting.put((verdict, nbytes))
        if self._runs:
            return
        with contextlib.suppress(RuntimeError):  # thread limit: others give it
            threading.Thread(target=self._run, name="pccheck-verdicts", daemon=True).start()
            self._runs = True  # after Ctrl-C two threads may run, which does no harm

    def end(self) -> None:
        """No verdict is added from now on: the thread ends after those that wait."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (one := self._waiting.get()) is not None:
            verdict, nbytes = one
            verdict.give_late(nbytes)
            del one, verdict  # while this thread waits, nothing holds the tensors
        self._waiting.put(None)  # for another such thread
