"""The last checkpoints of every user, for `pccheckctl trace`: a bounded ring."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import islice

from pccheckd.base.access import has_access

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


def document(records: list[Record], *, since_ns: int, now_ns: int, wall_ns: int) -> Document:
    """What `pccheckctl trace` makes a trace of; `wall_ns`: the wall clock at `now_ns`. Too long for
    the loop."""
    return {
        "schema": SCHEMA,
        "since_ns": since_ns,
        "now_ns": now_ns,
        "wall_ns": wall_ns,
        "checkpoints": [
            item._asdict() for item in sorted(records, key=lambda item: item.requested)
        ],
    }
