"""A storage directory, read without a daemon, or beside a running one: without locks. Damage is
reported, never repaired or flagged; only `drop` changes anything."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pccheck_native import FORMAT_VERSION, catalog, dropping, group, layout
from pccheck_wire.basics import Closing
from pccheck_wire.errors import (
    DamagedError,
    NoCheckpointError,
    NoStoreError,
    PccheckError,
    RefusedError,
    StoreLockedError,
    UsageError,
    one_owner,
    owner_of,
)

from .documents import Document
from .ranks import add_stored

if TYPE_CHECKING:
    from pccheck_native.subset import Subset

    from .reading.files import FilePayloads

_WHY = {
    "NOT_A_VOLUME": "it has no valid commit record",
    "DAMAGED": "its commit records are damaged",
    "TRUNCATED": "the file is shorter than its records require",
    "OLDER_FORMAT": f"its format is 1 or 2, and this pccheck reads {FORMAT_VERSION}: read it "
    "with the pccheck that wrote it, or move it away",
    "NEWER_FORMAT": f"its format is above {FORMAT_VERSION}, which this pccheck reads: "
    "upgrade pccheck",
    "UNKNOWN_FLAG": "a newer version wrote a flag that must be understood: upgrade pccheck",
    "EACCES": "permission denied",
}
_DENIED = ("EACCES", "EPERM")
#: What these volumes hold does not match its checksums; the others may be undamaged.
DAMAGED_CODES = ("DAMAGED", "NOT_A_VOLUME", "TRUNCATED", "RECORD_LOST")


class Storage(Closing):
    """See `source.Source`: the volumes below one directory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises NoStoreError when there is no such directory."""
        self.path = Path(path).absolute()
        self.served = False
        self.socket: str | None = None
        if not self.path.is_dir():
            path = self.path
            raise NoStoreError(
                f"{path} is not a directory" if path.exists() else f"there is no directory {path}",
                hint="use the directory that pccheckd was started with (--storage)",
            )

    def close(self) -> None:
        """Nothing is open."""

    def held(
        self, *, uid: int | None = None, job: str = "", rank: int | None = None, sizes: bool = False
    ) -> catalog.Catalog:
        """All matching volumes and checkpoints; `sizes` as for catalog.scan. Raises RefusedError,
        NoStoreError."""
        try:
            if job:
                layout.check_job(job)
            found = catalog.scan(self.path, uid=uid, job=job or None, rank=rank, sizes=sizes)
            known = (
                found.unreadable
                or layout.lock_path(self.path).exists()
                or layout.list_volumes(self.path)
            )
        except ValueError as error:
            raise UsageError(str(error)) from error
        except PermissionError as error:
            raise denied(error.filename or self.path) from error
        except OSError as error:
            raise NoStoreError(f"{self.path} cannot be read: {error.strerror or error}") from error
        if not known:
            raise NoStoreError(
                f"{self.path} has no volumes of pccheckd",
                hint="use the directory that pccheckd was started with (--storage)",
            )
        if not found.volumes:
            for item in found.unreadable:
                if item.code_name in _DENIED:
                    raise error_of(item)
        return found

    def open(self, parts: Sequence[catalog.StoredCheckpoint]) -> FilePayloads:
        from .reading.files import FilePayloads  # the tree's classes are not needed to list

        return FilePayloads(parts)

    def verify(self, checkpoint: catalog.StoredCheckpoint, part: Subset | None) -> tuple[int, bool]:
        """Only the daemon, which writes the volume, may clear the flag of a checkpoint that was
        found damaged before, and only after it has read all of the checkpoint itself."""
        if self.served and checkpoint.is_damaged and part is None:
            from .remote import DaemonSource

            return DaemonSource(self.socket, self.path).verify(checkpoint, None)
        with contextlib.closing(self.open([checkpoint])) as payloads:
            return payloads.verify(checkpoint.id.rank, part), False

    def listing(self, job: str = "", *, uid: int | None = None) -> Document:
        """What `list --json` prints; the daemon's document has the same keys."""
        return catalog.document(self.path, self.held(uid=uid, job=job, sizes=True), reason_of)

    def status(self, *, uid: int | None = None) -> Document:
        """What `status --json` prints without a daemon: as much of the daemon's document as the
        volumes hold."""
        found = self.held(uid=uid)
        warnings = [f"{item.file.path}: {reason_of(item)}" for item in found.unreadable]
        warnings += [f"{file.path}: {catalog.RECORD_LOST}" for file in found.incomplete]
        warnings += [
            f"{one.volume_path}: the checkpoint of step {one.id.step} is damaged"
            for one in found.checkpoints
            if one.is_damaged
        ]
        disk = os.statvfs(self.path)
        status: Document = {
            "schema": 1,
            "daemon": None,
            "storage": {
                "path": str(self.path),
                "total_bytes": disk.f_blocks * disk.f_frsize,
                "free_bytes": disk.f_bavail * disk.f_frsize,
            },
            "sessions": [],
            "groups": _groups(found),
            "ranks": [],
            "warnings": warnings,
        }
        add_stored(status, catalog.document(self.path, found, reason_of))
        return status

    def drop(
        self, job: str, *, rank: int | None = None, uid: int | None = None, dry_run: bool
    ) -> Document:
        """What `drop --json` prints. It takes the lock of a daemon, also with `dry_run`, which is
        to find what the drop would; without it those of writers, too: nothing else here changes a
        directory. Raises StoreLockedError, RefusedError."""
        self.held(uid=uid, job=job, rank=rank)  # for its errors
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(_no_daemon(self.path))
                files = dropping.victims(self.path, uid=uid, job=job, rank=rank)
                owner_of(job, rank, (victim.file.uid for victim in files))
                if not dry_run:
                    with contextlib.suppress(OSError):  # of earlier drops; a daemon does it, too
                        dropping.clear(self.path)
                    dropping.drop([victim.file.path for victim in files])
            except dropping.InUseError as error:
                raise RefusedError(
                    f"{error}; nothing was dropped", hint="end that process, then try again"
                ) from error
            except PermissionError as error:
                raise denied(error.filename or self.path) from error
        return dropping.document(self.path, files, dropped=not dry_run)


