"""Logging to stderr: plain lines, journald prefixes under systemd, or JSON lines."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping

from . import journal
from .repeats import Repeats

LOG = logging.getLogger("pccheckd")


class _Plain(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return (
            time.strftime("%H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03}"
        )


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
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up(
    log_format: str, log_level: str = "info", environ: Mapping[str, str] = os.environ
) -> None:
    """`log_format`: auto (journald's when stderr is the journal), plain, journal or json. May be
    called again while running."""
    if log_format == "auto":
        log_format = "journal" if environ.get("JOURNAL_STREAM") else "plain"
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(_Json())
    elif log_format == "journal" and (native := journal.handler(environ)) is not None:
        handler = native
    elif log_format == "journal":
        handler.setFormatter(_Journal("%(message)s"))
    else:
        handler.setFormatter(_Plain("%(asctime)s pccheckd %(levelname)s %(message)s"))
    handler.addFilter(Repeats())
    for before in LOG.handlers:
        before.close()  # a reload; it may hold the journal's socket
    LOG.handlers[:] = [handler]
    LOG.setLevel(log_level.upper())
    LOG.propagate = False
