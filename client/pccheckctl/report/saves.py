"""What a report says of checkpoints, in numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from pccheckctl.commands.trace import free_lane
from pccheckctl.output.documents import Document, rows, text, whole

LOST = ("failed", "skipped")

Key: TypeAlias = tuple[int, str, int]  # uid, job, rank


class Save(NamedTuple):
    """A checkpoint of one rank. Times in ns of one clock; 0: not reached."""

    uid: int
    job: str
    rank: int
    step: int
    sequence: int
    state: str
    reason: str
    in_memory: bool  # its level is memory
    written_bytes: int
    held_at: int
    held: int
    requested: int
    ended: int
    begin: int
    first_write: int
    sealed: int
    written: int
    flushed: int
    durable: int

    def took_s(self, since: str, until: str) -> float | None:
        """Seconds; None when one of the two was not reached."""
        began, ended = getattr(self, since), getattr(self, until)
        return max(ended - began, 0) / 1e9 if began and ended else None

    def end(self, now_ns: int) -> int:
        return self.ended or now_ns

    @property
    def lane_begin(self) -> int:
        """When it took a lane: of a memory-only one when it was written; 0: never."""
        return self.first_write if self.in_memory else self.begin

    def parked_end(self, now_ns: int) -> int:
        """When it was no longer in memory only."""
        return self.lane_begin or self.end(now_ns)


class TracedSaves(NamedTuple):
    """All of a report, by time of request."""

    items: list[Save]
    now_ns: int
    wall_ns: int  # the wall clock at `now_ns`
    nodes: Sequence[Document] = ()  # jobs on several nodes, as in status

    def ranks(self) -> dict[Key, list[Save]]:
        found: dict[Key, list[Save]] = {}
        for item in self.items:
            found.setdefault((item.uid, item.job, item.rank), []).append(item)
        return dict(sorted(found.items()))

    @property
    def span_ns(self) -> tuple[int, int]:
        """From the first event to the last one, or to now if something is in flight."""
        if not self.items:
            return self.now_ns, self.now_ns
        first = min(min(filter(None, (one.held_at, one.requested))) for one in self.items)
        return first, max(one.end(self.now_ns) for one in self.items)


def saves_of(document: Document, *, job: str | None, uid: int | None) -> TracedSaves:
    """The saves in a daemon's trace document."""
    found = [_save(row) for row in rows(document, "checkpoints")]
    kept = [one for one in found if job in (None, one.job) and uid in (None, one.uid)]
    kept.sort(key=lambda one: one.requested)
    wide = [one for one in rows(document, "nodes") if job in (None, text(one, "job"))]
    wide = [one for one in wide if uid in (None, one.get("uid"))]
    return TracedSaves(kept, whole(document, "now_ns"), whole(document, "wall_ns"), wide)


def _save(row: Document) -> Save:
    texts = {name: text(row, name) for name in ("job", "state", "reason")}
    names = [name for name in Save._fields if name not in (*texts, "in_memory")]
    numbers = {name: whole(row, name) for name in names}
    return Save(**texts, **numbers, in_memory=row.get("in_memory") is True)  # type: ignore[arg-type]


def disk_rates(items: Iterable[Save], span_ns: tuple[int, int], bins: int) -> list[float]:
    """Bytes per second in equal parts of the time. What was written counts evenly between the first
    write and the last."""
    since, until = span_ns
    width = max(1, until - since) / bins
    found = [0.0] * bins
    for one in items:
        if not (one.first_write and one.written > one.first_write):
            continue
        rate = one.written_bytes / (one.written - one.first_write)
        first = max(0, int((one.first_write - since) / width))
        last = min(bins - 1, int((one.written - since) / width))
        for at in range(first, last + 1):
            begin = max(one.first_write, since + at * width)
            end = min(one.written, since + (at + 1) * width)
            found[at] += rate * max(0.0, end - begin)
    return [nbytes / (width / 1e9) for nbytes in found]


class Lag(NamedTuple):
    step: int
    seconds: float  # from the first rank's durable to the last one's
    slowest: int  # rank


def lags(items: Iterable[Save]) -> dict[tuple[int, str], list[Lag]]:
    """How far apart the ranks of a job got each common checkpoint durable."""
    ends: dict[tuple[int, str], dict[tuple[int, int], dict[int, int]]] = {}
    for one in items:
        if one.durable:
            job = ends.setdefault((one.uid, one.job), {})
            job.setdefault((one.sequence, one.step), {})[one.rank] = one.durable
    found = {}
    for key, by_sequence in ends.items():
        common = [
            Lag(step, (max(at.values()) - min(at.values())) / 1e9, max(at, key=at.__getitem__))
            for (_, step), at in sorted(by_sequence.items())
            if len(at) > 1
        ]
        if common:
            found[key] = common
    return found


class Loss(NamedTuple):
    state: str
    reason: str
    steps: list[int]


def losses(items: Iterable[Save]) -> list[Loss]:
    """What did not become durable and was not replaced by a newer one, by reason, most first."""
    steps: dict[tuple[str, str], list[int]] = {}
    for one in items:
        if one.state in LOST:
            steps.setdefault((one.state, one.reason), []).append(one.step)
    found = [Loss(*key, made) for key, made in steps.items()]
    return sorted(found, key=lambda loss: -len(loss.steps))


def lanes(items: Sequence[Save], now_ns: int) -> list[list[Save]]:
    """Those that had a lane, such that those of one lane do not overlap."""
    return _apart([(one.lane_begin, one.end(now_ns), one) for one in items if one.lane_begin])


def parked(items: Sequence[Save], now_ns: int) -> list[list[Save]]:
    """The memory-only ones, such that those of one row do not overlap there."""
    begun = (one for one in items if one.in_memory and one.begin)
    return _apart([(one.begin, one.parked_end(now_ns), one) for one in begun])


def _apart(spans: list[tuple[int, int, Save]]) -> list[list[Save]]:
    found: list[list[Save]] = []
    ends_ns: list[int] = []
    for begin_ns, end_ns, one in sorted(spans, key=lambda span: span[0]):
        row = free_lane(ends_ns, begin_ns, end_ns)
        if row == len(found):
            found.append([])
        found[row].append(one)
    return found
