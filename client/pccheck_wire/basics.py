"""What is needed before the first message: the protocol's number and where the daemon listens.
Apart from `messages`, so that a command line which only asks starts without its classes; without
`pathlib`, too, which takes longer than the answer."""

from __future__ import annotations

import os

PROTOCOL_VERSION = 5

#: Default place of the attach socket; `PCCHECK_SOCKET` and `--socket` override it.
DEFAULT_SOCKET = "/run/pccheck/attach.sock"

#: What clients and the command line read, the daemon's options apart.
VARIABLES = ("PCCHECK_SOCKET", "PCCHECK_STORAGE", "PCCHECK_JOB", "PCCHECK_CONFIG")

START_HINT = "start it with: pccheckd --storage DIR"
#: Of a daemon that was told nothing at all; pccheckctl tells it from what is wrong in a file.
STORAGE_MISSING = "--storage is missing"
SAME_VERSION_HINT = "install the same version of pccheck on both sides"


def socket_name(given: str | os.PathLike[str] | None = None) -> str:
    """Where the daemon listens: the argument, PCCHECK_SOCKET, the system's socket, the user's."""
    chosen = os.fspath(given) if given else os.environ.get("PCCHECK_SOCKET", "")
    if chosen:
        return chosen
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if not runtime or os.path.exists(DEFAULT_SOCKET):  # noqa: PTH110
        return DEFAULT_SOCKET
    return f"{runtime}/pccheck/attach.sock"
