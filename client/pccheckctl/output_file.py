"""Files and directories that appear whole or not at all: written under a temporary name, synced,
then renamed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from pathlib import Path
from typing import Protocol, Self

from pccheck_wire.basics import size_text
from pccheck_wire.errors import PccheckError, StorageFullError, UsageError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class Output(Protocol):
    """Use it as a context manager; without `commit` nothing is left behind."""

    target: Path
    temporary: Path

    def size(self) -> int: ...
    def commit(self) -> None:
        """Durable under its name on return. Raises UsageError when somebody else made it first."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...


class OutputFile:
    """An `Output` that is a file."""

    def __init__(self, target: Path, *, force: bool) -> None:
        """Raises UsageError when `target` exists, unless `force`; always for a directory."""
        self.target = target
        self.force = force
        self.temporary = _temporary(target)
        self.descriptor = -1
        if target.is_dir():
            raise UsageError(f"{target} is a directory", hint="name a file in it")
        if not force and target.exists():
            raise _exists(target)

    def __enter__(self) -> Self:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self.descriptor = os.open(self.temporary, flags, 0o666)
        except OSError as error:
            raise _cannot(self.target, error) from error
        return self

    def reserve(self, nbytes: int) -> None:
        """Takes all the room at once. Raises StorageFullError."""
        reserve(self.descriptor, nbytes, self.target.parent)

    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def commit(self) -> None:
        os.fsync(self.descriptor)
        if self.force:
            self.temporary.replace(self.target)
        else:
            self._link()
        _sync(self.target.parent)

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


class OutputDirectory:
    """An `Output` that is a directory of torch.distributed.checkpoint's."""

    def __init__(self, target: Path, *, force: bool) -> None:
        """Raises UsageError when `target` exists, unless `force` and it is one of ours to replace:
        a slip must not take a home directory away."""
        self.target = target
        self.force = force
        self.temporary = _temporary(target)
        if target.exists() and not force:
            raise _exists(target)
        if target.exists() and not _is_dcp(target):
            raise UsageError(
                f"{target} is no directory of torch.distributed.checkpoint's: --force leaves it",
                hint="name another --output",
            )

    def __enter__(self) -> Self:
        try:
            self.temporary.mkdir()
        except OSError as error:
            raise _cannot(self.target, error) from error
        return self

    def size(self) -> int:
        return sum(file.stat().st_size for file in self.temporary.iterdir())

    def commit(self) -> None:
        for file in self.temporary.iterdir():
            _sync(file)
        _sync(self.temporary)
        if not self.force and self.target.exists():
            raise _exists(self.target)
        if self.target.exists():
            _exchange(self.temporary, self.target)  # what was there goes with the temporary name
        else:
            self.temporary.rename(self.target)
        _sync(self.target.parent)

    def __exit__(self, *_exception: object) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)


def reserve(descriptor: int, nbytes: int, where: Path) -> None:
    """Takes all the room at once: a full disk is met here and not under a mapping, where it would
    end the process. Raises StorageFullError."""
    if nbytes == 0:
        return
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except (OSError, OverflowError) as error:
        number = error.errno if isinstance(error, OSError) else errno.EFBIG
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StorageFullError(
                f"{where} has no room for {size_text(nbytes)}", hint="choose another --output"
            ) from error
        raise


def _temporary(target: Path) -> Path:
    if target.name in ("", ".."):
        raise UsageError(f"{target} is a directory", hint="name what is to be made in it")
    return target.with_name(f".{target.name}.{os.getpid()}.tmp")


def _is_dcp(place: Path) -> bool:
    if not place.is_dir() or place.is_symlink():
        return False
    names = {file.name for file in place.iterdir()}
    return ".metadata" in names and all(
        name == ".metadata" or name.endswith(".distcp") for name in names
    )


def _exchange(one: Path, other: Path) -> None:
    """Both names at once: a directory that is not empty cannot be renamed over."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) != 0:
        number = ctypes.get_errno()
        raise PccheckError(
            f"{other} cannot be replaced: {os.strerror(number)}", hint="remove it, then try again"
        )


def _sync(place: Path) -> None:
    descriptor = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot(target: Path, error: OSError) -> PccheckError:
    return PccheckError(
        f"{target.parent} cannot take {target.name}: {error.strerror}",
        hint="choose another --output",
    )


def _exists(target: Path) -> UsageError:
    return UsageError(f"{target} exists", hint="overwrite it with --force, or name another")
