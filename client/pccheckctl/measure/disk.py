"""Direct writes, reads and flushes of a disk, measured on a file that is removed afterwards; for
`bench`, `tune` and `doctor`."""

from __future__ import annotations

import errno
import mmap
import os
import threading
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


def sequential(
    fd: int, *, size: int, chunk: int, threads: int, write: bool, limit_s: float
) -> tuple[int, float]:
    """Bytes and seconds of one pass over the file, as far as the time allows. The threads take
    chunks in turn; a write ends with one fdatasync."""
    move = _write if write else _read
    chunks = iter(range(0, size - size % chunk, chunk))
    lock = threading.Lock()
    began = time.monotonic()

    def work(buffer: mmap.mmap) -> int:
        moved = 0
        with memoryview(buffer) as view:
            while time.monotonic() - began < limit_s:
                with lock:
                    offset = next(chunks, None)
                if offset is None:
                    break
                move(fd, view, offset)
                moved += chunk
        return moved

    with ThreadPoolExecutor(threads) as team:
        buffers = [noise(chunk) for _ in range(threads)]
        began = time.monotonic()
        moved = sum(team.map(work, buffers))
    if write:
        os.fdatasync(fd)
    return moved, time.monotonic() - began


def _write(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


def _read(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the file ends early")
        done += count


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
    with memoryview(wanted) as view:
        _write(fd, view, 0)
    os.fdatasync(fd)
    with memoryview(found) as view:
        _read(fd, view, 0)
    return bytes(found) == bytes(wanted)
