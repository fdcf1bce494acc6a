"""Logging to stderr: plain lines, journald prefixes under systemd, or JSON lines. Only `flush`
waits for the reader of the log (log_queue.py)."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from pccheck_wire.errors import RefusedError

from . import journal
from .errors import SHORTAGE_HINT, shortage
from .log_queue import Queued, write_all
from .repeats import Repeats

#: Set for a private daemon (client/pccheck/daemon/autostart.py): stderr is a file of at most this
#: many bytes; older lines stay in a second file of that size.
BYTES_VARIABLE = "PCCHECKD_LOG_BYTES"
LOG = logging.getLogger("pccheckd")


class _Plain(logging.Formatter):
    default_msec_format = "%s.%03d"


class _Journal(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        number = journal.priority(record.levelno)
        text = super().format(record)
        return "\n".join(f"<{number}>{line}" for line in text.splitlines())


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        } | journal.fields_of(record)
        if record.exc_text:
            line["traceback"] = record.exc_text
        return json.dumps(line)


class _Stderr(logging.Handler):
    def __init__(self, formatter: logging.Formatter, bytes_max: int = 0) -> None:
        """`bytes_max`: the limit of stderr, a file of this daemon; 0: no limit."""
        super().__init__()
        self.setFormatter(formatter)
        self._bytes_max = bytes_max

    def emit(self, record: logging.LogRecord) -> None:
        if self._bytes_max and os.fstat(2).st_size >= self._bytes_max:
            here = Path("/proc/self/fd/2").readlink()
            shutil.copyfile(here, f"{here}.1")
            os.ftruncate(2, 0)
        write_all(2, (self.format(record) + "\n").encode(errors="replace"))


def set_up(
    log_format: str, log_level: str = "info", environ: Mapping[str, str] = os.environ
) -> None:
    """`log_format`: auto (journald's when stderr is the journal), plain, journal or json. May be
    called again while running. Raises RefusedError when no thread can be started."""
    output = _output(log_format, environ)
    queue = _queue()
    if queue is not None:
        queue.use(output)
    else:
        try:
            queue = Queued(output)
        except RuntimeError as error:
            raise RefusedError(shortage(error), hint=SHORTAGE_HINT) from error
        queue.addFilter(Repeats())
    LOG.handlers[:] = [queue]
    LOG.setLevel(log_level.upper())
    LOG.propagate = False
    logging.getLogger("asyncio").handlers[:] = [queue]  # or it would write to stderr itself


def flush() -> None:
    """Waits a moment until all lines are written. Not for the event loop."""
    if (queue := _queue()) is not None:
        queue.flush()


def dropped() -> int:
    """Log lines that were lost since the daemon started."""
    queue = _queue()
    return queue.dropped if queue is not None else 0


def _queue() -> Queued | None:
    return next((one for one in LOG.handlers if isinstance(one, Queued)), None)


def _output(log_format: str, environ: Mapping[str, str]) -> logging.Handler:
    if log_format == "auto":
        log_format = "journal" if environ.get("JOURNAL_STREAM") else "plain"
    bytes_max = int(environ.get(BYTES_VARIABLE, "0"))
    if log_format == "json":
        return _Stderr(_Json(), bytes_max)
    if log_format == "journal":
        return journal.output(environ) or _Stderr(_Journal("%(message)s"))
    return _Stderr(_Plain("%(asctime)s pccheckd %(levelname)s %(message)s"), bytes_max)
