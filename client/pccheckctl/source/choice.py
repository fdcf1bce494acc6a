"""Whom to ask: the daemon when it answers, a storage directory when one is named.

What one answer does not need is imported late: starting takes longer than answering.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from pccheck_wire.errors import DaemonUnreachableError, UsageError
from pccheckctl.output.documents import part, text

if TYPE_CHECKING:
    from pathlib import Path

    from pccheckctl.source.directory import Storage
    from pccheckctl.source.observer import Observer
    from pccheckctl.source.readers import Store


def choose(arguments: argparse.Namespace) -> Observer | Storage:
    """The daemon, unless --storage is given; without a daemon the directory in PCCHECK_STORAGE.

    Raises DaemonUnreachableError that names both ways out.
    """
    if arguments.storage:
        from pccheckctl.source.directory import Storage

        return Storage(arguments.storage)
    from pccheckctl.source.observer import Observer

    try:
        return Observer(arguments.socket)
    except DaemonUnreachableError as error:
        fallback = os.environ.get("PCCHECK_STORAGE")
        if not fallback:
            raise DaemonUnreachableError(
                error.message,
                hint=f"{error.hint}; or without one, with the files: pccheckctl --storage DIR ..."
                f"{_private_daemons()}",
            ) from error
    from pccheckctl.source.directory import Storage

    return Storage(fallback)


def _private_daemons() -> str:
    """Sockets of private daemons (autostart=True) that may run, for the hint."""
    import glob
    import tempfile

    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    places = [f"{runtime}/pccheck"] if runtime else []
    places.append(f"{tempfile.gettempdir()}/pccheck-{os.getuid()}")
    found = [one for place in places for one in glob.glob(f"{place}/*/attach.sock")]  # noqa: PTH207
    if not found:
        return ""
    return f"; a private daemon has a socket here: pccheckctl --socket {found[0]} status"


def daemon(arguments: argparse.Namespace) -> Observer:
    """For what only a daemon knows. Raises UsageError with --storage, DaemonUnreachableError."""
    if arguments.storage:
        raise UsageError(
            f"{arguments.command} asks the daemon: what is under way is not in the files of "
            "--storage",
            hint="leave --storage out; --socket PATH names a daemon",
        )
    from pccheckctl.source.observer import Observer

    return Observer(arguments.socket)


def files(arguments: argparse.Namespace) -> Store:
    """For commands that read checkpoints: the directory itself, also a running daemon's, since
    that costs the daemon nothing; through the daemon where we may not look into it."""
    from pathlib import Path

    from pccheckctl.source.directory import Storage

    with choose(arguments) as chosen:
        if isinstance(chosen, Storage):
            return chosen
        place = Path(text(part(chosen.status(), "storage"), "path"))
    if _may_read(place):
        storage = Storage(place)
        storage.served, storage.socket = True, arguments.socket
        return storage
    from pccheckctl.source.remote import DaemonStore

    return DaemonStore(arguments.socket, place)


def _may_read(place: Path) -> bool:
    """Every user's directory below it is open to us."""
    try:
        return all(
            os.access(entry, os.R_OK | os.X_OK)
            for entry in (place, *place.iterdir())
            if entry.is_dir()
        )
    except OSError:
        return False
