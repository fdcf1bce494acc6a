"""What a disk does with direct writes, reads and flushes; for `bench` and `doctor`. Files that are
made here are gone afterwards."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self

from pccheck_wire.errors import NoStoreError, PccheckError, RefusedError, StorageFullError

ALIGN = 4096  # what is tried where the kernel does not say
_AT_EMPTY_PATH, _AT_FDCWD = 0x1000, -100
_STATX_DIOALIGN = 0x2000  # Linux 6.1
_NOISE_BYTES = 1 << 20


class Alignment(NamedTuple):
    """What O_DIRECT asks for on a file; zeros where it is not possible."""

    memory: int
    offset: int


class _Statx(ctypes.Structure):
    """struct statx up to what is read here; the kernel fills 256 bytes."""

    _fields_ = [
        ("mask", ctypes.c_uint32),
        ("before", ctypes.c_uint8 * 148),
        ("dio_mem_align", ctypes.c_uint32),
        ("dio_offset_align", ctypes.c_uint32),
        ("after", ctypes.c_uint8 * 96),
    ]


def dio_alignment(descriptor: int) -> Alignment | None:
    """As statx(2) says; None where it does not."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = _Statx()
    try:
        done = libc.statx(
            descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, ctypes.byref(found)
        )  # fmt: skip
    except AttributeError:
        return None
    if done != 0 or not found.mask & _STATX_DIOALIGN:
        return None
    return Alignment(found.dio_mem_align, found.dio_offset_align)


class Scratch:
    """A file of its own in a directory: open for direct I/O where that is possible, without a name
    from the beginning where the file system can do that, removed in any case."""

    def __init__(self, place: Path) -> None:
        """Raises NoStoreError, RefusedError."""
        self.place = place
        self.path: Path | None = None
        self.direct = True
        mode = os.O_RDWR | os.O_CLOEXEC
        try:
            self.fd = self._open(mode)
        except OSError as error:
            raise _told(error, place) from error

    def _open(self, mode: int) -> int:
        try:
            fd = os.open(self.place, mode | os.O_TMPFILE, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
            self.path = self.place / f".pccheckctl-{os.getpid()}.tmp"
            fd = os.open(self.path, mode | os.O_CREAT | os.O_EXCL, 0o600)
        try:  # open first and ask then: one refusal cannot be mistaken for the other
            direct = os.open(f"/proc/self/fd/{fd}", mode | os.O_DIRECT)
        except OSError:
            self.direct = False
            return fd
        os.close(fd)
        return direct

    def reserve(self, size: int) -> None:
        """Takes the room at once. Raises StorageFullError."""
        try:
            os.posix_fallocate(self.fd, 0, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise StorageFullError(
                    f"{self.place} has no room for {size} bytes", hint="use a smaller --size"
                ) from error
            raise _told(error, self.place) from error

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _told(error: OSError, place: Path) -> PccheckError:
    if isinstance(error, PermissionError):
        return RefusedError(
            f"uid {os.geteuid()} may not write to {place}",
            hint="run this as the user of pccheckd, or as root",
        )
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return NoStoreError(f"there is no directory {place}", hint=f"make it: mkdir -p {place}")
    return NoStoreError(f"{place} cannot be used: {error.strerror or error}")


def noise(size: int) -> mmap.mmap:
    """Page-aligned memory that no layer below can leave out or compress."""
    made = mmap.mmap(-1, size)
    block = os.urandom(min(size, _NOISE_BYTES))
    for at in range(0, size, len(block)):
        made[at : at + len(block)] = block[: size - at]
    return made


class Pass(NamedTuple):
    """One sequential pass over a file, as far as the time allowed."""

    bytes: int
    seconds: float  # the flush that ends a write included
    flush_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


def sequential(
    fd: int, *, size: int, chunk: int, threads: int, write: bool, limit_s: float
) -> Pass:
    """`threads` threads take chunks of the file in turn; a write ends with one fdatasync."""
    move = _writer(fd) if write else _reader(fd)
    next_chunk = iter(range(0, size - size % chunk, chunk))
    lock = threading.Lock()
    moved = [0] * threads
    failures: list[OSError] = []
    buffers = [noise(chunk) for _ in range(threads)]
    began = time.monotonic()

    def work(number: int) -> None:
        view = memoryview(buffers[number])
        try:
            while time.monotonic() - began < limit_s and not failures:
                with lock:
                    offset = next(next_chunk, None)
                if offset is None:
                    return
                move(view, offset)
                moved[number] += chunk
        except OSError as error:
            failures.append(error)
        finally:
            view.release()

    team = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for member in team:
        member.start()
    for member in team:
        member.join()
    if failures:
        raise failures[0]
    flushing = time.monotonic()
    if write:
        os.fdatasync(fd)
    ended = time.monotonic()
    return Pass(sum(moved), ended - began, ended - flushing)


def _writer(fd: int) -> Callable[[memoryview, int], None]:
    def write(view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            done += os.pwrite(fd, view[done:], offset + done)

    return write


def _reader(fd: int) -> Callable[[memoryview, int], None]:
    def read(view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(fd, [view[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, "the file ends early")
            done += count

    return read


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
    """Whether what is written and flushed is what is read."""
    wanted, found = noise(size), mmap.mmap(-1, size)
    with memoryview(wanted) as view:
        _writer(fd)(view, 0)
    os.fdatasync(fd)
    with memoryview(found) as view:
        _reader(fd)(view, 0)
    return bytes(found) == bytes(wanted)
