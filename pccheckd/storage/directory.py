"""The storage directory under its name. It may be removed, moved, unmounted or mounted over while
the daemon runs; nothing is stored in its replacement, unless that is a new directory on the same
disk, in the same mount."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from pccheck_native import layout, mounts
from pccheck_wire.errors import NoStoreError, PccheckError
from pccheckd.base.logs import LOG

from . import lock as storage

_HINT = "create the directory again, or remount its disk; checkpoints then resume by themselves"


class StorageDirectory:
    """Owns the lock on the storage directory. The lock file shows whether a directory is the one
    that was locked."""

    def __init__(self, directory: Path, *, private_socket: Path | None = None) -> None:
        """`private_socket`: where a private daemon listens, for a note in the directory by which
        clients find it. Raises PccheckError when the directory cannot be locked, for example
        because another daemon serves it."""
        self.directory = directory
        self._private_socket = private_socket
        self._looking = threading.Lock()
        self._lock = self._taken()
        self._device, self._mount = directory.stat().st_dev, self._mounted_at()
        self._identity, self._number = layout.identity(directory), layout.number(directory)
        self.missing = ""  # why nothing can be stored, as of the last look

    def close(self) -> None:
        if self._private_socket is not None and not self.look():
            layout.socket_note(self.directory).unlink(missing_ok=True)
        os.close(self._lock)

    def look(self) -> str:
        """Checks again; "" or why nothing can be stored. Blocks on the disk."""
        with self._looking:
            why = self._why()
            if bool(why) != bool(self.missing):
                LOG.warning(
                    "%s", why or f"the storage directory {self.directory} is available again"
                )
            self.missing = why
            return why

    @property
    def number(self) -> str:
        """layout.number; "" when the last check found no storage directory."""
        return "" if self.missing else self._number

    @property
    def is_private(self) -> bool:
        """Whether a training process started this daemon (autostart), for one user's processes."""
        return self._private_socket is not None

    def require(self) -> None:
        """Raises NoStoreError when the last check found no storage directory."""
        if self.missing:
            raise NoStoreError(self.missing, hint=_HINT, retryable=True)

    def _taken(self) -> int:
        lock = storage.lock(layout.lock_path(self.directory), f"serves {self.directory}")
        if self._private_socket is not None:
            with contextlib.suppress(OSError):  # a full disk: clients find no note
                layout.note_socket(self.directory, self._private_socket)
        else:
            with contextlib.suppress(OSError):  # of a private daemon that was killed
                layout.socket_note(self.directory).unlink()
        return lock

    def _why(self) -> str:
        named = f"the storage directory {self.directory}"
        try:
            with contextlib.suppress(FileNotFoundError):
                there = os.lstat(layout.lock_path(self.directory))
                if os.path.samestat(there, os.fstat(self._lock)):
                    return ""
            found = self.directory.stat()
        except (FileNotFoundError, NotADirectoryError):
            return f"{named} is not there: it was removed, moved, or its disk was unmounted"
        except OSError as error:
            return f"{named} cannot be read: {error.strerror}"
        if found.st_dev != self._device or self._mounted_at() != self._mount:
            return f"another file system is mounted at {named}, or its own was unmounted"
        return self._adopt()

    def _mounted_at(self) -> str:
        """Where what holds the directory is mounted: a disk may be mounted at several places."""
        return mounts.mount_of(self.directory.resolve(), mounts.MOUNTINFO.read_bytes()).place

    def _adopt(self) -> str:
        """Locks a new directory on the same disk, as after rm -rf and mkdir: it is empty, or was
        filled on purpose."""
        try:
            storage.require_ours(self.directory)
            lock = self._taken()
        except PccheckError as error:
            return error.message
        with contextlib.suppress(OSError):
            if not (layout.list_volumes(self.directory) or layout.list_hidden(self.directory)):
                layout.replace(self.directory, self._identity)
        try:
            self._identity, self._number = (
                layout.identity(self.directory), layout.number(self.directory)
            )  # fmt: skip
        except OSError as error:
            os.close(lock)
            return f"the storage directory {self.directory} cannot be read: {error.strerror}"
        before, self._lock = self._lock, lock
        os.close(before)
        LOG.warning(
            "the storage directory %s, or its lock file, was removed and created again while "
            "pccheckd was running; pccheckd uses the new one", self.directory,
        )  # fmt: skip
        return ""
