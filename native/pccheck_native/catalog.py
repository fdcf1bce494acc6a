"""Which checkpoints exist in a storage directory.

Functions over the newest records of volumes; the daemon uses them and so does the command line
without a daemon. What the ranks of a job have in common is decided in `group.py`. Volumes are
opened read-only here, which takes no lock: what a running daemon publishes meanwhile is not seen.
Named tuples and no dataclasses: those would double the time in which the command line starts.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from pccheck_native._core import (
    SLOT_DAMAGED,
    SLOT_GLOBAL,
    SLOT_HEALTHY,
    SLOT_IMAGE,
    SLOT_NOT_FINITE,
    SLOT_OFFERED,
    SLOT_PINNED,
    SLOT_PROTECTED,
    NativeError,
    SlotEntry,
    Volume,
    VolumeInfo,
)
from pccheck_native.group import Held, Rank, common, stale
from pccheck_native.identity import CheckpointId, hexadecimal
from pccheck_native.layout import (
    MisplacedError,
    VolumeFile,
    files_in_place,
    list_hidden,
    parse_volume_path,
)

RECORD_LOST = (
    "both copies of a commit record are damaged, so that the newest checkpoint may be lost"
)

MARKS = {
    "healthy": SLOT_HEALTHY,
    "not_finite": SLOT_NOT_FINITE,
    "offered": SLOT_OFFERED,
    "global": SLOT_GLOBAL,
}


class StoredCheckpoint(NamedTuple):
    """One durable checkpoint in one slot of one volume."""

    id: CheckpointId
    payload_bytes: int
    tree_offset: int
    tree_bytes: int
    wall_ns: int
    flags: int
    slot: int
    volume_path: Path
    base: int = 0  # sequence of the one in whose slot its unchanged blocks lie
    own_bytes: int | None = None  # of its payload, in its own slot; None: not known

    @property
    def is_damaged(self) -> bool:
        """A reader found it damaged."""
        return bool(self.flags & SLOT_DAMAGED)

    @property
    def is_protected(self) -> bool:
        """Kept until a new run restores it, or begins with fresh=True."""
        return bool(self.flags & SLOT_PROTECTED)

    @property
    def is_pinned(self) -> bool:
        """The user pinned it."""
        return bool(self.flags & SLOT_PINNED)

    @property
    def is_offered(self) -> bool:
        """Other nodes of its job may count on it."""
        return bool(self.flags & SLOT_OFFERED)

    @property
    def is_known_global(self) -> bool:
        """This node knows that all nodes of its job had it."""
        return bool(self.flags & SLOT_GLOBAL)

    def held(self, *, usable: bool = True) -> Held:
        """For `group.py`: equal for the parts that several ranks have of one checkpoint."""
        return Held(*self.id[3:7], usable)


class Unreadable(NamedTuple):
    """A volume that could not be opened, or is not what its name says, and why; or a directory that
    may have volumes, with its place as `file`."""

    file: VolumeFile
    code_name: str  # "DAMAGED", "NEWER_FORMAT", "EACCES", "MISPLACED", "LINK", ...
    reason: str


class Catalog(NamedTuple):
    """What a storage directory holds."""

    checkpoints: list[StoredCheckpoint]
    volumes: dict[Path, VolumeInfo]
    unreadable: list[Unreadable]
    incomplete: list[VolumeFile]  # readable, but RECORD_LOST


def _checkpoint(info: VolumeInfo, entry: SlotEntry, path: Path) -> StoredCheckpoint:
    stored = CheckpointId(
        info.uid, info.job, info.rank, entry.sequence, entry.step, entry.incarnation,
        entry.world_size, entry.start, entry.digest,
    )  # fmt: skip
    of_slot = {
        name: value for name, value in entry._asdict().items() if name in StoredCheckpoint._fields
    }
    return StoredCheckpoint(stored, volume_path=path, **of_slot)


def _own_bytes(volume: Volume, one: StoredCheckpoint) -> int | None:
    """None when its manifest cannot be read, or was recycled."""
    if not one.base:
        return one.payload_bytes
    try:
        return volume.own_bytes(one.id.sequence)
    except (NativeError, OSError):
        return None


def bases(checkpoints: Collection[StoredCheckpoint], sequences: Collection[int]) -> set[int]:
    """What those of a rank's checkpoints refer to: kept for as long as they are."""
    return {one.base for one in checkpoints if one.id.sequence in sequences and one.base}


