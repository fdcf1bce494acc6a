"""The queue of log lines. The reader of the log may be stopped, and its pipe or socket full, so one
thread writes, behind a bounded queue. Lines that do not fit are dropped and counted; a later line
contains the count."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

LINES_MAX = 512
BYTES_MAX = 1 << 20
#: At the end of the process, for what is still queued.
FLUSH_LIMIT_S = 2.0

#: Writes one line. Blocks; raises OSError when the line is lost.
Write = Callable[[], None]


class Output(Protocol):
    """Where lines go, and how they look."""

    def line(self, record: logging.LogRecord) -> tuple[int, Write]:
        """The size of a line in bytes, and what writes it. Does not block."""

    def close(self) -> None:
        """After the last line."""


@dataclass(slots=True)
class _Gap:
    """Stands in the queue where lines were dropped."""

    output: Output
    lines: int = 0


class Queued(logging.Handler):
    """Any thread may log: `emit` never waits for the reader."""

    def __init__(self, output: Output) -> None:
        """Raises RuntimeError when no thread can be started."""
        super().__init__()
        self.dropped = 0
        self._output = output
        self._lines: deque[tuple[int, Write] | _Gap] = deque()
        self._bytes = 0  # of those, and of the one that is being written
        self._writing = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def use(self, output: Output) -> None:
        """Writes to `output` from now on; queued lines go to the previous one."""
        with self._changed:
            before, self._output = self._output, output
            self._lines.append((0, before.close))
            self._changed.notify_all()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            size, write = self._output.line(record)
        except Exception:  # as in the standard library's handlers
            self.handleError(record)
            return
        with self._changed:
            self._put(size, write)
            self._changed.notify_all()

    def flush(self) -> None:
        """Waits a moment for the queued lines. Not for the event loop."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and not self._writing, FLUSH_LIMIT_S)

    def _put(self, size: int, write: Write) -> None:
        if len(self._lines) < LINES_MAX and self._bytes + size <= BYTES_MAX:
            self._lines.append((size, write))
            self._bytes += size
            return
        last = self._lines[-1] if self._lines else None
        if not isinstance(last, _Gap):
            last = _Gap(self._output)
            self._lines.append(last)
        last.lines += 1
        self.dropped += 1

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines.popleft()
                self._writing = True
            size, write = (0, _report(line)) if isinstance(line, _Gap) else line
            lost = 0
            try:
                write()
            except Exception:  # a closed pipe, a full disk: it cannot be logged
                lost = 1
            with self._changed:
                self._writing = False
                self._bytes -= size
                self.dropped += lost
                self._changed.notify_all()


def _report(gap: _Gap) -> Write:
    record = logging.LogRecord(
        "pccheckd", logging.WARNING, "", 0,
        "%d log lines dropped: the log reader was stopped", (gap.lines,),
        None,
    )  # fmt: skip
    return gap.output.line(record)[1]


def write_all(descriptor: int, data: bytes) -> None:
    """Blocks until all of it is written, also where the descriptor itself does not block."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
