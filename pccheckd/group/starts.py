"""Who belongs to which start of a job. Pure: no I/O, no clock.

A process has a random identity of its own, which its reconnects repeat. A new process is a new
start of its rank, whatever its launch id is: launch ids repeat (a loop in a batch script, a
launcher's restart counter that begins at 0 again). So a launch id only separates: ranks with
different launch ids never belong to one start.

A start is open until every rank has joined it. A new process takes a free place in the newest start
if that is open and one of its processes lives, or the place of a process that has ended without a
request of a checkpoint; otherwise a new start begins. A process that has requested checkpoints in
an older start is *fenced*: its requests fail until it restores. The restore makes the process a
member of the newest start, or begins a new start if all processes of the newest have ended. A
process that has requested no checkpoint joins the newest start without a restore.

A restarted daemon does not know which ranks had joined a start. But a rank registers before its
first request, and then its volume names the start. If the volume named only earlier starts when
the rank's new process came, the rank has saved nothing in this start. So its place is free, for a
process that an earlier daemon served or for a rank that was late.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import islice
from secrets import token_bytes
from typing import NamedTuple

from pccheck_native.group import Held
from pccheck_native.identity import UNKNOWN
from pccheck_native.names import Bases

STARTS_KEPT = 16
INCARNATION_MAX = 2**62
ID_BYTES = 16
MISSING_MAX = 64  # that are named


class StartKind(NamedTuple):
    """Only processes that are equal in this can be of one start."""

    launch: str
    world_size: int
    here: int  # how many of its ranks are on this node

    @property
    def is_wide(self) -> bool:
        """Some of its ranks are on other nodes."""
        return self.here < self.world_size


class Arrival(NamedTuple):
    """A process that connects."""

    rank: int
    process: bytes
    launch: str = ""
    world_size: int = 1
    was: int = 0  # the incarnation that an earlier daemon gave it; 0: it is new
    start_id: bytes = b""  # of the start `was`
    moved: bool = False  # `was` belongs to other volumes
    here: int = 0  # how many ranks of its start are on this node; 0: all

    @property
    def kind(self) -> StartKind:
        return StartKind(self.launch, self.world_size, self.here or self.world_size)


@dataclass(slots=True)
class Member:
    """A process of one rank in one start."""

    process: bytes
    live: bool = True
    begun: bool = False  # has requested a checkpoint
    #: The newest incarnation that the volumes of its rank named when it came; None: not known.
    found: int | None = None
    restores: Held | None = None  # the checkpoint that was chosen for it last
    #: Of a wide start: the number of the last restore that it took part in, and whether it has
    #: requested a checkpoint since then.
    round: int = 0
    moved: bool = False


@dataclass(slots=True)
class Start:
    incarnation: int
    kind: StartKind
    #: Random: an incarnation may come again when a volume was away while a start began.
    id: bytes = field(default_factory=lambda: token_bytes(ID_BYTES))
    members: dict[int, Member] = field(default_factory=dict)
    closed: bool = False  # every rank has joined
    #: An earlier daemon began it, and only the volumes tell which ranks had joined.
    rejoined: bool = False
    #: The job's newest sequence when it began: its members request what comes after.
    above: int | None = None
    #: The number its members use, from an earlier daemon that did not see newer runs.
    known_as: int = 0
    bases: Bases = field(default_factory=Bases)  # which restore each of its members continues from

    @property
    def world_size(self) -> int:
        return self.kind.world_size

    def begins_above(self, sequence: int) -> int:
        """Its `above`, which is `sequence` when it had none."""
        if self.above is None:
            self.above = sequence
        return self.above

    def has_place(self, who: Arrival) -> bool:
        """Not every rank has joined it, and this one has no process that lives or has saved."""
        if self.closed or self.kind != who.kind:
            return False
        before = self.members.get(who.rank)
        return before is None or not (before.live or before.begun)

    def is_late_half_of(self, was: int) -> bool:
        """Its members are new, and their ranks had not registered in the start `was`."""
        every = [member.found for member in self.members.values()]
        return not (self.rejoined or self.known_as) and all(
            found is not None and found < was for found in every
        )

    @property
    def is_live(self) -> bool:
        return any(member.live for member in self.members.values())

    @property
    def counts(self) -> bool:
        """False for a start whose processes have all ended without a checkpoint."""
        return any(member.live or member.begun for member in self.members.values())

    def missing(self) -> list[int]:
        """Ranks without a live process."""
        if self.world_size == 1:  # whichever rank saves alone
            return [] if self.is_live else [0]
        live = {rank for rank, member in self.members.items() if member.live}
        if len(live) == self.kind.here:
            return []
        absent = (rank for rank in self._ranks_here() if rank not in live)
        return list(islice(absent, MISSING_MAX))

    def _ranks_here(self) -> Collection[int]:
        """Its ranks on this node. While some have not come, launchers number a node's ranks in a
        row."""
        if len(self.members) == self.kind.here:
            return sorted(self.members)
        first = min(self.members, default=0) // self.kind.here * self.kind.here
        return range(first, min(first + self.kind.here, self.world_size))

    def lost(self) -> list[int]:
        """Those of `missing` that had one: not ranks that are late."""
        return [rank for rank in self.missing() if self.rejoined or rank in self.members]


NO_START = Start(0, StartKind("", 0, 0), UNKNOWN)


class Starts:
    """The starts of one job that this daemon has seen, oldest first."""

    def __init__(self) -> None:
        self._starts: list[Start] = []

    @property
    def current(self) -> Start | None:
        """The newest start that counts."""
        for start in reversed(self._starts):
            if start.counts:
                return start
        return None

    def all(self) -> list[Start]:
        """Oldest first."""
        return list(self._starts)

    def of(self, rank: int, process: bytes) -> Start | None:
        """The newest start that a process is a member of."""
        for start in reversed(self._starts):
            member = start.members.get(rank)
            if member is not None and member.process == process:
                return start
        return None

    def join(self, who: Arrival, known: int, found: int | None = None) -> Start:
        """The start of a process that connects. `known` is the newest incarnation that the job's
        volumes name, `found` the newest one that the volumes of its rank name (None: not all could
        be read)."""
        if who.was > INCARNATION_MAX:  # no daemon gives out such a number
            who = who._replace(was=0)
        start = self.of(who.rank, who.process)
        if start is None or start.kind[1:] != who.kind[1:]:
            if who.was:
                start = self._rejoined(who, max(known, who.was + 1) if who.moved else known)
            else:
                start = self._open(who, found) or self._begin(who.kind, known)
            start.members[who.rank] = Member(who.process, begun=bool(who.was), found=found)
        start.members[who.rank].live = True
        start.closed = start.closed or len(start.members) == start.kind.here
        self._gather()
        return self.of(who.rank, who.process) or start

    def left(self, rank: int, process: bytes) -> None:
        """The process has ended, or its session."""
        start = self.of(rank, process)
        if start is not None:
            start.members[rank].live = False

    def may_ask(self, rank: int, process: bytes) -> Start | None:
        """The start in which the process requests a checkpoint; None when it is fenced."""
        start, current = self.of(rank, process), self.current
        if start is None or current is None:
            return None
        if start is not current:
            if start.members[rank].begun:
                return None
            start = self.follow(rank, process)
            if start is not self.current:
                return None
        start.members[rank].begun = True
        return start

    def follow(self, rank: int, process: bytes) -> Start:
        """The process restores: it becomes a member of the newest start, if that has as many ranks.
        One that has ended meanwhile stays where it was. Returns its start. Raises KeyError for a
        process that has not joined."""
        start, current = self.of(rank, process), self.current
        if start is None:
            raise KeyError(process)
        if current is None or start is current or not start.members[rank].live:
            return start
        if start.kind != current.kind:
            if current.is_live:
                return start
            current = self._begin(start.kind, 0)  # no process is left there
        taken = current.members.get(rank)
        if taken and taken.live:
            return start
        restores = start.members.pop(rank).restores
        begun = taken is not None and taken.begun  # what that process saved is a past of this one
        current.members[rank] = Member(process, begun=begun, restores=restores)
        current.bases.came((rank, process))
        current.closed = current.closed or len(current.members) == current.kind.here
        return current

    def before(self, rank: int, process: bytes) -> int | None:
        """The incarnation whose checkpoints this process must not restore: other members of its own
        start made them. None for a process that has requested checkpoints itself."""
        start = self.of(rank, process)
        return None if start is None or start.members[rank].begun else start.incarnation

    def _gather(self) -> None:
        """Moves processes that have requested nothing to the newest start of their launch."""
        current = self.current
        for start in list(self._starts):
            if current is None or start.kind != current.kind:
                continue
            for rank, member in list(start.members.items()):
                if member.live and not member.begun:
                    self.follow(rank, member.process)

    def _open(self, who: Arrival, found: int | None) -> Start | None:
        """The newest start, if a new process may join it."""
        start = self.current
        if start is None or not start.has_place(who):
            return None
        if not start.is_live:
            return None  # what its members have saved is of a launch that has ended
        if start.rejoined and (found is None or found >= start.incarnation):
            return None  # another process of this rank has taken part in it
        return start

    def _begin(self, kind: StartKind, known: int) -> Start:
        newest = max((start.incarnation for start in self._starts), default=0)
        return self._add(Start(max(newest, known) + 1, kind))

    def _rejoined(self, who: Arrival, known: int) -> Start:
        """The start of a process that an earlier daemon served."""
        was, late = who.was, self.current
        for start in reversed(self._starts):
            if was in (start.incarnation, start.known_as) and start.kind[1:] == who.kind[1:]:
                return start
        newer = any(start.incarnation > was and start.counts for start in self._starts)
        fits = late is not None and late.incarnation > was and late.has_place(who)
        if late is not None and fits and late.is_late_half_of(was):
            late.known_as = was
            return late
        if newer or was >= known:
            start = Start(was, who.kind, rejoined=True)
            if len(who.start_id) == ID_BYTES:
                start.id = who.start_id
            return self._add(start)
        # The volumes have newer runs than that daemon saw: this start comes after them.
        start = self._begin(who.kind, known)
        start.closed, start.known_as = True, was
        return start

    def _add(self, start: Start) -> Start:
        self._starts.append(start)
        self._starts.sort(key=lambda one: one.incarnation)
        if len(self._starts) > STARTS_KEPT:
            over = (one for one in self._starts if not one.is_live and one is not start)
            self._starts.remove(next(over, self._starts[0]))
        return start
