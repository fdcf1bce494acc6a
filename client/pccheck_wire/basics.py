"""What is needed before the first message: the protocol's number and where the daemon listens.
Apart from `messages`, so that a command line which only asks starts without its classes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PROTOCOL_VERSION = 3

#: Default place of the attach socket; `PCCHECK_SOCKET` and `--socket` override it.
DEFAULT_SOCKET = "/run/pccheck/attach.sock"

#: What clients and the command line read, the daemon's options apart.
VARIABLES = ("PCCHECK_SOCKET", "PCCHECK_STORAGE", "PCCHECK_JOB", "PCCHECK_CONFIG")

START_HINT = "start it with: pccheckd --storage DIR"


def socket_path(given: str | os.PathLike[str] | None = None) -> Path:
    """Where the daemon listens: the argument, PCCHECK_SOCKET, the system's socket, the user's."""
    chosen = os.fspath(given) if given else os.environ.get("PCCHECK_SOCKET", "")
    if chosen:
        return Path(chosen)
    system, own = Path(DEFAULT_SOCKET), user_socket_path()
    if own is None:
        return system
    with contextlib.suppress(OSError):
        if system.exists():
            return system
    return own


def user_socket_path() -> Path | None:
    """Where a daemon that runs as an ordinary user listens by default."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(runtime) / "pccheck" / "attach.sock" if runtime else None