@contextlib.contextmanager
def _no_daemon(storage: Path) -> Iterator[None]:
    """Holds the daemon's lock. It is never created here: a file of another user would keep the
    daemon out. Where there is none, no daemon has ever run."""
    try:
        descriptor = os.open(layout.lock_path(storage), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            raise StoreLockedError(
                f"a pccheckd (pid {pid}) serves {storage}",
                hint="ask that pccheckd to drop the job: leave --storage out, or name its socket "
                "with --socket PATH",
            ) from error
        yield
    finally:
        os.close(descriptor)


def denied(place: object) -> PccheckError:
    return RefusedError(
        f"uid {os.geteuid()} may not read {place}",
        hint="volumes belong to the user that runs pccheckd: run this as that user or as root, or "
        "ask the daemon (without --storage)",
    )


def reason_of(item: catalog.Unreadable) -> str:
    return _WHY.get(item.code_name, item.reason)


def error_of(item: catalog.Unreadable) -> PccheckError:
    """The error when a job has only this volume, which cannot be read."""
    if item.code_name in _DENIED:
        return denied(item.file.path)
    if fix := layout.MISPLACED_HINTS.get(item.code_name):
        return PccheckError(item.reason, hint=f"{fix}; until then its job saves no checkpoints")
    kind = DamagedError if item.code_name in DAMAGED_CODES else None
    return (kind or PccheckError)(
        f"the volume {item.file.path} cannot be read: {reason_of(item)}",
        hint="until it can be read, its job saves no checkpoints, unless it starts with fresh=True",
    )


def _groups(found: catalog.Catalog) -> list[Document]:
    """One entry per job of several ranks, with the newest checkpoint that all of them have."""
    jobs: dict[tuple[int, str], list[catalog.StoredCheckpoint]] = {}
    for one in found.checkpoints:
        jobs.setdefault(one.id[:2], []).append(one)
    documents: list[Document] = []
    for (uid, job), checkpoints in sorted(jobs.items()):
        by_rank = catalog.by_rank(checkpoints)
        world_size = ranks_of(by_rank)
        if world_size < 2:
            continue
        common = None
        flagged = [c for c in checkpoints if c.is_known_global and c.id.world_size == world_size]
        shared = catalog.common_step(by_rank, world_size) or _parts_of_newest(flagged)
        if shared:
            newest = catalog.checkpoint_document(max(shared.values(), key=lambda c: c.wall_ns))
            common = {name: newest[name] for name in ("sequence", "step", "wall_ns")}
        behind = group.behind(catalog.ranks_of(by_rank), world_size)
        documents.append(catalog.group_document(uid, job, world_size, common, behind))
    return documents


def _parts_of_newest(
    checkpoints: list[catalog.StoredCheckpoint],
) -> dict[int, catalog.StoredCheckpoint]:
    newest = max((one.id.sequence for one in checkpoints), default=0)
    return {one.id.rank: one for one in checkpoints if one.id.sequence == newest}


# -- choosing ----------------------------------------------------------------------------------


def of_job(
    found: catalog.Catalog, job: str, storage: Path
) -> dict[int, list[catalog.StoredCheckpoint]]:
    """The checkpoints of a job by rank, newest first. Raises why there is none."""
    ranks = any_of_job(found, job)
    if not ranks:
        raise none_of(job, storage)
    return ranks


def any_of_job(found: catalog.Catalog, job: str) -> dict[int, list[catalog.StoredCheckpoint]]:
    """The same, empty where nothing is stored. Raises why what is stored cannot be read."""
    mine = [one for one in found.checkpoints if one.id.job == job]
    one_owner(job, (one.id.uid for one in mine))
    for item in found.unreadable:
        if item.file.job == job and not mine:
            raise error_of(item)
    return catalog.by_rank(mine)


def none_of(job: str, storage: str | Path) -> PccheckError:
    return NoCheckpointError(
        f"there is no durable checkpoint of job {job!r} in {storage}",
        hint="what exists: pccheckctl list; what is being saved: pccheckctl status",
    )


def matching(
    checkpoints: Iterable[catalog.StoredCheckpoint], *, step: int | None, sequence: int | None
) -> list[catalog.StoredCheckpoint]:
    return [
        one
        for one in checkpoints
        if step in (None, one.id.step) and sequence in (None, one.id.sequence)
    ]


def missing(
    job: str, rank: int, *, step: int | None = None, sequence: int | None = None
) -> PccheckError:
    return NoCheckpointError(
        f"job {job!r} rank {rank} has no valid checkpoint{which(step, sequence)}",
        hint=f"see: pccheckctl list {job}",
    )


def which(step: int | None, sequence: int | None) -> str:
    """What was asked for, behind "checkpoint"."""
    if sequence is not None:
        return f" with sequence {sequence}"
    return "" if step is None else f" of step {step}"


def ranks_of(by_rank: dict[int, list[catalog.StoredCheckpoint]]) -> int:
    """The size of the group that made the newest checkpoints."""
    newest = max((found[0].id for found in by_rank.values()), key=lambda one: one.sequence)
    return newest.world_size
