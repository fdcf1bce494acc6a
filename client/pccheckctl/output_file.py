"""A file that appears whole or not at all: written under a temporary name, synced, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Self

from pccheck_wire.errors import PccheckError, StorageFullError, UsageError


class OutputFile:
    """Use it as a context manager; without `commit` nothing is left behind."""

    def __init__(self, target: Path, *, force: bool) -> None:
        """Raises UsageError when `target` exists, unless `force`."""
        self.target = target
        self.force = force
        self.temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        self.descriptor = -1
        if not force and target.exists():
            raise _exists(target)

    def __enter__(self) -> Self:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self.descriptor = os.open(self.temporary, flags, 0o666)
        except OSError as error:
            raise PccheckError(
                f"{self.temporary.parent} cannot take {self.target.name}: {error.strerror}",
                hint="choose another --output",
            ) from error
        return self

    def reserve(self, size: int) -> None:
        """Takes all the room at once: a full disk is met here and not under a mapping, where it
        would end the process. Raises StorageFullError."""
        if size == 0:
            return
        try:
            os.posix_fallocate(self.descriptor, 0, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StorageFullError(
                    f"{self.target.parent} has no room for {size} bytes",
                    hint="choose another --output",
                ) from error
            raise

    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def commit(self) -> None:
        """Durable under its name on return. Raises UsageError when somebody else made it first."""
        os.fsync(self.descriptor)
        if self.force:
            self.temporary.replace(self.target)
        else:
            self._link()
        directory = os.open(self.target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def _link(self) -> None:
        """A hard link never replaces; where there are none, look and rename."""
        try:
            os.link(self.temporary, self.target)
        except FileExistsError:
            raise _exists(self.target) from None
        except OSError:
            if self.target.exists():
                raise _exists(self.target) from None
            self.temporary.replace(self.target)

    def __exit__(self, *_exception: object) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        with contextlib.suppress(FileNotFoundError):
            self.temporary.unlink()


def _exists(target: Path) -> UsageError:
    return UsageError(f"{target} exists", hint="overwrite it with --force, or name another")
