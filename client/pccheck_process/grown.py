"""Files that grew after a snapshot. CRIU refuses to restore a process whose files have another
size, and the process would write on behind what it wrote after the snapshot. So the files are cut
back, and what is cut off goes into FILE.pccheck-STEP first."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from pccheck_wire.errors import RefusedError

from .looking.found import OpenFile
from .procs.procfs import Proc, parse_fields, whole

_COPY_BYTES = 1 << 20


def refusals(written: Iterable[OpenFile], read: Iterable[OpenFile]) -> list[str]:
    """What cannot be made good: a file that is gone, is shorter than it was, or has grown although
    the process only read it."""
    written = _distinct(written)
    is_cut = {(one.device, one.inode) for one in written}
    only_read = [one for one in read if (one.device, one.inode) not in is_cut]
    return [*_refusals(written, may_grow=True), *_refusals(only_read, may_grow=False)]


def _refusals(files: Iterable[OpenFile], *, may_grow: bool) -> list[str]:
    found = []
    for one in _distinct(files):
        try:
            now = Path(one.path).stat()
        except OSError as error:
            found.append(f"{one.path} cannot be opened ({error.strerror})")
            continue
        size = now.st_size
        if now.st_dev == one.device and now.st_ino != one.inode:
            found.append(f"{one.path} is another file than at the snapshot, as after a rotation")
        elif (
            size != one.size_bytes and one.size_checked and not (may_grow and size > one.size_bytes)
        ):
            found.append(f"{one.path} has {size} bytes and had {one.size_bytes} at the snapshot")
    return found


def writers(files: Iterable[OpenFile]) -> list[str]:
    """Processes that write to these files now: cut back under them, a file loses bytes."""
    wanted = {(one.device, one.inode): one.path for one in _distinct(files)}
    proc = Proc(Path("/proc"))
    found: dict[str, None] = {}
    for pid in proc.pids() if wanted else []:
        for fd in proc.numbers(pid, "fd") or []:
            file = proc.stat(pid, "fd", fd)
            if file is None or (path := wanted.get((file.st_dev, file.st_ino))) is None:
                continue
            flags = whole(parse_fields(proc.text(pid, "fdinfo", fd)).get("flags"), 8)
            if flags & os.O_ACCMODE != os.O_RDONLY:
                found[f"process {pid} writes to {path}"] = None
    return [*found]


class CutFiles:
    """Cuts files back; `undo` puts everything where it was. A file that somebody has written to
    meanwhile stays as it is, and its end stays in the other file."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._cut: list[tuple[str, int, Path]] = []

    def cut(self, files: Iterable[OpenFile]) -> list[Path]:
        """Returns where the ends of the files are now. Raises RefusedError; then nothing is cut."""
        for one in _distinct(files):
            try:
                if Path(one.path).stat().st_size > one.size_bytes:
                    self._cut.append((one.path, one.size_bytes, self._keep(one)))
                    os.truncate(one.path, one.size_bytes)
            except OSError as error:
                self.undo()
                raise RefusedError(
                    f"{one.path} cannot be cut back to its size at the snapshot: {error.strerror}"
                ) from error
        return [kept for _, _, kept in self._cut]

    def undo(self) -> None:
        for path, size, kept in reversed(self._cut):
            with kept.open("rb") as source, Path(path).open("r+b") as target:
                if target.seek(0, os.SEEK_END) != size:
                    continue
                _copy(source.fileno(), target.fileno())
            kept.unlink()
        self._cut.clear()

    def _keep(self, one: OpenFile) -> Path:
        """The end of a file, on the disk, under a new name; never over another file."""
        name = f"{one.path}.pccheck-{self._step}"
        for number in range(1000):
            kept = Path(f"{name}.{number}" if number else name)
            try:
                target = os.open(
                    kept,
                    os.O_WRONLY | os.O_CREAT | os.O_EXCL,
                    Path(one.path).stat().st_mode & 0o777,
                )
            except FileExistsError:
                continue
            try:
                with Path(one.path).open("rb") as source:
                    source.seek(one.size_bytes)
                    _copy(source.fileno(), target)
                os.fsync(target)
            except BaseException:
                kept.unlink()
                raise
            finally:
                os.close(target)
            return kept
        raise FileExistsError(17, "there are 1000 such files", name)


def _distinct(files: Iterable[OpenFile]) -> list[OpenFile]:
    """One for each file that may have grown. Files that are only mapped are left out."""
    return [*{(one.device, one.inode): one for one in files if one.fd >= 0}.values()]


def _copy(source: int, target: int) -> None:
    """The rest of a file, from where both stand."""
    while data := os.read(source, _COPY_BYTES):
        left = memoryview(data)
        while left:
            left = left[os.write(target, left) :]
