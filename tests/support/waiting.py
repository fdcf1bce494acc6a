"""Waits for another process or thread: for a condition, never for a fixed time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = float(os.environ.get("TEST_PATIENCE", "1"))  #: larger on emulated processors
LIMIT_S = 60.0 * PATIENCE

T = TypeVar("T")


def until(holds: Callable[[], T], why: Callable[[], object] = str, *, every_s: float = 0.02) -> T:
    """Calls until the result is true, and returns it. `why` describes a failure."""
    deadline = time.monotonic() + LIMIT_S
    while not (answer := holds()):
        assert time.monotonic() < deadline, f"still {answer!r}: {why()}"
        time.sleep(every_s)
    return answer
