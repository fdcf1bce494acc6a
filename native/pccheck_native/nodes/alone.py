"""A job of several nodes that one node runs, or ran, without the others.

Such a start needs no message, so the rules of one node decide what it saves and keeps. But the
other nodes must hear of it when they come back: they may have run the job, too. So what it has
saved gets a record, as a start with one member, before this node says hello to them. Pure: no I/O.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

from pccheck_native.identity import UNKNOWN, CheckpointId
from pccheck_native.nodes.facts import FullName
from pccheck_native.nodes.lists import PROTOCOL, ListMember, StartList
from pccheck_native.nodes.offers import SEEN_MAX, StartRecord


def list_alone(
    node: bytes, host: str, start: bytes, world_size: int, known: Collection[StartRecord],
    *, replicated: bool = False,
) -> StartList:  # fmt: skip
    """The list of a start whose ranks are all here. `replicated`: that of a job without records."""
    newest = max(known, key=lambda one: one.promise, default=None)
    ranks = tuple(range(world_size))
    member = ListMember(node, host, ranks, (b"",) * world_size)
    number = newest.who.number + 1 if newest else 1
    replicated = newest.who.replicated if newest else replicated
    return StartList(start, number, "", world_size, replicated, PROTOCOL, (member,))


def unrecorded(
    saved: Iterable[CheckpointId], node: bytes, host: str, known: Mapping[bytes, StartRecord],
    *, replicated: bool = False,
) -> Iterator[StartRecord]:  # fmt: skip
    """Makes a record for each start that saved here later than every start in `known`, oldest
    first. Without any, the job ran on this node before it had others: what all ranks of a start
    have here counts, and `replicated` says how they saved."""
    records, every = dict(known), list(saved)
    parts = Counter((one.start, one.sequence) for one in every)
    whole = {one.start for one in every if parts[one.start, one.sequence] == one.world_size}
    recorded = max((one.incarnation for one in every if one.start in known), default=0)
    starts = {
        one.incarnation: one
        for one in every
        if one.start not in {*known, UNKNOWN}
        and (known or one.start in whole)
        and one.incarnation > recorded
        and one.rank < one.world_size  # else a rank has saved with solo=True
    }
    for _, one in sorted(starts.items()):
        newest_first = sorted(records.values(), key=lambda one: one.promise, reverse=True)
        born = [record for record in newest_first if record.born]
        seen = dict.fromkeys(start for record in born for start in (record.start, *record.seen))
        who = list_alone(node, host, one.start, one.world_size, newest_first, replicated=replicated)
        made = StartRecord(who, tuple(seen)[:SEEN_MAX], ((0, None),))
        records[made.start] = made
        yield made


def is_alone(record: StartRecord) -> bool:
    return len(record.who.members) == 1


def globals_alone(held: Iterable[FullName], known: Mapping[bytes, StartRecord]) -> set[FullName]:
    """Of the parts that this node holds: what all ranks of a start of one node have."""
    found = Counter(full for full in held if is_alone(known[full.start]))
    return {full for full, parts in found.items() if parts == known[full.start].who.world_size}
