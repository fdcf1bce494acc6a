"""Decides whether the process that listens at a socket may be trusted with checkpoints. The kernel
reports its uid; for a socket from the service manager that is the manager's, root.

Imports neither `pathlib` nor the messages, so that a command that only asks starts fast."""

from __future__ import annotations

import os
import socket
import stat
import struct

from .errors import RefusedError, UsageError

#: The uid of a daemon that is neither the user's own nor root's.
VARIABLE = "PCCHECK_DAEMON_UID"
_CREDENTIALS = struct.Struct("iII")


def require_trusted(connection: socket.socket, path: str | os.PathLike[str]) -> None:
    """Raises RefusedError unless the other end runs as this process's uid, as root, as the uid in
    PCCHECK_DAEMON_UID, or as a uid to which root gave the socket's directory."""
    _, uid, _ = credentials(connection)
    mine = os.geteuid()
    if uid in (0, mine, named_uid()) or placed_by_root(path, uid):
        return
    raise RefusedError(
        f"the process at {os.fspath(path)} runs as uid {uid}, which is neither yours ({mine}) nor "
        "root: it could read and replace your checkpoints, so the client does not connect",
        hint=f"if that daemon is trusted, set {VARIABLE}={uid}; else start your own, with its "
        "socket in a directory that only you can write to",
    )


def pid_of(connection: socket.socket) -> int:
    """The process that listens, by its number in this process's PID namespace; 0 when it has
    none."""
    return credentials(connection)[0]


def credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Process, uid and gid of the other end, as the kernel reports them."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    return pid, uid, gid


def named_uid() -> int | None:
    """Raises UsageError for a value that is not a number."""
    given = os.environ.get(VARIABLE, "")
    if not given:
        return None
    if not (given.isascii() and given.isdigit()):
        raise UsageError(f"{VARIABLE}={given[:40]!r} is not a uid", hint="set it to a number")
    return int(given)


def placed_by_root(path: str | os.PathLike[str], uid: int) -> bool:
    """Whether only root and `uid` can have put a socket there, in a directory that root made or
    gave to `uid`: every directory of the path is root's, or the last one `uid`'s, and no other user
    may write to any of them."""
    directory = os.path.dirname(os.path.join(os.getcwd(), path))  # noqa: PTH109, PTH118, PTH120
    owners = {0, uid}
    while True:
        try:
            # Trust in a link depends on its owner; the directory of the link is checked as well.
            found = (os.stat(directory), os.lstat(directory))  # noqa: PTH116
        except OSError:
            return False
        if any(one.st_uid not in owners for one in found):
            return False
        if found[0].st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return False
        if directory == "/":
            return True
        directory, owners = os.path.dirname(directory), {0}  # noqa: PTH120
