"""Logging to stderr: plain lines, journald prefixes under systemd, or JSON lines."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping

LOG = logging.getLogger("pccheckd")

#: sd-daemon(3) priorities.
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.DEBUG, 7))


class _Plain(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return (
            time.strftime("%H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03}"
        )


class _Journal(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        number = next((n for level, n in _PRIORITIES if record.levelno >= level), 7)
        text = super().format(record)
        return "\n".join(f"<{number}>{line}" for line in text.splitlines())


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up(log_format: str, environ: Mapping[str, str] = os.environ) -> None:
    """`log_format`: auto (journald's when stderr is the journal), plain, journal or json."""
    if log_format == "auto":
        log_format = "journal" if environ.get("JOURNAL_STREAM") else "plain"
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(_Json())
    elif log_format == "journal":
        handler.setFormatter(_Journal("%(message)s"))
    else:
        handler.setFormatter(_Plain("%(asctime)s pccheckd %(levelname)s %(message)s"))
    LOG.handlers[:] = [handler]
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
