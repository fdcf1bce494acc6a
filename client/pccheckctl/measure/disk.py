"""A file on a disk that is removed afterwards, and how fast it is written, read and flushed, for
`bench`, `tune` and `doctor`."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pccheck_wire.errors import NoStoreError, PccheckError, RefusedError

ALIGN = 4096
_NOISE_BYTES = 1 << 20


@contextlib.contextmanager
def scratch(place: Path) -> Iterator[tuple[int, bool]]:
    """A file without a name in a directory: its descriptor, and whether that reads and writes
    directly. Raises NoStoreError, RefusedError."""
    try:
        file = tempfile.TemporaryFile(dir=place, buffering=0)  # noqa: SIM115 - closed below
    except OSError as error:
        raise _cannot(error, place) from error
    with file:
        yield file.fileno(), _make_direct(file.fileno())


def _make_direct(fd: int) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def _cannot(error: OSError, place: Path) -> PccheckError:
    if isinstance(error, PermissionError):
        return RefusedError(
            f"uid {os.geteuid()} may not write to {place}",
            hint="run this as the user of pccheckd, or as root",
        )
    if isinstance(error, FileNotFoundError):
        return NoStoreError(f"there is no directory {place}", hint=f"create it: mkdir -p {place}")
    if isinstance(error, NotADirectoryError):
        return NoStoreError(
            f"{place} is not a directory", hint="name the directory for the checkpoints"
        )
    return NoStoreError(f"{place} cannot be used: {error.strerror or error}")


def noise(size: int) -> mmap.mmap:
    """Page-aligned memory that no layer below can compress."""
    made = mmap.mmap(-1, size)
    block = os.urandom(min(size, _NOISE_BYTES))
    for at in range(0, size, len(block)):
        made[at : at + len(block)] = block[: size - at]
    return made


def writes(fd: int, *, size: int, chunk: int, threads: int) -> float:
    """Bytes per second of a pass over the file, flush included; `size` in whole chunks."""
    block = noise(chunk)
    return _pass(size, chunk, threads, lambda offset: _write(fd, block, offset), fd=fd)


def reads(fd: int, *, size: int, chunk: int, threads: int, limit_s: float) -> float:
    """Bytes per second of a pass over the file, as far as the time allows."""
    buffers = threading.local()

    def read(offset: int) -> None:
        if not hasattr(buffers, "own"):
            buffers.own = mmap.mmap(-1, chunk)
        _read(fd, buffers.own, offset)

    return _pass(size, chunk, threads, read, limit_s)


def _pass(
    size: int, chunk: int, threads: int, move: Callable[[int], None], limit_s: float = math.inf,
    *, fd: int | None = None,
) -> float:  # fmt: skip
    """The threads take chunks in turn; then `fd` is flushed."""
    began = time.monotonic()

    def work(first: int) -> int:
        moved = 0
        for offset in range(first * chunk, size, threads * chunk):
            if moved and time.monotonic() - began > limit_s:
                break
            move(offset)
            moved += chunk
        return moved

    with ThreadPoolExecutor(threads) as team:
        moved = sum(team.map(work, range(threads)))
    if fd is not None:
        os.fdatasync(fd)
    return moved / (time.monotonic() - began)


def _read(fd: int, buffer: mmap.mmap, offset: int) -> None:
    done = 0
    with memoryview(buffer) as view:
        while done < len(view):
            count = os.preadv(fd, [view[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, "the file ends early")
            done += count


def _write(fd: int, buffer: mmap.mmap, offset: int) -> None:
    done = 0
    with memoryview(buffer) as view:
        while done < len(view):
            done += os.pwrite(fd, view[done:], offset + done)


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
    _write(fd, wanted, 0)
    os.fdatasync(fd)
    _read(fd, found, 0)
    return bytes(found) == bytes(wanted)
