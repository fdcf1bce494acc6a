"""Whom to ask: the daemon when it answers, a storage directory when one is named.

What an answer does not need is imported late: to start takes longer than to answer.
"""

from __future__ import annotations

import argparse
import contextlib
import os

from pccheck_wire.errors import DaemonUnreachableError, UsageError
from pccheckctl.output.documents import part, text

TYPE_CHECKING = False  # the import of `typing` takes a fifth of the time of `status`
if TYPE_CHECKING:
    from pathlib import Path

    from pccheck_store.directory import Storage
    from pccheck_store.observer import Observer
    from pccheck_store.readers import Store


def choose(arguments: argparse.Namespace) -> Observer | Storage:
    """The daemon, unless --storage is given; without a daemon the directory in PCCHECK_STORAGE.

    Raises DaemonUnreachableError, whose hint names both.
    """
    place = arguments.storage
    if not place:
        from pccheck_store.observer import Observer

        try:
            return Observer(arguments.socket)
        except DaemonUnreachableError as error:
            place = os.environ.get("PCCHECK_STORAGE")
            if not place:
                hint = f"{error.hint}; or read the files without a daemon: pccheckctl --storage DIR"
                raise DaemonUnreachableError(
                    error.message, hint=f"{hint} ...{_private_daemon()}"
                ) from error
    from pccheck_store.directory import Storage

    return Storage(place)


def _private_daemon() -> str:
    """The socket of a private daemon (autostart=True) that may run, for the hint."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    places = [f"{runtime}/pccheck"] * bool(runtime)
    places.append(f"{os.environ.get('TMPDIR') or '/tmp'}/pccheck-{os.getuid()}")
    for place in places:
        with contextlib.suppress(OSError):
            for name in os.listdir(place):  # noqa: PTH208  (pathlib and glob take long to import)
                socket = f"{place}/{name}/attach.sock"
                if os.path.exists(socket):  # noqa: PTH110
                    return f"; or ask your private daemon: pccheckctl --socket {socket} status"
    return ""


def daemon(arguments: argparse.Namespace) -> Observer:
    """For what only a daemon knows. Raises UsageError with --storage, DaemonUnreachableError."""
    if arguments.storage:
        raise UsageError(
            f"{arguments.command} asks the daemon: the files of --storage do not show what is "
            "under way",
            hint="leave --storage out; --socket PATH names a daemon",
        )
    from pccheck_store.observer import Observer

    return Observer(arguments.socket)


def files(arguments: argparse.Namespace) -> Store:
    """For commands that read checkpoints. The directory itself, also that of a running daemon,
    since that costs the daemon nothing; through the daemon where this user may not read it."""
    from pathlib import Path

    from pccheck_store.directory import Storage

    with choose(arguments) as chosen:
        if isinstance(chosen, Storage):
            return chosen
        place = Path(text(part(chosen.status(), "storage"), "path"))
    if _may_read(place):
        storage = Storage(place)
        storage.served, storage.socket = True, arguments.socket
        return storage
    from pccheck_store.remote import DaemonStore

    return DaemonStore(arguments.socket, place)


def _may_read(place: Path) -> bool:
    """The directory, and the directory of every user in it."""
    try:
        entries = [place, *(entry for entry in place.iterdir() if entry.is_dir())]
        return all(os.access(entry, os.R_OK | os.X_OK) for entry in entries)
    except OSError:
        return False
