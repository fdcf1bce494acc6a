"""The last checkpoints of every user, for `pccheckctl trace`: a bounded ring."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

from .checkpoint import Record

SCHEMA = 1
#: Of one user: minutes at ten checkpoints a second, about 2.5 MiB when full.
RECORDS_PER_UID = 4096
UIDS_MAX = 64
#: In one answer, newest ones first: some 5 MiB of the 16 that a reply may have.
RECORDS_PER_ANSWER = 8192

Document = dict[str, object]


class Ring:
    """Ended checkpoints, the newest ones of each user: no user displaces those of another."""

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
        """Newest first, of what the asker may see (its own; root sees all), ended after `since`."""
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
