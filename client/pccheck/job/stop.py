"""A signal that asks training to stop: the handler sets a flag, the loop reads it between steps."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

from pccheck_wire.errors import UsageError

from .agreement import RankAgreement

_Function: TypeAlias = Callable[[int, FrameType | None], Any]
_Handler: TypeAlias = _Function | int | None


class Stop:
    """Whether training should stop, by a signal to this process or to another rank of the job."""

    def __init__(self, agreement: RankAgreement) -> None:
        """`agreement`: of the ranks that stop together."""
        self._agreement = agreement
        self._limit_s = 0.0
        self._asked_s: float | None = None  # time.monotonic()
        #: By signal: our handler, and the earlier one.
        self._handlers: dict[int, tuple[_Function, _Handler]] = {}
        self._asks = False  # the ranks, now: a signal handler may call in the middle
        self.agreed = False  #: every rank knows that one of them has the flag

    def on(self, signals: tuple[int, ...], limit_s: float) -> None:
        """Makes these signals set the flag. Raises UsageError; nothing is changed then."""
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "stop_on() was called in a thread, but Python sets handlers in the main thread",
                hint="call stop_on() in the main thread; should_stop() may be called in another",
            )
        numbers = [_checked(number) for number in signals]
        if not numbers:
            raise UsageError("stop_on() names no signal", hint="call stop_on(signal.SIGTERM)")
        self._agreement.begin("stop_on()")
        self._limit_s = limit_s
        for number in numbers:
            if number not in self._handlers:
                before = signal.getsignal(number)
                ours = _handler(weakref.ref(self), before)
                self._handlers[number] = ours, before
                signal.signal(number, ours)

    def off(self) -> None:
        """Puts the earlier handlers back. Where the script has set another handler since, that
        one stays, and ours passes signals on to the earlier one."""
        for number, (ours, before) in self._handlers.items():
            if before is not None and signal.getsignal(number) is ours:
                with contextlib.suppress(ValueError):  # not the main thread
                    signal.signal(number, before)
        self._handlers.clear()

    @property
    def active(self) -> bool:
        """Whether signals set the flag."""
        return bool(self._handlers)

    def ask(self) -> None:
        """Sets the flag."""
        self._asked_s = self._asked_s or time.monotonic()

    def left_s(self) -> float | None:
        """Seconds of the limit that are left after the signal; None without a signal."""
        if self._asked_s is None:
            return None
        return max(0.0, self._asked_s + self._limit_s - time.monotonic())

    def asked(self) -> bool:
        """Whether to stop. All ranks must call it, and get the same answer."""
        if not (self.agreed or self._asks):
            try:
                self._asks = True
                if self._agreement.largest(int(self._asked_s is not None)):
                    self.ask()
                    self.agreed = True
            finally:
                self._asks = False
        return self.agreed  # a signal after the reduction counts in the next one, on all ranks


def _handler(stop: weakref.ref[Stop], before: _Handler) -> _Function:
    pid = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        found = stop() if os.getpid() == pid else None  # a forked worker still ends by the signal
        active = found is not None and found.active
        if found is not None and active:
            found.ask()
        if callable(before) and not (active and before is signal.default_int_handler):
            before(number, frame)
        elif before == signal.SIG_DFL and not active:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    return handle


def _checked(number: Any) -> int:
    """Raises UsageError for a signal that can have no handler, and for other values."""
    try:
        found = signal.Signals(number)
    except ValueError:
        found = None
    if found is None or found in (signal.SIGKILL, signal.SIGSTOP):
        raise UsageError(
            f"stop_on({number!r}): not a signal that can be handled",
            hint="use signal.SIGTERM, signal.SIGUSR1 or the like",
        )
    return int(found)
