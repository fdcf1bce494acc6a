"""The ranks of a status document that only the volumes know."""

from __future__ import annotations

from .documents import Document, part, rows, texts

NOTHING = "it has no durable checkpoint"


def add_stored(status: Document, listing: Document) -> None:
    """Adds the ranks of a list that the status lacks: no trainer has connected since the daemon
    started, or there is no daemon. A volume without a checkpoint is of a job that could not save
    one. Marks the ranks that are stale."""
    ranks = rows(status, "ranks")
    known = {_key(rank) for rank in ranks}
    added: dict[tuple[object, ...], Document] = {}
    for volume in rows(listing, "volumes"):
        if _key(volume) not in known:
            added[_key(volume)] = {
                "uid": volume.get("uid"), "job": volume.get("job"), "rank": volume.get("rank"),
                "connected": False, "pid": None, "incarnation": volume.get("incarnation"),
                "newest": None, "in_flight": 0, "volume": volume, "checkpoints": [],
                "warnings": [],
            }  # fmt: skip
    for one in reversed(rows(listing, "checkpoints")):  # the newest comes last, and stays
        rank = added.get(_key(one))
        if rank is not None and one.get("damaged") is not True:
            rank["newest"] = {key: one.get(key) for key in ("sequence", "step", "wall_ns")}
    status["ranks"] = [*ranks, *added.values()]
    stale = {_key(one) for one in rows(listing, "checkpoints") if one.get("stale") is True}
    for rank in rows(status, "ranks"):
        rank["stale"] = _key(rank) in stale and not rank.get("connected")
    saved = {_key(one) for one in rows(listing, "checkpoints")}
    empty = [rank for key, rank in added.items() if key not in saved]
    for rank in empty:
        rank["warnings"] = [NOTHING]
    status["warnings"] = [
        *texts(status, "warnings"),
        *(f"job {r['job']!r} rank {r['rank']} of uid {r['uid']}: {NOTHING}" for r in empty),
    ]
    if empty and (daemon := part(status, "daemon")):
        daemon["state"] = "degraded"


def _key(one: Document) -> tuple[object, ...]:
    return one.get("uid"), one.get("job"), one.get("rank")
