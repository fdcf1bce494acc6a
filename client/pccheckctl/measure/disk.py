"""A file on a disk that is removed afterwards, and how fast it is read and flushed, for `bench`,
`tune` and `doctor`. The daemon's own engines measure writes: `pccheck_native.measure_engine`."""

from __future__ import annotations

import errno
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from pccheck_wire.errors import NoStoreError, PccheckError, RefusedError, StorageFullError

ALIGN = 4096
_NOISE_BYTES = 1 << 20


class Scratch:
    """A file in a directory, opened for direct I/O where that is possible. It has no name where the
    file system allows that, and is removed in any case."""

    def __init__(self, place: Path) -> None:
        """Raises NoStoreError, RefusedError."""
        self.place = place
        self.path: Path | None = None
        self.direct = True
        mode = os.O_RDWR | os.O_CLOEXEC
        try:
            self.fd = self._open(mode)
        except OSError as error:
            raise _cannot(error, place) from error

    def _open(self, mode: int) -> int:
        try:
            fd = os.open(self.place, mode | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            self.path = self.place / f".pccheckctl-{os.getpid()}.tmp"
            fd = os.open(self.path, mode | os.O_CREAT | os.O_EXCL, 0o600)
        try:  # a second open, so that a refusal of O_DIRECT is not taken for another error
            direct = os.open(f"/proc/self/fd/{fd}", mode | os.O_DIRECT)
        except OSError:
            self.direct = False
            return fd
        os.close(fd)
        return direct

    def reserve(self, size: int) -> None:
        """Allocates the space. Raises StorageFullError."""
        try:
            os.posix_fallocate(self.fd, 0, size)
        except OSError as error:
            raise _cannot(error, self.place) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        os.close(self.fd)
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _cannot(error: OSError, place: Path) -> PccheckError:
    if isinstance(error, PermissionError):
        return RefusedError(
            f"uid {os.geteuid()} may not write to {place}",
            hint="run this as the user of pccheckd, or as root",
        )
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return NoStoreError(f"there is no directory {place}", hint=f"create it: mkdir -p {place}")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StorageFullError(f"{place} has no space left", hint="use a smaller --size")
    return NoStoreError(f"{place} cannot be used: {error.strerror or error}")


def noise(size: int) -> mmap.mmap:
    """Page-aligned memory that no layer below can compress."""
    made = mmap.mmap(-1, size)
    block = os.urandom(min(size, _NOISE_BYTES))
    for at in range(0, size, len(block)):
        made[at : at + len(block)] = block[: size - at]
    return made


def reads(fd: int, *, size: int, chunk: int, threads: int, limit_s: float) -> float:
    """Bytes per second of a pass over the file, as far as the time allows. The threads take chunks
    in turn."""
    began = time.monotonic()

    def work(first: int) -> int:
        moved, buffer = 0, mmap.mmap(-1, chunk)
        for offset in range(first * chunk, size, threads * chunk):
            if moved and time.monotonic() - began > limit_s:
                break
            moved += _read(fd, buffer, offset)
        return moved

    with ThreadPoolExecutor(threads) as team:
        moved = sum(team.map(work, range(threads)))
    return moved / (time.monotonic() - began)


def _read(fd: int, buffer: mmap.mmap, offset: int) -> int:
    """Fills the buffer; its size."""
    done = 0
    with memoryview(buffer) as view:
        while done < len(view):
            count = os.preadv(fd, [view[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, "the file ends early")
            done += count
    return done


def flushes(fd: int, *, count: int, limit_s: float) -> list[float]:
    """Seconds of single 4 KiB writes with their fdatasync, in ascending order."""
    block = noise(ALIGN)
    taken: list[float] = []
    began = time.monotonic()
    while len(taken) < count and (not taken or time.monotonic() - began < limit_s):
        start = time.monotonic()
        os.pwrite(fd, block, (len(taken) % 16) * ALIGN)
        os.fdatasync(fd)
        taken.append(time.monotonic() - start)
    return sorted(taken)


def reads_back(fd: int, size: int) -> bool:
    """Whether the file returns what was written to it and flushed."""
    wanted, found = noise(size), mmap.mmap(-1, size)
    done = 0
    with memoryview(wanted) as view:
        while done < size:
            done += os.pwrite(fd, view[done:], done)
    os.fdatasync(fd)
    _read(fd, found, 0)
    return bytes(found) == bytes(wanted)
