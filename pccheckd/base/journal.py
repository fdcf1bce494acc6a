"""Lines to the journal with fields of their own, by its native protocol: `journalctl
PCCHECK_JOB=NAME`. See systemd's JOURNAL_NATIVE_PROTOCOL."""

from __future__ import annotations

import logging
import os
import socket
import struct
from collections.abc import Mapping

from .log_queue import write_all

SOCKET = "/run/systemd/journal/socket"
_PRIORITIES = ((logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.DEBUG, 7))
_TEXT_BYTES_MAX = 32 * 1024  # of one field; a datagram takes about 200 KiB


def output(environ: Mapping[str, str] = os.environ, *, path: str = "") -> logging.Handler | None:
    """When stderr is the journal's and its socket can be reached; else None."""
    stderr = os.fstat(2)
    if environ.get("JOURNAL_STREAM") != f"{stderr.st_dev}:{stderr.st_ino}":
        return None  # inherited, but stderr is another file
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        channel.connect(path or SOCKET)
    except OSError:
        channel.close()
        return None
    return _Journal(channel)


def fields_of(record: logging.LogRecord) -> dict[str, object]:
    """What a line carries beside its text."""
    found = getattr(record, "fields", None)
    return dict(found) if isinstance(found, Mapping) else {}


def priority(level: int) -> int:
    """sd-daemon(3)."""
    return next((number for least, number in _PRIORITIES if level >= least), 7)


class _Journal(logging.Handler):
    """Falls back to stderr, which is the journal's too, for what the socket does not take."""

    def __init__(self, channel: socket.socket) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        entry = {"MESSAGE": text, "PRIORITY": priority(record.levelno)}
        entry["SYSLOG_IDENTIFIER"] = "pccheckd"
        entry |= {f"PCCHECK_{k.upper()}": v for k, v in fields_of(record).items()}
        try:
            self._channel.send(encode(entry))
        except OSError:
            write_all(2, f"<{entry['PRIORITY']}>{text}\n".encode(errors="replace"))


def encode(entry: Mapping[str, object]) -> bytes:
    """One entry: NAME=VALUE lines; values of several lines with their length in front."""
    parts = []
    for name, value in entry.items():
        data = str(value).encode(errors="replace")[:_TEXT_BYTES_MAX]
        if b"\n" in data:
            parts.append(name.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n")
        else:
            parts.append(name.encode() + b"=" + data + b"\n")
    return b"".join(parts)
