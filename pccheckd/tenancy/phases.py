"""How long each part of a checkpoint took."""

from __future__ import annotations

from typing import NamedTuple

from .checkpoint import Checkpoint


class Phases(NamedTuple):
    """Seconds; None where a part was not reached. Copy and write overlap: chunks are pipelined."""

    waited: float | None  # from the request until it had a lane and a slot
    copied: float | None  # from then until the snapshot was complete in the daemon's memory
    written: float | None  # from the first chunk's write to the last one's end
    flushed: float | None
    published: float | None  # the commit record
    durable: float | None  # from the request to the end of all this


def phases(checkpoint: Checkpoint) -> Phases:
    times, asked_ns = checkpoint.times_ns, checkpoint.requested_ns

    def between(since_ns: int, until_ns: int) -> float | None:
        return max(until_ns - since_ns, 0) / 1e9 if since_ns and until_ns else None

    def at(name: str) -> int:
        return times.get(name, 0)

    return Phases(
        waited=between(asked_ns, at("begin")),
        copied=between(at("begin"), at("sealed")),
        written=between(at("first_write"), at("written")),
        flushed=between(at("written"), at("flushed")),
        published=between(at("flushed"), at("durable")),
        durable=between(asked_ns, at("durable")),
    )
