"""The queue of log lines. The reader of the log may be stopped, and its pipe or socket full, so one
thread writes, behind a bounded queue. Lines that do not fit are dropped and counted; a later line
contains the count."""

from __future__ import annotations

import copy
import logging
import os
import select
from logging.handlers import QueueHandler, QueueListener
from queue import Queue

LINES_MAX = 512
#: At the end of the process, for what is still queued.
FLUSH_LIMIT_S = 2.0
_TRACEBACKS = logging.Formatter()


class _Gap(logging.LogRecord):
    """Stands in the queue where lines were dropped."""

    def __init__(self) -> None:
        super().__init__("pccheckd", logging.WARNING, "", 0, "", None, None)
        self.lines = 1

    def getMessage(self) -> str:  # noqa: N802
        return f"{self.lines} log lines dropped: the log reader was stopped"


class _Writer(QueueListener):
    """The thread. Its handler may block, and raises when the line is lost."""

    lost = 0

    def handle(self, record: logging.LogRecord) -> None:
        try:
            self.handlers[0].emit(record)
        except Exception:  # a closed pipe, a full disk: it cannot be logged
            self.lost += 1


class Queued(QueueHandler):
    """Any thread may log: `emit` never waits for the reader."""

    def __init__(self, output: logging.Handler) -> None:
        """`output` writes lines by `emit`. Raises RuntimeError when no thread can be started."""
        self._lines: Queue[logging.LogRecord] = Queue()
        super().__init__(self._lines)
        self._unqueued = 0
        self._writer = _Writer(self._lines, output)
        self._writer.start()

    @property
    def dropped(self) -> int:
        """Lines that were lost."""
        return self._unqueued + self._writer.lost

    def use(self, output: logging.Handler) -> None:
        """Writes to `output` from now on."""
        self._writer.handlers = (output,)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Makes text and fields now: its values may have changed when the record is written."""
        record = copy.copy(record)
        record.fields = whose(record.args) | dict(getattr(record, "fields", {}))
        record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            record.exc_text = _TRACEBACKS.formatException(record.exc_info)
            record.exc_info = None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        """With the handler's lock held, so only the writer's thread takes lines meanwhile."""
        if self._lines.qsize() < LINES_MAX:
            self._lines.put(record)
            return
        self._unqueued += 1
        with self._lines.mutex:
            last = self._lines.queue[-1] if self._lines.queue else None
            if isinstance(last, _Gap):
                last.lines += 1
                return
        self._lines.put(_Gap())

    def flush(self) -> None:
        """Waits a moment for the queued lines. Not for the event loop."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(
                lambda: not self._lines.unfinished_tasks, FLUSH_LIMIT_S
            )


def whose(values: object) -> dict[str, object]:
    """The fields of those values of a line that have names: the uid, job and rank of a Key."""
    named = (getattr(one, "_asdict", dict) for one in values) if isinstance(values, tuple) else ()
    return {name: value for fields in named for name, value in fields().items()}


def write_all(descriptor: int, data: bytes) -> None:
    """Blocks until all of it is written, also where the descriptor itself does not block."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(descriptor, select.POLLOUT)
            poll.poll()
