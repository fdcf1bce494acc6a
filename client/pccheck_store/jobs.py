"""The checkpoints of a job, each with what its ranks have of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pccheck_native import catalog, group
from pccheck_native.identity import hexadecimal
from pccheck_wire.errors import DaemonUnreachableError, UsageError

from .directory import Storage, any_of_job
from .observer import Observer, private_daemon
from .reading.source import Source
from .remote import DaemonSource


class StoredRank(NamedTuple):
    """What one rank has stored of a checkpoint."""

    nbytes: int
    durable_at: float  #: seconds since 1970
    damaged: bool  #: an earlier read found it damaged
    pinned: bool


class Stored(NamedTuple):
    """A checkpoint of a job."""

    step: int
    sequence: int  #: the order of checkpoints; steps may go back
    world_size: int  #: of the run that saved it; 1: one rank alone
    incarnation: int  #: of the start of the job that saved it; orders starts
    start: str  #: the id of that start, 32 hexadecimal digits; "": not known
    complete: bool  #: every rank of that world has it, undamaged
    ranks: Mapping[int, StoredRank]


def checkpoints_of(
    source: Source, job: str, uid: int | None
) -> list[tuple[Stored, list[catalog.StoredCheckpoint]]]:
    """Every checkpoint of a job, newest first, and the parts that its ranks have, by rank."""
    scanned = source.held(uid=uid, job=job)
    ranks = any_of_job(scanned, job)
    common = set(group.common(catalog.ranks_of(ranks)))
    same: dict[tuple[group.Held, int | None], dict[int, catalog.StoredCheckpoint]] = {}
    for rank, checkpoints in ranks.items():
        for one in checkpoints:
            # A rank that saved alone counts alone: other ranks may have the same sequence.
            alone = rank if one.id.world_size == 1 else None
            same.setdefault((one.held(), alone), {})[rank] = one
    found = []
    for (held, _), parts in same.items():
        complete = held in common and not any(one.is_damaged for one in parts.values())
        stored = {
            rank: StoredRank(one.payload_bytes, one.wall_ns / 1e9, one.is_damaged, one.is_pinned)
            for rank, one in sorted(parts.items())
        }
        about = held.step, held.sequence, held.world_size, held.incarnation
        start = hexadecimal(parts[min(parts)].id.start) or ""
        found.append((Stored(*about, start, complete, stored), [parts[rank] for rank in stored]))
    return sorted(found, key=lambda item: -item[0].sequence)


def find_source(
    storage: str | os.PathLike[str] | None, socket: str | os.PathLike[str] | None
) -> Source:
    """The daemon; or the directory `storage`, or PCCHECK_STORAGE when no daemon answers."""
    if storage is not None and socket is not None:
        raise UsageError("storage= and socket= were both given", hint="give only one of them")
    if storage is None:
        where = None if socket is None else os.fspath(socket)
        try:
            with Observer(where) as observer:
                return DaemonSource(where, Path(observer.storage()))
        except DaemonUnreachableError as error:
            storage = os.environ.get("PCCHECK_STORAGE")
            if socket is not None or not storage:
                raise DaemonUnreachableError(
                    error.message,
                    hint=f"{error.hint}; or read the files without a daemon: storage=DIR",
                ) from error
    directory = Storage(storage)
    private = private_daemon(directory.path)
    if private is None:
        return directory
    with private:
        return DaemonSource(private.path, directory.path)
