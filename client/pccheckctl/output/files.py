"""Files and directories that appear whole or not at all: written under a temporary name, flushed,
then renamed."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Self

from pccheck_native import layout
from pccheck_wire.basics import size_text
from pccheck_wire.errors import PccheckError, StorageFullError, UsageError

_AT_FDCWD, _NOREPLACE, _EXCHANGE = -100, 1, 2

#: In a directory of torch.distributed.checkpoint: what that has no place for.
NOTE = "pccheck.json"

#: Directories that are written: the name of the file that each has, and the names of the others.
DIRECTORIES = {
    "dcp": (".metadata", "*.distcp", NOTE),
    "huggingface": ("model*.safetensors", "model.safetensors.index.json"),
}


class Output:
    """Use it as a context manager: without `commit` it leaves nothing behind. A file is written
    through `descriptor`, a directory (one of DIRECTORIES, or "") through `temporary`."""

    def __init__(self, target: Path, *, force: bool, directory: str = "") -> None:
        """Raises UsageError when `target` exists, unless `force`. A directory is only replaced when
        it has nothing but files of that kind: a slip must not remove a home directory."""
        self.target = target
        self.directory = directory
        self.temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
        self.descriptor = -1
        self._force = force
        if str(target) == "-":
            raise UsageError("--output - does not write to stdout", hint="name a file")
        if target.name in ("", "..") or (target.is_dir() and not directory):
            raise UsageError(f"{target} is a directory", hint="name a file in it")
        if target.exists() and not directory and not target.is_file():
            # A rename would put a file in the place of /dev/null, for every process of the machine.
            raise UsageError(f"{target} is not a regular file", hint="name a file")
        if target.exists() and directory and not _holds(target, directory):
            raise UsageError(
                f"{target} exists, and is not what --format {directory} writes: it is not replaced",
                hint="name another --output",
            )
        if target.exists() and not force:
            raise _exists(target)

    def __enter__(self) -> Self:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            if self.directory:
                self.temporary.mkdir()
            else:
                self.descriptor = os.open(self.temporary, flags, 0o666)
        except OSError as error:
            raise PccheckError(
                f"cannot create {self.target}: {error.strerror}", hint="choose another --output"
            ) from error
        return self

    def size(self) -> int:
        files = self.temporary.iterdir() if self.directory else (self.temporary,)
        return sum(file.stat().st_size for file in files)

    def commit(self) -> None:
        """Durable under its name on return. Raises UsageError when another process was faster."""
        for file in self.temporary.iterdir() if self.directory else ():
            layout.sync(file)
        layout.sync(self.temporary)
        self._rename()
        layout.sync(self.target.parent)

    def _rename(self) -> None:
        """What is replaced gets the temporary name, and is removed with it."""
        flags = _EXCHANGE if self._force and self.target.exists() else _NOREPLACE
        libc = ctypes.CDLL(None, use_errno=True)
        names = os.fsencode(self.temporary), os.fsencode(self.target)
        if libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], flags) == 0:
            return
        number = ctypes.get_errno()
        if number == errno.EEXIST:
            raise _exists(self.target)
        if number != errno.EINVAL or (self.directory and self.target.exists()):
            raise PccheckError(
                f"cannot replace {self.target}: {os.strerror(number)}",
                hint="remove it, then try again",
            )
        if self.target.exists() and not self._force:  # a file system without these flags
            raise _exists(self.target)
        self.temporary.replace(self.target)

    def __exit__(self, *_exception: object) -> None:
        if self.directory:
            shutil.rmtree(self.temporary, ignore_errors=True)
            return
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        with contextlib.suppress(FileNotFoundError):
            self.temporary.unlink()


def write_text(path: str, text: str, *, force: bool) -> None:
    """Raises as `Output` does."""
    with Output(Path(path), force=force) as output:
        with os.fdopen(os.dup(output.descriptor), "w", encoding="utf-8") as file:
            file.write(text)
        output.commit()


def reserve(descriptor: int, nbytes: int, where: Path) -> None:
    """Allocates the space before it is used: under a mapping a full disk would end the process.
    Raises StorageFullError."""
    if nbytes == 0:
        return
    try:
        # ext4 allocates all that is left before it refuses, and others' writes fail meanwhile.
        if nbytes > shutil.disk_usage(descriptor).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StorageFullError(
                f"{where} has no space for {size_text(nbytes)}",
                hint="choose another directory, or free space",
            ) from error
        raise


def _holds(place: Path, directory: str) -> bool:
    if not place.is_dir() or place.is_symlink():
        return False
    names = [file.name for file in place.iterdir()]
    needed, *_ = patterns = DIRECTORIES[directory]
    return any(fnmatchcase(name, needed) for name in names) and all(
        any(fnmatchcase(name, pattern) for pattern in patterns) for name in names
    )


def _exists(target: Path) -> UsageError:
    return UsageError(f"{target} exists", hint="overwrite it with --force, or name another file")