def checkpoints_of(volume: Volume, path: Path) -> list[StoredCheckpoint]:
    """The durable checkpoints of an open volume, newest first, damaged ones included."""
    info = volume.info()
    return newest_first(
        _checkpoint(info, entry, path) for entry in volume.table() if entry.sequence
    )


def name_of(volume: Volume, one: StoredCheckpoint) -> tuple[int, int, int, int]:
    """The checkpoint's name within its start, which is the same on all ranks: base, descents, step
    and row (`names.py`). Reads and checks its manifest. Raises NativeError, OSError."""
    base, descents, row = volume.name(one.id.sequence)
    return base, descents, one.id.step, row


def newest_first(checkpoints: Iterable[StoredCheckpoint]) -> list[StoredCheckpoint]:
    """By sequence, never by step. Meant for the checkpoints of one rank."""
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.id.sequence, reverse=True)


def scan(
    storage: Path,
    *,
    uid: int | None = None,
    job: str | None = None,
    rank: int | None = None,
    sizes: bool = False,
) -> Catalog:
    """Reads the records of every volume that matches; None means any. With `sizes` also which part
    of a checkpoint is its own, from the manifests of those that have a base.

    Checkpoints come ordered by (uid, job, rank), newest first within. One volume or directory that
    cannot be read hides no other. Raises OSError when the storage directory cannot be listed.
    """
    catalog = Catalog([], {}, [], [])
    for file in files_in_place(storage, uid=uid, job=job, rank=rank):
        try:
            with closing(Volume(file.path, writable=False, allow_buffered=True)) as volume:
                info = volume.info()
                found = checkpoints_of(volume, file.path)
                if sizes:
                    found = [one._replace(own_bytes=_own_bytes(volume, one)) for one in found]
        except FileNotFoundError:
            continue  # replaced by its next generation while we looked
        except NativeError as error:
            catalog.unreadable.append(Unreadable(file, error.code_name, str(error)))
            continue
        except OSError as error:
            name = errno_name(error)
            catalog.unreadable.append(Unreadable(file, name, str(error)))
            continue
        if (file.uid, file.job, file.rank) != (info.uid, info.job, info.rank):
            whose = f"{info.uid}/{info.job}/rank {info.rank}"
            reason = f"{file.path} holds the volume of {whose}"
            catalog.unreadable.append(Unreadable(file, "MISPLACED", reason))
            continue
        catalog.volumes[file.path] = info
        if info.record_lost:
            catalog.incomplete.append(file)
        catalog.checkpoints.extend(found)
    for file, why in list_hidden(storage, uid=uid, job=job):
        catalog.unreadable.append(Unreadable(file, *_why_hidden(why)))
    catalog.checkpoints.sort(key=lambda c: (*c.id[:3], -c.id.sequence))
    return catalog


def _why_hidden(error: OSError) -> tuple[str, str]:
    if isinstance(error, MisplacedError):
        return error.code_name, error.message
    return errno_name(error), error.strerror or str(error)


def by_rank(checkpoints: Iterable[StoredCheckpoint]) -> dict[int, list[StoredCheckpoint]]:
    """The checkpoints of one job, newest first for each rank."""
    ranks: dict[int, list[StoredCheckpoint]] = {}
    for checkpoint in checkpoints:
        ranks.setdefault(checkpoint.id.rank, []).append(checkpoint)
    return {rank: newest_first(found) for rank, found in sorted(ranks.items())}


def ranks_of(checkpoints_by_rank: Mapping[int, Iterable[StoredCheckpoint]]) -> dict[int, Rank]:
    """What one job's volumes hold, for `group.py`."""
    return {
        rank: Rank(frozenset(one.held(usable=not one.is_damaged) for one in checkpoints))
        for rank, checkpoints in checkpoints_by_rank.items()
    }


def common_step(
    checkpoints_by_rank: Mapping[int, Iterable[StoredCheckpoint]], world_size: int
) -> dict[int, StoredCheckpoint] | None:
    """The newest checkpoint that every rank 0..world_size-1 has undamaged, by rank; else None."""
    ranks = {rank: list(checkpoints) for rank, checkpoints in checkpoints_by_rank.items()}
    for held in common(ranks_of(ranks)):
        if held.world_size == world_size:
            return {
                rank: one
                for rank in range(world_size)
                for one in ranks.get(rank, ())
                if one.id.sequence == held.sequence
            }
    return None


