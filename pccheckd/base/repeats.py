"""Limits repeated log lines: further ones are left out and counted."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

BURST = 10
WINDOW_S = 10.0
KINDS_MAX = 1024


@dataclass(slots=True)
class _Seen:
    since: float
    count: int = 0
    left_out: int = 0


class Repeats(logging.Filter):
    """Passes BURST lines of a kind in every WINDOW_S; the next one has the count of those left
    out. A kind is the line's level, its text without values, and the first value: whose line it is.
    Lines that carry `always` are not counted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: OrderedDict[tuple[int, str, str], _Seen] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "always", False):
            return True
        seen = self._kind(record)
        now = self._clock()
        if now - seen.since >= WINDOW_S:
            if seen.left_out:
                record.msg = f"{record.msg} ({seen.left_out} more of these were left out)"
            seen.since, seen.count, seen.left_out = now, 0, 0
        seen.count += 1
        if seen.count > BURST:
            seen.left_out += 1
            return False
        return True

    def _kind(self, record: logging.LogRecord) -> _Seen:
        first = record.args[0] if isinstance(record.args, tuple) and record.args else ""
        kind = record.levelno, str(record.msg), str(first)
        seen = self._seen.setdefault(kind, _Seen(self._clock()))
        self._seen.move_to_end(kind)
        if len(self._seen) > KINDS_MAX:
            self._seen.popitem(last=False)
        return seen
