"""Removing volumes so that a crash in between leaves no half of one: a volume is first renamed to
a name that is not that of a volume, which is made durable, and then removed. What a crash leaves
of that is found by `layout.list_temporary` and swept when a daemon starts; what could not be
removed, by `clear` when the next one is dropped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from pccheck_native import catalog, layout

_DROPPED = ".dropped.tmp"


class InUseError(Exception):
    """Another process has a volume open for writing."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is in use by another process")
        self.path = path


class Victim(NamedTuple):
    """A volume file that is to go, and what would go with it."""

    file: layout.VolumeFile
    bytes: int  # that it takes on the disk
    last_write_s: float  # wall time
    done: bool  # its job called close(done=True)
    checkpoints: int
    newest_step: int | None
    problem: str = ""  # why its records cannot be read


def victims(
    storage: Path, *, uid: int | None = None, job: str | None = None, rank: int | None = None
) -> list[Victim]:
    """Every volume file that matches (None means any), also those that cannot be read, ordered by
    (uid, job, rank, generation). Reads records only."""
    found = catalog.scan(storage, uid=uid, job=job, rank=rank)
    unreadable = {item.file.path: item for item in found.unreadable}
    newest: dict[Path, list[catalog.StoredCheckpoint]] = {}
    for one in found.checkpoints:
        newest.setdefault(one.volume_path, []).append(one)
    made = []
    for file in layout.list_volumes(storage, uid=uid, job=job, rank=rank):
        info, bad = found.volumes.get(file.path), unreadable.get(file.path)
        if info is None and bad is None:
            continue  # made or removed while we looked
        try:
            stat = file.path.stat()
        except FileNotFoundError:
            continue
        mine = newest.get(file.path, [])
        made.append(
            Victim(
                file, stat.st_blocks * 512, stat.st_mtime, info is not None and info.done,
                len(mine), mine[0].id.step if mine else None, bad.reason if bad else "",
            )
        )  # fmt: skip
    return made


class JobUse(NamedTuple):
    """The space that a job takes on a disk."""

    uid: int
    job: str
    bytes: int
    last_write_s: float  # wall time
    done: bool  # every rank has reported that it has finished


def jobs(storage: Path, *, uid: int | None = None) -> list[JobUse]:
    """All jobs with a volume here. One with a volume that cannot be read is not `done`."""
    grouped: dict[tuple[int, str], list[Victim]] = {}
    for victim in victims(storage, uid=uid):
        grouped.setdefault((victim.file.uid, victim.file.job), []).append(victim)
    made = []
    for (owner, job), files in grouped.items():
        last = {victim.file.rank: victim for victim in files}  # of the highest generation
        done = all(v.done for v in last.values()) and not any(v.problem for v in files)
        newest_s = max(victim.last_write_s for victim in files)
        made.append(JobUse(owner, job, sum(v.bytes for v in files), newest_s, done))
    return made


def document(storage: Path, files: Iterable[Victim], *, dropped: bool) -> dict[str, object]:
    """What `pccheckctl drop --json` prints, with and without a daemon."""
    names = ("bytes", "done", "checkpoints", "newest_step", "problem")
    return {
        "schema": 1,
        "storage": str(storage),
        "dropped": dropped,
        "files": [
            {
                "path": str(victim.file.path),
                "uid": victim.file.uid,
                "job": victim.file.job,
                "rank": victim.file.rank,
                "last_write_s": round(victim.last_write_s, 3),
                **{name: getattr(victim, name) for name in names},
            }
            for victim in files
        ],
        "bytes": sum(victim.bytes for victim in files),
    }


def drop(paths: Sequence[Path]) -> None:
    """Removes these volumes. Raises InUseError, before anything is touched, when another process
    has one of them; OSError when their room could not be given back: `clear` tries it again.

    Oldest generation first: what an interruption leaves of a rank is its newest volume, so that a
    job that is started over it continues from there and not from an outgrown one.
    """
    with contextlib.ExitStack() as held:
        present = [path for path in paths if _lock(held, path)]
        for directory in dict.fromkeys(path.parent for path in present):
            ordered = sorted(
                (p for p in present if p.parent == directory),
                key=lambda path: int(path.name.split(".")[1]),
            )
            gone = []
            for path in ordered:
                away = path.with_name(path.name + _DROPPED)
                path.rename(away)
                gone.append(away)
            _remove(directory, gone)
    for directory in {path.parent for path in paths}:
        with contextlib.suppress(OSError):  # another rank's volume is there, or it is gone
            for record in layout.left_records(directory):
                record.unlink()
            directory.rmdir()


def clear(storage: Path) -> int:
    """Removes what was dropped and could not be removed then; how many files. During a
    drop it removes files that the drop would remove next. Raises OSError when one is still left."""
    left = [path for path in layout.list_temporary(storage) if path.name.endswith(_DROPPED)]
    for directory in dict.fromkeys(path.parent for path in left):
        _remove(directory, [path for path in left if path.parent == directory])
        with contextlib.suppress(OSError):
            directory.rmdir()
    return len(left)


def _remove(directory: Path, gone: list[Path]) -> None:
    """Once the names are durable. All that can be, then raises why the first one could not."""
    failed: OSError | None = None
    layout.sync(directory)
    for path in gone:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            failed = failed or error
    layout.sync(directory)
    if failed is not None:
        raise failed


def _lock(held: contextlib.ExitStack, path: Path) -> bool:
    """Takes the volume's lock, as whoever writes to it does; False when it is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise InUseError(path) from error
        raise
    return True
