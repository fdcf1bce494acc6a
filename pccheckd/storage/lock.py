"""Checks of the storage directory, and its lock."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

from pccheck_native import layout, mounts
from pccheck_wire.errors import NoStoreError, StoreLockedError
from pccheckd.base.errors import SHORTAGE_HINT, shortage
from pccheckd.base.logs import LOG
from pccheckd.config.options import Config


def check(config: Config, *, make: bool = False) -> None:
    """Raises NoStoreError that names the fix when `config.storage` cannot hold volumes. With `make`
    creates it when it is missing, but not its parents: they may be a disk that is not mounted."""
    place = config.storage
    if make:
        with contextlib.suppress(OSError):  # reported below
            place.mkdir()
            LOG.info("created the storage directory %s", place)
    try:
        found = place.stat()
    except OSError as error:
        raise NoStoreError(
            f"the storage directory {place} cannot be used: {error.strerror}",
            hint=_fix(error, f"allow uid {os.geteuid()} to enter the directories above it")
            if error.errno != errno.ENOENT else f"create it: mkdir -p {place}",
        ) from error  # fmt: skip
    if not stat.S_ISDIR(found.st_mode):
        raise NoStoreError(f"{place} is not a directory", hint="--storage takes a directory")
    require_ours(place)
    writable = os.access(place, os.R_OK | os.W_OK | os.X_OK)
    if not writable or os.statvfs(place).f_flag & os.ST_RDONLY:
        raise NoStoreError(
            f"the storage directory {place} is not writable for uid {os.geteuid()} "
            f"(owner {place.stat().st_uid})",
            hint=f"mount it read-write and give it to that user: chown {os.geteuid()} {place}",
        )
    kind = mounts.mount_of(place.resolve(), mounts.MOUNTINFO.read_bytes()).kind
    why = mounts.unfit(kind)
    if why and not config.allow_any_filesystem:
        raise NoStoreError(
            f"{place} is on {kind}, which {why}",
            hint="use a directory on a local ext4 or xfs disk; "
            "--allow-any-filesystem overrides this for tests",
        )
    if why:
        LOG.warning("%s is on %s, which %s: durable checkpoints may be lost", place, kind, why)


def require_ours(place: Path) -> None:
    """Raises NoStoreError when another user could replace the volumes in it."""
    found = place.stat()
    if found.st_uid not in (0, os.geteuid()):
        raise NoStoreError(
            f"the storage directory {place} belongs to uid {found.st_uid}, and that user could "
            "replace the checkpoints in the directory",
            hint=f"give it to the user that runs pccheckd: chown {os.geteuid()} {place}",
        )
    if found.st_mode & stat.S_IWOTH:
        LOG.warning(
            "every user may write to %s, so any user could replace the checkpoints: chmod o-w, "
            "or use a directory in it", place,
        )  # fmt: skip


def lock(path: Path, purpose: str) -> int:
    """Takes the flock at `path` and writes this pid into it; the descriptor is the lock.

    Raises StoreLockedError that names the pid of its holder; NoStoreError without locks there.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise NoStoreError(
            f"{path} cannot be opened: {error.strerror}",
            hint=f"remove {path}; pccheckd makes a new file"
            if error.errno in (errno.EISDIR, errno.ELOOP, errno.ENXIO)
            else _fix(error, "give the directory to the user that runs pccheckd"),
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        note = os.pread(descriptor, 32, 0).strip()  # others may have written to it
        holder = note.decode() if note.isdigit() else "unknown"
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise NoStoreError(
                f"{path} cannot be locked: {error.strerror}",
                hint="choose a directory on a local disk",
            ) from error
        raise StoreLockedError(
            f"another pccheckd (pid {holder}) {purpose}",
            hint=f"use that one, or stop it first: kill {holder}",
        ) from error
    with contextlib.suppress(OSError):  # a full disk: only the lock is needed
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def sweep(place: Path) -> int:
    """Removes the files of an interrupted creation; how many. Needs the lock. Raises NoStoreError
    when the directory cannot be read. What cannot be read in it is one job's trouble: the survey of
    the volumes reports it."""
    try:
        left = layout.list_temporary(place)
    except OSError as error:
        raise NoStoreError(
            f"the files in the storage directory {place} cannot be listed: {error.strerror}",
            hint=_fix(error, "give all of them to the user that runs pccheckd"),
        ) from error
    count = 0
    for path in left:
        try:
            path.unlink(missing_ok=True)
            count += 1
        except OSError as error:
            LOG.warning("a file that an interrupted start left behind cannot be removed: %s", error)
    return count


def _fix(error: OSError, of_rights: str) -> str:
    """What to do about an error: `of_rights` when a permission is missing."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return of_rights
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free space on that disk"
    if error.errno == errno.ENOTDIR:
        return "choose another directory: a file is in its path"
    if error.errno == errno.ENOENT:  # the directory exists: /proc and the like
        return "choose a directory on a local disk: no file can be created in this one"
    return SHORTAGE_HINT if shortage(error) else "check the disk: dmesg"
