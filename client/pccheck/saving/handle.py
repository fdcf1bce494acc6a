"""The handle that `checkpoint()` returns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NoReturn, SupportsIndex

from pccheck.flight.in_flight import FINAL, InFlight
from pccheck.flight.phases import Durable
from pccheck.flight.waiting import wait_copied, wait_durable, wait_end, wait_global
from pccheck.warn import LOG, Warner
from pccheck_wire.errors import PccheckError, WaitTimeoutError
from pccheck_wire.messages import CheckpointState


class Checkpoint:
    """A checkpoint that was requested. It is used like a `concurrent.futures.Future` whose result
    is what became durable. Any thread may ask and wait; none of them delays training.

    Attributes:
        step: as it was when `checkpoint()` was called.
    """

    __slots__ = ("_in_flight", "_warner", "step")

    def __init__(self, in_flight: InFlight, warner: Warner) -> None:
        self.step = in_flight.step
        self._in_flight = in_flight
        self._warner = warner

    @property
    def state(self) -> CheckpointState:
        """The present state; the ends are DURABLE, GLOBAL, SUPERSEDED, SKIPPED and FAILED. A
        memory-only checkpoint stays COPIED until it is written, or a newer one supersedes it."""
        return self._in_flight.state

    @property
    def sequence(self) -> int:
        """Its number in the order of saving; 0 until the daemon has given it one."""
        return self._in_flight.sequence

    @property
    def reason(self) -> str:
        """Why the checkpoint was skipped or failed, what superseded it, or why it is durable on
        this rank and will never be on all ranks; "" otherwise. May wait for the daemon's answer,
        two seconds at most."""
        return self._warner.pasteable(self._in_flight.reason)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.state in FINAL

    def result(self, timeout: float | None = None) -> Durable:
        """The same as `wait_durable`."""
        return self.wait_durable(timeout)

    def exception(self, timeout: float | None = None) -> PccheckError | None:
        """Why it failed or was skipped, or None, once it has ended; waits as `wait_durable` does.
        Raises WaitTimeoutError after `timeout` seconds."""
        try:
            self.wait_durable(timeout)
        except WaitTimeoutError:
            raise
        except PccheckError as error:
            return error
        return None

    def add_done_callback(self, function: Callable[[Checkpoint], object]) -> None:
        """Calls `function` with this handle when it has ended; at once when it has already.

        The call comes from a thread of its own, never from the training thread: what the function
        shares with training needs a lock, and it may not change what is attached. What it raises is
        logged. A function that was not called before the process ends is never called.
        """
        thread = threading.Thread(
            target=self._call, args=(function,), name=f"pccheck-done-{self.step}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # training continues
            LOG.warning("PCcheck: callback of step %d is not called: %s", self.step, error)

    def _call(self, function: Callable[[Checkpoint], object]) -> None:
        while not self.done():
            wait_end(self._in_flight)
        try:
            function(self)
        except Exception:
            LOG.exception("PCcheck: callback of step %d failed", self.step)

    def wait_copied(self, timeout: float | None = None) -> None:
        """Returns once the daemon has a complete copy, which outlives this process.

        Raises CheckpointFailedError when there will be no such copy, WaitTimeoutError after
        `timeout` seconds.
        """
        with self._warner.errors():
            wait_copied(self._in_flight, timeout)

    def wait_durable(self, timeout: float | None = None) -> Durable:
        """Returns once this checkpoint, or a newer one, survives a power loss; the result names
        which. With several ranks this is about the part of this rank only: see `wait_global`. A
        memory-only checkpoint, or the one that took its place, is written for this.

        Raises CheckpointFailedError when the checkpoint was skipped or failed, WaitTimeoutError
        after `timeout` seconds.
        """
        with self._warner.errors():
            return wait_durable(self._in_flight, timeout)

    def wait_global(self, timeout: float | None = None) -> Durable:
        """Returns once this checkpoint, or a newer one, is durable on every rank of the job; the
        result names which. From then on a restore of the job gives that checkpoint. For a rank that
        saves alone the call is `wait_durable`.

        Raises CheckpointFailedError as soon as the checkpoint is known to have been skipped or to
        have failed, on this rank or on another one. A checkpoint that is durable on this rank stays
        durable, and a later call returns once a newer checkpoint is durable on all ranks. Raises
        WaitTimeoutError after `timeout` seconds, DaemonUnreachableError when the daemon ended
        before all ranks had the checkpoint.
        """
        with self._warner.errors():
            return wait_global(self._in_flight, timeout)

    def __reduce_ex__(self, _protocol: SupportsIndex) -> NoReturn:
        raise TypeError(  # for copy and pickle
            "a Checkpoint cannot be copied or pickled, because it uses the session of this "
            "process: pass on handle.step, or the result of handle.wait_durable()"
        )

    def __repr__(self) -> str:
        return f"<Checkpoint step={self.step} {self.state}>"
