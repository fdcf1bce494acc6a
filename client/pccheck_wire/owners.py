"""Determines the owner of a job when several users may have a job of that name."""

from __future__ import annotations

from collections.abc import Iterable

from .errors import NoCheckpointError, UsageError


def one_owner(job: str, owners: Iterable[int]) -> None:
    """Raises UsageError when there are several."""
    found = sorted(set(owners))
    if len(found) > 1:
        raise UsageError(
            f"job {job!r} exists for uids {', '.join(map(str, found))}", hint="choose with --uid"
        )


def owner_of(job: str, rank: int | None, owners: Iterable[int]) -> int:
    """The only owner of these volumes. Raises NoCheckpointError without an owner, UsageError with
    several."""
    found = set(owners)
    if not found:
        which = "" if rank is None else f" rank {rank}"
        raise NoCheckpointError(
            f"there is no volume of job {job!r}{which}", hint="see: pccheckctl list"
        )
    one_owner(job, found)
    return found.pop()
