"""The last checkpoints of every user with their times, for `pccheckctl trace`: a bounded ring."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from .checkpoint import Checkpoint
from .volumes import Key

SCHEMA = 1
#: Of one user: minutes at ten checkpoints a second, about 2.5 MiB when full.
RECORDS_PER_UID = 4096
UIDS_MAX = 64
#: In one answer, newest ones first: some 4 MiB of the 16 that a reply may have.
RECORDS_PER_ANSWER = 8192

Document = dict[str, object]


class Record(NamedTuple):
    """One checkpoint. Times are CLOCK_MONOTONIC ns; 0 = not reached."""

    uid: int
    job: str
    rank: int
    session: int
    incarnation: int
    step: int
    sequence: int
    slot: int | None
    payload_bytes: int
    pulled: bool
    state: str
    reason: str
    rehomed: int
    held_at: int  # when the gate last held the trainer before this request ...
    held: int  # ... and for how long it did so since the request before, as the trainer says
    requested: int
    ended: int
    begin: int
    first_write: int
    sealed: int
    written: int
    flushed: int
    durable: int


def record(key: Key, item: Checkpoint) -> Record:
    times = item.times_ns
    return Record(
        uid=key.uid, job=key.job, rank=key.rank, session=item.session,
        incarnation=item.incarnation, step=item.step, sequence=item.sequence, slot=item.slot,
        payload_bytes=item.payload_bytes, pulled=bool(item.map), state=item.state.name.lower(),
        reason=item.reason, rehomed=item.rehomed, held_at=item.held_at_ns, held=item.held_ns,
        requested=item.requested_ns,
        ended=0 if item.live else max(item.at_ns.values(), default=0),
        begin=times.get("begin", 0), first_write=times.get("first_write", 0),
        sealed=times.get("sealed", 0), written=times.get("written", 0),
        flushed=times.get("flushed", 0), durable=times.get("durable", 0),
    )  # fmt: skip


class Ring:
    """Checkpoints that have ended, the newest ones of each user: nobody's pushes another's out."""

    def __init__(self, *, per_uid: int = RECORDS_PER_UID, uids: int = UIDS_MAX) -> None:
        self._per_uid = per_uid
        self._uids = uids
        self._kept: OrderedDict[int, deque[Record]] = OrderedDict()

    def add(self, item: Record) -> None:
        kept = self._kept.setdefault(item.uid, deque(maxlen=self._per_uid))
        kept.append(item)
        self._kept.move_to_end(item.uid)
        if len(self._kept) > self._uids:
            self._kept.popitem(last=False)

    def newest(self, asker_uid: int, since_ns: int) -> Iterator[Record]:
        """Newest first, of what the asker may see: his own, root all; that ended after `since`."""
        for uid, kept in self._kept.items():
            if asker_uid in (0, uid):
                for item in reversed(kept):
                    if item.ended < since_ns:
                        break
                    yield item


class Taken(NamedTuple):
    """What a document is made of, as it was on the loop; nothing of it changes any more."""

    records: list[Record]
    since_ns: int
    now_ns: int
    wall_ns: int  # the wall clock at `now_ns`


def take(
    ended: Iterable[Record], live: Iterable[Record], *, since_ns: int, now_ns: int, wall_ns: int
) -> Taken:
    """On the loop, and quick: references only."""
    return Taken([*live, *islice(ended, RECORDS_PER_ANSWER)], since_ns, now_ns, wall_ns)


def document(taken: Taken) -> Document:
    """What `pccheckctl trace` makes a trace of. Too long for the loop."""
    records = sorted(taken.records, key=lambda item: item.requested)
    return {
        "schema": SCHEMA,
        "since_ns": taken.since_ns,
        "now_ns": taken.now_ns,
        "wall_ns": taken.wall_ns,
        "checkpoints": [item._asdict() for item in records],
    }
