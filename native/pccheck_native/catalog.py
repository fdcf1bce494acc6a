"""Which checkpoints exist, and which step a group of ranks recovers.

Pure functions over the volumes' newest records; the daemon uses them and so does the command line
without a daemon. Volumes are opened read-only here, which takes no lock: what a running daemon
publishes meanwhile is simply not seen. Named tuples and no dataclasses: those would double the time
in which the command line starts.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from pccheck_native._core import (
    SLOT_DAMAGED,
    SLOT_GLOBAL,
    SLOT_PINNED,
    NativeError,
    SlotEntry,
    Volume,
    VolumeInfo,
)
from pccheck_native.layout import VolumeFile, list_volumes


class Checkpoint(NamedTuple):
    """One durable checkpoint in one slot of one volume."""

    uid: int
    job: str
    rank: int
    sequence: int
    step: int
    incarnation: int
    world_size: int
    payload_bytes: int
    tree_offset: int
    tree_bytes: int
    wall_ns: int
    flags: int
    slot: int
    volume_path: Path

    @property
    def is_damaged(self) -> bool:
        """A reader found it damaged."""
        return bool(self.flags & SLOT_DAMAGED)

    @property
    def is_global(self) -> bool:
        """Every rank of the group had this step durable."""
        return bool(self.flags & SLOT_GLOBAL)

    @property
    def is_pinned(self) -> bool:
        """Kept until somebody restores it or says that he starts fresh."""
        return bool(self.flags & SLOT_PINNED)


class Unreadable(NamedTuple):
    """A volume that could not be opened, or is not what its name says, and why."""

    file: VolumeFile
    code_name: str  # "DAMAGED", "NEWER_FORMAT", "EACCES", "MISPLACED", ...
    reason: str


class Catalog:
    """What a storage directory holds."""

    __slots__ = ("checkpoints", "unreadable", "volumes")

    def __init__(self) -> None:
        self.checkpoints: list[Checkpoint] = []
        self.volumes: dict[Path, VolumeInfo] = {}
        self.unreadable: list[Unreadable] = []


class CommonStep(NamedTuple):
    """What a group recovers: each rank its own checkpoint of this step and incarnation."""

    incarnation: int
    step: int
    checkpoints: dict[int, Checkpoint]  # by rank


def _checkpoint(info: VolumeInfo, entry: SlotEntry, path: Path) -> Checkpoint:
    return Checkpoint(
        uid=info.uid,
        job=info.job,
        rank=info.rank,
        sequence=entry.sequence,
        step=entry.step,
        incarnation=entry.incarnation,
        world_size=entry.world_size,
        payload_bytes=entry.payload_bytes,
        tree_offset=entry.tree_offset,
        tree_bytes=entry.tree_bytes,
        wall_ns=entry.wall_ns,
        flags=entry.flags,
        slot=entry.slot,
        volume_path=path,
    )


def checkpoints_of(volume: Volume, path: str | os.PathLike[str]) -> list[Checkpoint]:
    """The durable checkpoints of an open volume, newest first, damaged ones included."""
    info = volume.info()
    where = Path(path)
    return newest_first(
        _checkpoint(info, entry, where) for entry in volume.table() if entry.sequence
    )


def newest_first(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """By sequence, never by step. Meant for the checkpoints of one rank."""
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.sequence, reverse=True)


def _misplaced(file: VolumeFile, info: VolumeInfo) -> bool:
    return (file.uid, file.job, file.rank) != (info.uid, info.job, info.rank)


def _read(path: Path, *, allow_buffered: bool) -> tuple[VolumeInfo, list[Checkpoint]]:
    with closing(Volume(path, writable=False, allow_buffered=allow_buffered)) as volume:
        return volume.info(), checkpoints_of(volume, path)


def scan(
    storage: str | os.PathLike[str],
    *,
    uid: int | None = None,
    job: str | None = None,
    rank: int | None = None,
    allow_buffered: bool = True,
) -> Catalog:
    """Reads the records of every volume that matches; None means any.

    Checkpoints come ordered by (uid, job, rank), newest first within. One volume that cannot be
    read hides no other. Raises OSError when the directories cannot be listed.
    """
    catalog = Catalog()
    for file in list_volumes(storage, uid=uid, job=job, rank=rank):
        try:
            with closing(
                Volume(file.path, writable=False, allow_buffered=allow_buffered)
            ) as volume:
                info = volume.info()
                found = checkpoints_of(volume, file.path)
        except FileNotFoundError:
            continue  # replaced by its next generation while we looked
        except NativeError as error:
            catalog.unreadable.append(Unreadable(file, error.code_name, str(error)))
            continue
        except OSError as error:
            name = errno_name(error)
            catalog.unreadable.append(Unreadable(file, name, str(error)))
            continue
        if _misplaced(file, info):
            whose = f"{info.uid}/{info.job}/rank {info.rank}"
            reason = f"{file.path} holds the volume of {whose}"
            catalog.unreadable.append(Unreadable(file, "MISPLACED", reason))
            continue
        catalog.volumes[file.path] = info
        catalog.checkpoints.extend(found)
    catalog.checkpoints.sort(key=lambda c: (c.uid, c.job, c.rank, -c.sequence))
    return catalog


def by_rank(checkpoints: Iterable[Checkpoint]) -> dict[int, list[Checkpoint]]:
    """The checkpoints of one job, newest first for each rank."""
    ranks: dict[int, list[Checkpoint]] = {}
    for checkpoint in checkpoints:
        ranks.setdefault(checkpoint.rank, []).append(checkpoint)
    return {rank: newest_first(found) for rank, found in sorted(ranks.items())}


def _usable(
    checkpoints: Iterable[Checkpoint], world_size: int
) -> dict[tuple[int, int], Checkpoint]:
    """(incarnation, step) -> the newest undamaged checkpoint of it from a group of that size."""
    usable: dict[tuple[int, int], Checkpoint] = {}
    for checkpoint in newest_first(checkpoints):
        if checkpoint.world_size == world_size and not checkpoint.is_damaged:
            usable.setdefault((checkpoint.incarnation, checkpoint.step), checkpoint)
    return usable


def common_step(
    checkpoints_by_rank: Mapping[int, Iterable[Checkpoint]], world_size: int
) -> CommonStep | None:
    """The newest (incarnation, step) that every rank 0..world_size-1 has undamaged; else None.

    Newest is by incarnation and then by the sequence on rank 0, for a step may be saved again with
    a lower number. Never mixes steps: a rank without it rules a step out.
    """
    usable = {rank: _usable(checkpoints_by_rank.get(rank, ()), world_size)
              for rank in range(world_size)}  # fmt: skip
    common = set(usable[0]).intersection(*usable.values()) if world_size > 0 else set()
    if not common:
        return None
    newest = max(common, key=lambda key: (key[0], usable[0][key].sequence))
    return CommonStep(*newest, {rank: found[newest] for rank, found in usable.items()})


def checkpoint_document(item: Checkpoint) -> dict[str, object]:
    """One checkpoint in the `--json` documents, with and without a daemon."""
    return {
        "uid": item.uid,
        "job": item.job,
        "rank": item.rank,
        "sequence": item.sequence,
        "step": item.step,
        "incarnation": item.incarnation,
        "world_size": item.world_size,
        "payload_bytes": item.payload_bytes,
        "wall_ns": item.wall_ns,
        "global": item.is_global,
        "pinned": item.is_pinned,
        "damaged": item.is_damaged,
        "volume": str(item.volume_path),
    }


def volume_document(path: Path, info: VolumeInfo) -> dict[str, object]:
    """One volume in the same documents."""
    return {
        "path": str(path),
        "uid": info.uid,
        "job": info.job,
        "rank": info.rank,
        "world_size": info.world_size,
        "slots": info.slots,
        "keep": info.keep,
        "volume_bytes": info.volume_bytes,
        "payload_capacity": info.payload_capacity,
        "free_slots": info.free_slots,
        "incarnation": info.incarnation,
        "done": info.done,
        "stopped": info.stopped,
        "valid_replicas": info.valid_replicas,
    }


def errno_name(error: OSError) -> str:
    """The kernel's name ("EACCES"), as `NativeError.code_name` is ours."""
    return errno.errorcode.get(error.errno or 0, "EIO")
