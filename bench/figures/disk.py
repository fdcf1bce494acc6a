"""A disk of a known speed: a file behind a loop device, limited by the kernel's blkio cgroup.

The disks of test machines acknowledge writes from a cache, or are much faster than the network disk
of the paper. The limit is on the loop device, so it holds for direct writes, for pages that the
kernel writes back, and for reads, whichever process makes them.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from bench.common import MIB, BenchError, file_system, require_room

FIX = "measure a disk as it is with --directory DIR"
#: Measured speeds as parts of the limit, if the limit holds.
LEAST, MOST = 0.6, 1.3


@dataclass(frozen=True, slots=True)
class Disk:
    """Where contenders write, and what the kernel lets through there, in bytes a second."""

    path: Path
    limit: int  # 0: none
    direct: float  # O_DIRECT, 1 MiB each, synced
    buffered: float  # through the page cache, synced

    def text(self) -> str:
        measured = (
            f"{self.direct / 1e6:.0f} MB/s direct, {self.buffered / 1e6:.0f} MB/s through the page "
            "cache, both synced"
        )
        if not self.limit:
            return f"the disk as it is: {measured}"
        return f"ext4 on a loop device, limited to {self.limit / 1e6:.0f} MB/s: {measured}"

    def facts(self) -> dict[str, object]:
        return asdict(self) | {"path": "", "file_system": file_system(self.path)}


@contextmanager
def unlimited(directory: Path) -> Iterator[Disk]:
    """A new directory on the disk of `directory`; removed at the end."""
    with tempfile.TemporaryDirectory(prefix=".figures-", dir=directory) as made:
        path = Path(made).resolve()
        yield Disk(path, 0, *_speeds(path, 64 * MIB))


@contextmanager
def limited(directory: Path, size_bytes: int, limit: int) -> Iterator[Disk]:
    """A file system of `size_bytes` in a file in `directory` that writes and reads at most `limit`
    bytes a second. Raises BenchError, with the fix, where that is not possible or does not hold."""
    if os.geteuid():
        raise BenchError(f"a disk with a limit needs root: run as root, or {FIX}")
    limiter = _find_limiter()
    require_room(directory, size_bytes)
    with ExitStack() as stack:
        made = tempfile.TemporaryDirectory(prefix=".figures-", dir=directory)
        scratch = Path(stack.enter_context(made))
        image, path = scratch / "disk.img", scratch / "mounted"
        path.mkdir()
        with image.open("wb") as file:  # no holes: nothing is allocated while contenders write
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        device = _call("losetup", "--direct-io=on", "--find", "--show", str(image))
        stack.callback(_call, "losetup", "--detach", device)
        _call("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
        _call("mount", device, str(path))
        stack.callback(_unmount, path)
        number = Path(f"/sys/block/{Path(device).name}/dev").read_text().strip()
        stack.enter_context(limiter(number, limit))
        _speeds(path, limit // 4)  # the kernel lets a burst pass at first
        disk = Disk(path.resolve(), limit, *_speeds(path, limit))
        if not all(LEAST < speed / limit < MOST for speed in (disk.direct, disk.buffered)):
            raise BenchError(f"the kernel's limit does not hold here ({disk.text()}); {FIX}")
        yield disk


def _unmount(path: Path) -> None:
    """Also when a process that was killed has not closed its files yet."""
    for _ in range(20):
        if subprocess.run(["umount", str(path)], capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.1)
    _call("umount", "--lazy", str(path))


def _call(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BenchError(f"{command[0]} is missing; install it, or {FIX}") from None
    if done.returncode:
        raise BenchError(f"{' '.join(command)} failed ({done.stderr.strip()}); {FIX}")
    return done.stdout.strip()


# -- the limit ---------------------------------------------------------------------------------

Limiter = Callable[[str, int], AbstractContextManager[None]]


def _find_limiter() -> Limiter:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, flags, *_ = line.split()
        root = Path(place)
        if kind == "cgroup" and "blkio" in flags.split(","):
            return partial(_limit_v1, root)
        if kind == "cgroup2" and "io" in (root / "cgroup.controllers").read_text().split():
            return partial(_limit_v2, root)
    raise BenchError(f"no cgroup with the controller blkio or io is mounted; {FIX}")


@contextmanager
def _limit_v1(root: Path, number: str, limit: int) -> Iterator[None]:
    """In the root group: the kernel's threads write pages back there, and this process joins it."""
    files = [root / f"blkio.throttle.{way}_bps_device" for way in ("read", "write")]
    with _joined(root, "blkio"):
        try:
            for file in files:
                _put(file, f"{number} {limit}")
            yield
        finally:
            for file in files:  # the next loop device has the same number
                _put(file, f"{number} 0")


@contextmanager
def _limit_v2(root: Path, number: str, limit: int) -> Iterator[None]:
    """In a group of its own; the kernel counts written-back pages for the group that dirtied them,
    if the group has both controllers."""
    _put(root / "cgroup.subtree_control", "+io +memory")
    group = root / f"pccheck-figures-{os.getpid()}"
    group.mkdir()
    try:
        _put(group / "io.max", f"{number} rbps={limit} wbps={limit}")
        with _joined(group, ""):
            yield
    finally:
        group.rmdir()


@contextmanager
def _joined(group: Path, controller: str) -> Iterator[None]:
    """This process, and those that it starts, in `group`; afterwards where they were before."""
    before = Path("/")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers == controller:
            before = Path(place)
    root = group if controller else group.parent
    _put(group / "cgroup.procs", str(os.getpid()))
    try:
        yield
    finally:
        _put(root / before.relative_to("/") / "cgroup.procs", str(os.getpid()))


def _put(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise BenchError(f"cannot write {text!r} to {file} ({error.strerror}); {FIX}") from None


# -- what it lets through ----------------------------------------------------------------------


def _speeds(directory: Path, size_bytes: int) -> tuple[float, float]:
    """Bytes a second of direct and of buffered writes, both synced."""
    size_bytes = max(1, size_bytes // MIB) * MIB
    path = directory / "speed.bin"
    with mmap.mmap(-1, MIB) as buffer:
        buffer.write(os.urandom(MIB))
        seconds = [_seconds(path, buffer, size_bytes, flags) for flags in (os.O_DIRECT, 0)]
    path.unlink()
    return size_bytes / seconds[0], size_bytes / seconds[1]


def _seconds(path: Path, buffer: mmap.mmap, size_bytes: int, flags: int) -> float:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o600)
    try:
        start = time.monotonic()
        for offset in range(0, size_bytes, MIB):
            os.pwrite(descriptor, buffer, offset)
        os.fsync(descriptor)
        return time.monotonic() - start
    finally:
        os.close(descriptor)
