"""Waits for another process or thread: for a condition, never for a fixed time."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))  #: larger on emulated processors
LIMIT_S = 240.0 * PATIENCE  #: what has not happened by then never happens

T = TypeVar("T")


def until(holds: Callable[[], T], why: Callable[[], object] = str, *, every_s: float = 0.02) -> T:
    """Calls until the result is true, and returns it. `why` describes a failure."""
    deadline = time.monotonic() + LIMIT_S
    while not (answer := holds()):
        assert time.monotonic() < deadline, f"still {answer!r}: {why()}"
        time.sleep(every_s)
    return answer


def suspend(pid: int) -> None:
    """Sends SIGSTOP, and waits until every thread has stopped: where CPUs are scarce, threads run
    until one of them has taken the signal."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _states(pid) <= {"T", "t", "Z", "X"}, lambda: _states(pid), every_s=0.001)


def _states(pid: int) -> set[str]:
    """Of the threads of a process; none if it has ended."""
    found = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found.add((thread / "stat").read_text().rpartition(")")[2].split()[0])
    return found
