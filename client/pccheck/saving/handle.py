"""What `checkpoint()` returns."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from pccheck.warn import LOG
from pccheck_wire.errors import PccheckError, WaitTimeoutError
from pccheck_wire.messages import CheckpointState

from .in_flight import FINAL, Durable, InFlight


class Checkpoint:
    """A checkpoint that was asked for. It is used like a `concurrent.futures.Future` whose result
    is what became durable. Any thread may ask and wait; none of them holds training up.

    Attributes:
        step: as it was when `checkpoint()` was called.
    """

    __slots__ = ("_in_flight", "step")

    def __init__(self, in_flight: InFlight) -> None:
        self.step = in_flight.step
        self._in_flight = in_flight

    @property
    def state(self) -> CheckpointState:
        """Where it is now; the ends are DURABLE, GLOBAL, SUPERSEDED, SKIPPED and FAILED."""
        return self._in_flight.state

    @property
    def sequence(self) -> int:
        """Its place in the order of checkpoints of the volume; 0 before it was admitted."""
        return self._in_flight.sequence

    @property
    def reason(self) -> str:
        """Why it was skipped or failed, or what superseded it; "" otherwise. May wait for an answer
        of the daemon, two seconds at most."""
        return self._in_flight.reason

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.state in FINAL

    def result(self, timeout: float | None = None) -> Durable:
        """The same as `wait_durable`."""
        return self.wait_durable(timeout)

    def exception(self, timeout: float | None = None) -> PccheckError | None:
        """Why it failed or was skipped, or None, once it has ended. Raises WaitTimeoutError after
        `timeout` seconds."""
        try:
            self.wait_durable(timeout)
        except WaitTimeoutError:
            raise
        except PccheckError as error:
            return error
        return None

    def add_done_callback(self, function: Callable[[Checkpoint], object]) -> None:
        """Calls `function` with this handle when it has ended; at once when it has already.

        The call comes from a thread of its own, never from the one that trains: what the function
        shares with training needs a lock, and it may not change what is attached. What it raises is
        logged. A function that was not called before the process ends is never called.
        """
        thread = threading.Thread(
            target=self._call, args=(function,), name=f"pccheck-done-{self.step}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # training goes on
            LOG.warning("PCcheck: the callback of step %d is not called: %s", self.step, error)

    def _call(self, function: Callable[[Checkpoint], object]) -> None:
        while not self.done():
            with contextlib.suppress(PccheckError):
                self.wait_durable()
        try:
            function(self)
        except Exception:
            LOG.exception("a callback of the checkpoint of step %d failed", self.step)

    def wait_copied(self, timeout: float | None = None) -> None:
        """Returns once the daemon has a complete copy, which outlives this process.

        Raises CheckpointFailedError when it never will, WaitTimeoutError after `timeout` seconds.
        """
        self._in_flight.wait_copied(timeout)

    def wait_durable(self, timeout: float | None = None) -> Durable:
        """Returns once it, or a newer one, will be found after power loss; says which. With several
        ranks that is this rank's part only: see `wait_global`.

        Raises CheckpointFailedError when it was skipped or failed, WaitTimeoutError after
        `timeout` seconds.
        """
        return self._in_flight.wait_durable(timeout)

    def wait_global(self, timeout: float | None = None) -> Durable:
        """Returns once every rank of the job has it, or a newer one, durable: what a restore of the
        job gives from then on. Says which. For a rank that saves alone it is `wait_durable`.

        Raises CheckpointFailedError when it was skipped or failed here, WaitTimeoutError after
        `timeout` seconds, DaemonUnreachableError when the daemon ended before all ranks had it.
        """
        return self._in_flight.wait_global(timeout)

    def __repr__(self) -> str:
        return f"<Checkpoint step={self.step} {self.state}>"
