"""Dropping volumes without a daemon: the only thing in this package that changes a storage
directory, and so the only one that takes its locks."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from pccheck_native import dropping, layout
from pccheck_wire.errors import RefusedError, StoreLockedError
from pccheck_wire.owners import owner_of

from . import offline
from .output import Document


def drop(
    storage: offline.Storage, job: str, *, rank: int | None, uid: int | None, dry_run: bool
) -> Document:
    """See `offline.Storage.drop`."""
    storage.scan(uid=uid, job=job, rank=rank)  # its errors are told in our words
    with contextlib.ExitStack() as held:
        if not dry_run:
            held.enter_context(_no_daemon(storage.path))
        try:
            files = dropping.victims(storage.path, uid=uid, job=job, rank=rank)
            owner_of(job, rank, (victim.file.uid for victim in files))
            if not dry_run:
                with contextlib.suppress(OSError):  # of drops before; a daemon's start has it, too
                    dropping.clear(storage.path)
                dropping.drop([victim.file.path for victim in files])
        except dropping.InUseError as error:
            raise RefusedError(
                f"{error}; nothing was dropped", hint="end that process, then try again"
            ) from error
        except PermissionError as error:
            raise offline.denied(error.filename or storage.path) from error
    return dropping.document(storage.path, files, dropped=not dry_run)


@contextlib.contextmanager
def _no_daemon(storage: Path) -> Iterator[None]:
    """Holds the daemon's lock. It is never made here: a file of another user would keep the daemon
    out; where there is none, no daemon has ever been."""
    try:
        descriptor = os.open(layout.lock_path(storage), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise StoreLockedError(
                f"a pccheckd (pid {pid}) serves {storage}",
                hint=f"have it do that: pccheckctl --socket {socket} drop"
                if (socket := layout.noted_socket(storage))
                else "have it do that: pccheckctl drop without --storage",
            ) from error
        yield
    finally:
        os.close(descriptor)