def checkpoint_documents(
    checkpoints: Iterable[StoredCheckpoint], known: Collection[tuple[int, str, int]] = ()
) -> list[dict[str, object]]:
    """Checkpoints in the `--json` documents, with and without a daemon; those of one job are all
    there, since only all of its ranks together say what is global, and what is stale. What other
    nodes have is in flags; `known`: uid, job and sequence of what a daemon knows before these."""
    jobs: dict[tuple[int, str], dict[int, list[StoredCheckpoint]]] = {}
    every = list(checkpoints)
    for one in every:
        jobs.setdefault(one.id[:2], {}).setdefault(one.id.rank, []).append(one)
    shared = {
        (*key, held.sequence)
        for key, ranks in jobs.items()
        for held in common(ranks_of(ranks))
        if held.world_size > 1
    }
    shared |= {*known} | {(*one.id[:2], one.id.sequence) for one in every if one.is_known_global}
    steps = {one.id[:4]: one.id.step for one in every}
    old = {(*key, rank) for key, ranks in jobs.items() for rank in stale(ranks_of(ranks))}
    return [
        checkpoint_document(one)
        | {"base_step": steps.get((*one.id[:3], one.base))}
        | {"global": (*one.id[:2], one.id.sequence) in shared}
        | {"stale": one.id[:3] in old}
        for one in every
    ]


def checkpoint_document(item: StoredCheckpoint) -> dict[str, object]:
    """One checkpoint in the same documents; alone it cannot say whether it is global or
    stale, or of which step its base is."""
    return {
        **item.id.document(),
        **{name: getattr(item, name) for name in ("payload_bytes", "own_bytes", "wall_ns")},
        "kind": "image" if item.flags & SLOT_IMAGE else "tensors",
        "marks": [name for name, flag in MARKS.items() if item.flags & flag],
        "base_sequence": item.base or None,
        "pinned": item.is_pinned,
        "protected": item.is_protected,
        "damaged": item.is_damaged,
        "volume": str(item.volume_path),
    }


def document(
    storage: Path,
    found: Catalog,
    reason_of: Callable[[Unreadable], str],
    known: Collection[tuple[int, str, int]] = (),
) -> dict[str, object]:
    """What `pccheckctl list --json` prints, with and without a daemon; `known` as for
    `checkpoint_documents`."""
    return {
        "schema": 1,
        "storage": str(storage),
        "volumes": [volume_document(path, info) for path, info in sorted(found.volumes.items())],
        "checkpoints": checkpoint_documents(found.checkpoints, known),
        "unreadable": [
            {**_place(storage, item.file), "code": item.code_name, "reason": reason_of(item)}
            for item in found.unreadable
        ],
        "incomplete": [
            {**_place(storage, file), "reason": RECORD_LOST} for file in found.incomplete
        ],
    }


def _place(storage: Path, file: VolumeFile) -> dict[str, object]:
    """The job and rank in question: a directory may hold every rank, that of a user every job."""
    rank = None
    with suppress(ValueError):
        rank = parse_volume_path(storage, file.path).rank
    return {"path": str(file.path), "uid": file.uid, "job": file.job or None, "rank": rank}


def volume_document(path: Path, info: VolumeInfo) -> dict[str, object]:
    """One volume in the same documents."""
    names = ("uid", "job", "rank", "world_size", "slots", "keep", "volume_bytes",
             "payload_capacity", "free_slots", "incarnation", "done", "stopped",
             "valid_replicas")  # fmt: skip
    start = {"start": hexadecimal(info.start)}
    return {"path": str(path), **{name: getattr(info, name) for name in names}, **start}


def group_document(
    uid: int, job: str, world_size: int, common: Mapping[str, object] | None,
    behind: Mapping[int, int], **known: object,
) -> dict[str, object]:  # fmt: skip
    """The ranks of a job together, in the same documents; what one rank has durable is not the
    job's. `common`: sequence, step and wall_ns of the newest checkpoint that all have; `known`:
    what only a daemon knows."""
    late = {str(rank): count for rank, count in behind.items() if count}
    return {
        "uid": uid, "job": job, "world_size": world_size, "global": common, "waits_s": 0.0,
        "lost": 0, "slowest_rank": None, "behind": late, "absent": [], "late": False, **known,
    }  # fmt: skip


def errno_name(error: OSError) -> str:
    """The kernel's name ("EACCES"), as `NativeError.code_name` is ours."""
    return errno.errorcode.get(error.errno or 0, "EIO")
