"""How each checkpoint ended, reported once, to log, trace and metrics.

Nothing in here may end a checkpoint: its own errors are logged and dropped."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol

from pccheck_wire.basics import size_text
from pccheck_wire.ends import Cause
from pccheckd.base.access import has_access
from pccheckd.base.logs import LOG

from .checkpoint import RankCheckpoint, Record
from .volumes import Key

SCHEMA = 1
#: Of one user: minutes at ten checkpoints a second, about 2.5 MiB when full.
RECORDS_PER_UID = 4096
UIDS_MAX = 64
#: In one answer, newest ones first: some 5 MiB of the 16 that a reply may have.
RECORDS_PER_ANSWER = 8192
#: Fields of a line in the log, for machines; those that are not known are left out.
_FIELDS = ("uid", "job", "rank", "step", "session", "snapshot", "payload_bytes")
_IF_ANY = ("sequence", "written_bytes", "rehomed", "stage", "error", "reason", "hint")


Document = dict[str, object]


class Counting(Protocol):
    """What counts checkpoints: the metrics."""

    def requested(self, item: Record) -> None: ...
    def ended(self, item: Record) -> None: ...
    def unrequested(self, key: Key, count: int, error: str) -> None: ...


class Ring:
    """Ended checkpoints, the newest ones of each user: no user displaces those of another."""

    def __init__(self, *, per_uid: int = RECORDS_PER_UID, uids: int = UIDS_MAX) -> None:
        self._per_uid = per_uid
        self._uids = uids
        self._kept: OrderedDict[int, deque[Record]] = OrderedDict()

    def add(self, item: Record) -> None:
        kept = self._kept.setdefault(item.id.uid, deque(maxlen=self._per_uid))
        kept.append(item)
        self._kept.move_to_end(item.id.uid)
        if len(self._kept) > self._uids:
            self._kept.popitem(last=False)

    def newest(self, asker_uid: int, since_ns: int) -> list[Record]:
        """Checkpoints that ended after `since` and that the asker may see, newest first,
        RECORDS_PER_ANSWER at most."""
        return list(islice(self._newest(asker_uid, since_ns), RECORDS_PER_ANSWER))

    def _newest(self, asker_uid: int, since_ns: int) -> Iterator[Record]:
        for uid, kept in self._kept.items():
            if has_access(asker_uid, uid):
                for item in reversed(kept):
                    if item.ended < since_ns:
                        break
                    yield item


class Chronicle:
    """One per daemon; only the loop touches it."""

    def __init__(self, *, enabled: Callable[[], bool] = lambda: True) -> None:
        self.ring = Ring()
        self._metrics: Counting | None = None
        self._enabled = enabled

    def count_with(self, metrics: Counting) -> None:
        """From now on `metrics` counts, too."""
        self._metrics = metrics

    def requested(self, item: RankCheckpoint) -> None:
        metrics = self._metrics
        if metrics is not None and self._enabled():
            self._guard(lambda: metrics.requested(item.record()))

    def ended(self, item: RankCheckpoint) -> None:
        """It is durable, superseded, skipped, or has failed."""
        if self._enabled():
            self._guard(lambda: self._ended(item.record()))

    def unrequested(self, key: Key, count: int, error: str) -> None:
        """Checkpoints failed before they were requested, as their trainer reports."""
        metrics = self._metrics
        if metrics is not None and self._enabled():
            self._guard(lambda: metrics.unrequested(key, count, error))

    def _ended(self, item: Record) -> None:
        self.ring.add(item)
        LOG.log(
            _level(item),
            "%s: step %d %s", Key(*item.id[:3]), item.id.step, sentence(item),
            # Each durable checkpoint has its line; of the others a loop may make thousands.
            extra={"fields": fields(item), "always": item.state == "durable"},
        )  # fmt: skip
        if self._metrics is not None:
            self._metrics.ended(item)

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            LOG.exception("a checkpoint could not be recorded; the checkpoint is not affected")


def _level(item: Record) -> int:
    if item.state == "failed":
        return logging.WARNING
    # A job that saves every step has one of these per step and rank.
    replaced = item.in_memory and item.state == "superseded"
    withdrawn = item.state == "skipped" and item.reason == Cause.WITHDRAWN.reason
    return logging.DEBUG if replaced or withdrawn else logging.INFO


def sentence(item: Record) -> str:
    """The end of one checkpoint, for people."""
    if item.state != "durable":
        hint = f"; {item.hint}" if item.hint else ""
        failed = item.state == "failed"
        return f"failed: {item.reason}{hint}" if failed else f"was {item.state}: {item.reason}"
    moved = f", moved {item.rehomed} times" if item.rehomed else ""
    size = size_text(item.payload_bytes)
    if 0 < item.written_bytes < item.payload_bytes:
        size += f", of which {size_text(item.written_bytes)} were written"
    took = item.seconds()
    total = took.pop("durable", 0.0)
    parts = ", ".join(f"{word} {seconds:.3f}" for word, seconds in took.items())
    return (
        f"is durable {total:.3f} s after its request: {parts} s "
        f"({size}, sequence {item.id.sequence}, slot {item.slot}{moved})"
    )


def fields(item: Record) -> dict[str, object]:
    """The same for machines."""
    known = item.document()
    found: Document = {"event": item.state, "run": item.id.incarnation}
    found |= {name: known[name] for name in _FIELDS}
    found |= {name: value for name in _IF_ANY if (value := known[name])}
    if item.slot is not None:
        found["slot"] = item.slot
    found["transfer"] = "pull" if item.pulled else "push"
    return found | {f"{word}_s": seconds for word, seconds in item.seconds().items()}


def document(
    records: list[Record], nodes: list[Document], *, since_ns: int, now_ns: int, wall_ns: int
) -> Document:
    """What `pccheckctl trace` makes a trace of; `wall_ns`: the wall clock at `now_ns`. Too long for
    the loop."""
    return {
        "schema": SCHEMA,
        "since_ns": since_ns,
        "now_ns": now_ns,
        "wall_ns": wall_ns,
        "nodes": nodes,
        "checkpoints": [
            item.document() for item in sorted(records, key=lambda item: item.requested)
        ],
    }
