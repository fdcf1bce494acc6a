"""What became of every checkpoint, told once, to all that want to know: log, trace and metrics.

Nothing in here may end a checkpoint: trouble of its own is logged and forgotten."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from pccheck_wire.basics import size_text
from pccheck_wire.messages import CheckpointState as State
from pccheckd.base.logs import LOG

from .checkpoint import Checkpoint
from .phases import Phases, phases
from .trace import Ring, record
from .volumes import Key


class Counting(Protocol):
    """What metrics are told."""

    def requested(self, key: Key, item: Checkpoint) -> None: ...
    def ended(self, key: Key, item: Checkpoint, took: Phases) -> None: ...


class Chronicle:
    """One per daemon; only the loop touches it."""

    def __init__(self, *, enabled: Callable[[], bool] = lambda: True) -> None:
        self.ring = Ring()
        self.metrics: Counting | None = None
        self._enabled = enabled

    def requested(self, key: Key, item: Checkpoint) -> None:
        metrics = self.metrics
        if metrics is not None and self._enabled():
            self._guard(lambda: metrics.requested(key, item))

    def ended(self, key: Key, item: Checkpoint) -> None:
        """It is durable, superseded, skipped, or has failed."""
        if self._enabled():
            self._guard(lambda: self._ended(key, item))

    def _ended(self, key: Key, item: Checkpoint) -> None:
        took = phases(item)
        self.ring.add(record(key, item))
        LOG.log(
            logging.WARNING if item.state is State.FAILED else logging.INFO,
            "%s: step %d %s", key, item.step, told(item, took),
            # Every durable one has its line; the others may be a loop's.
            extra={"fields": fields(key, item, took), "always": item.state is State.DURABLE},
        )  # fmt: skip
        if self.metrics is not None:
            self.metrics.ended(key, item, took)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            LOG.exception("a checkpoint could not be recorded; it is not affected")


def told(item: Checkpoint, took: Phases) -> str:
    """The end of one checkpoint, for people."""
    name = item.state.name.lower()
    if item.state is not State.DURABLE:
        hint = f"; {item.hint}" if item.hint else ""
        return f"{name}: {item.reason}{hint}" if name == "failed" else f"was {name}: {item.reason}"
    moved = f", moved {item.rehomed} times" if item.rehomed else ""
    parts = ", ".join(
        f"{word} {seconds:.3f}"
        for word, seconds in zip(Phases._fields[:-1], took[:-1], strict=True)
        if seconds is not None
    )
    return (
        f"is durable {took.durable or 0:.3f} s after its request: {parts} s "
        f"({size_text(item.payload_bytes)}, sequence {item.sequence}, slot {item.slot}{moved})"
    )


def fields(key: Key, item: Checkpoint, took: Phases) -> dict[str, object]:
    """The same for machines; what is not known is left out."""
    known: dict[str, object | None] = {
        "event": item.state.name.lower(),
        "uid": key.uid,
        "job": key.job,
        "rank": key.rank,
        "run": item.incarnation,
        "step": item.step,
        "sequence": item.sequence or None,
        "slot": item.slot,
        "session": item.session,
        "snapshot": item.snapshot,
        "payload_bytes": item.payload_bytes,
        "transfer": "pull" if item.map else "push",
        "rehomed": item.rehomed or None,
        "stage": item.stage or None,
        "error": item.error or None,
        "reason": item.reason or None,
        "hint": item.hint or None,
    }
    known |= {f"{word}_s": seconds for word, seconds in took._asdict().items()}
    return {name: value for name, value in known.items() if value is not None}
