"""Threads for calls that block."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Threads(Executor):
    """At most `limit` threads; a new one starts when there is work and none is free. If the system
    refuses a thread, the work waits for the existing threads: it may be the end of a session, and
    must not be lost. Call `begin` at the daemon's start, so that there is always a thread.

    The process ends without these threads: a call that hangs in a disk or a driver cannot be ended.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit, self._name = limit, name
        self._work: deque[tuple[Future[object], Callable[[], object]]] = deque()
        self._started = self._free = 0
        self._open = True
        self._changed = threading.Condition()

    def begin(self) -> None:
        """Starts the first thread. Raises RuntimeError when the system refuses it."""
        self.submit(int)

    def submit(self, fn: Callable[_P, _R], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_R]:
        """Raises RuntimeError after `stop`, or when there can be no thread at all."""
        made: Future[object] = Future()
        with self._changed:
            if not self._open:
                raise RuntimeError(f"the threads {self._name!r} have been shut down")
            if self._free <= len(self._work) and self._started < self._limit:
                self._start()
            self._work.append((made, lambda: fn(*args, **kwargs)))
            self._changed.notify()
        return made  # type: ignore[return-value]

    def stop(self) -> None:
        """Takes no more work, and cancels what has not begun. Waits for nothing."""
        with self._changed:
            self._open = False
            while self._work:
                self._work.popleft()[0].cancel()
            self._changed.notify_all()

    def _start(self) -> None:
        thread = threading.Thread(
            target=self._run, name=f"{self._name}_{self._started}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:
            if not self._started:
                raise
        else:
            self._started += 1
            self._free += 1  # it will be, in a moment

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._work or not self._open)
                if not self._work:
                    return
                future, call = self._work.popleft()
                self._free -= 1
            _do(future, call)
            del future, call
            with self._changed:
                self._free += 1


def _do(future: Future[object], call: Callable[[], object]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
