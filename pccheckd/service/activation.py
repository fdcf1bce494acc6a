"""Descriptors that the service manager hands over at the start (sd_listen_fds(3)): the attach
socket, when pccheckd.socket owns it."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from pathlib import Path

from pccheck_wire.errors import UsageError

FIRST = 3
#: Its name in pccheckd.socket; a manager that does not name descriptors uses "unknown".
ATTACH_NAMES = ("attach", "pccheckd.socket", "unknown", "")


def take(environ: MutableMapping[str, str] = os.environ) -> list[tuple[str, int]]:
    """The descriptors meant for this process, with their names; a second call finds none."""
    pid = environ.pop("LISTEN_PID", "")
    count = environ.pop("LISTEN_FDS", "")
    names = environ.pop("LISTEN_FDNAMES", "").split(":")
    if pid != str(os.getpid()) or not count.isdigit():
        return []
    numbers = range(FIRST, FIRST + int(count))
    for number in numbers:
        os.set_inheritable(number, False)
    names += [""] * (len(numbers) - len(names))
    return list(zip(names, numbers, strict=False))


def attach_socket(given: list[tuple[str, int]], path: Path) -> socket.socket | None:
    """Takes the listening socket out of `given`. It belongs to the manager, which made its
    directory, mode and owner. Raises UsageError when it is not at `path`."""
    for name, number in given:
        if name not in ATTACH_NAMES:
            continue
        made = socket.socket(fileno=number)
        if not _listens(made):
            made.detach()
            raise UsageError(
                f"descriptor {number} from the service manager is not a listening unix socket "
                "of packets",
                hint="pccheckd.socket needs ListenSequentialPacket=",
            )
        where = Path(os.fsdecode(made.getsockname()))
        if where != path:
            made.detach()
            raise UsageError(
                f"the service manager listens at {where}, but the configuration names {path}",
                hint="use one path for ListenSequentialPacket= of pccheckd.socket and for socket",
            )
        given.remove((name, number))
        made.setblocking(False)
        return made
    return None


def _listens(made: socket.socket) -> bool:
    return (
        made.family == socket.AF_UNIX
        and made.type == socket.SOCK_SEQPACKET
        and bool(made.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    )
