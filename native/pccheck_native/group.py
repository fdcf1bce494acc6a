"""What the ranks of one job decide together: which checkpoint they all have, what each of them may
recycle, what none of them needs any more, and what a restore gets.

Pure: no I/O, no clock, no tasks. The daemon, the command line without a daemon, and one day the
nodes of a cluster call the same functions.

**One number for a group's checkpoint.** A sequence is given out once for all ranks of a job
(`names.py`), so that "the same checkpoint" is the same sequence on every rank. A checkpoint is
*common* when every rank of the world that saved it holds it, with equal step and incarnation.

**The floor.** A rank recycles nothing at or above the oldest of the `keep` newest common
checkpoints, unless the group gives it up. So the death of any process at any time leaves the newest
common checkpoint: the record that drops a checkpoint is made after a newer one had become common,
and what is common stays common until then.

**Why slots = N + keep suffice in lockstep.** Ranks in lockstep request the same checkpoints in the
same order. Let n be the lowest sequence that was requested, is above the newest common one, and is
neither common nor given up. When a rank requests n, it has nothing else above the newest common
one, only its `keep` common ones: N of its slots are free for n and what follows. So n is durable or
in flight on every rank, and ends by that rank's own disk. A rank that waits for a slot waits for n,
never for a rank that itself waits; and n frees a slot on every rank when it ends.

**A start of one rank** decides by itself, unless several ranks have left checkpoints. Then the same
rules hold for its volume: its own newest checkpoint of that time may be one that the others lack.

**When ranks are not in lockstep** the slots of one rank may be full of checkpoints that another
rank will never have. A checkpoint that a live rank has skipped, has failed to save, or has left out
by requesting a later one, is given up on all ranks at once. A checkpoint that only a rank without a
process lacks, that is damaged on a rank, or for which a rank has no slot, is given up when a rank
needs the slot, oldest first. A checkpoint that a live rank has not requested yet is waited for
(`lagging`); the caller bounds that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

PINS_SLOTS_MIN = 4  # a volume with fewer slots has room for one pin


class Held(NamedTuple):
    """A durable checkpoint of one rank."""

    sequence: int
    step: int
    incarnation: int
    world_size: int
    usable: bool = True  # not damaged, and readable when it was last read


class Rank(NamedTuple):
    """What is known of one rank."""

    held: Collection[Held] = ()
    #: Sequences of the checkpoints that the rank is saving, each with the world size of the start
    #: that requested it: a start of another size may have begun since.
    pending: Mapping[int, int] = MappingProxyType({})
    parked: Collection[int] = ()  # of these, what is in memory only, and may stay so ...
    blocked: Collection[int] = ()  # ... or was to be written, and found no slot
    #: The process of the rank will never request this sequence or an older one, because it has
    #: requested this sequence, or the sequence was in use before the process came. None: the rank
    #: has no process, and may get one. Above every sequence: no rank waits for this rank.
    asked: int | None = None
    #: Sequences that were protected when the present process came, because an earlier run had not
    #: restored them.
    pinned: frozenset[int] = frozenset()


Ranks = Mapping[int, Rank]
EMPTY = Rank()


class Agreement(NamedTuple):
    """What the publishers of all ranks obey (pcc_volume_set_group)."""

    #: From this sequence on, every checkpoint stays that is not given up; 0: all stay.
    oldest: int
    newest: int  # sequence of the newest common checkpoint; 0: there is none
    given_up: frozenset[int]  # sequences that some rank will never have


class Refused(NamedTuple):
    """Why nothing is restored although there are checkpoints."""

    reason: str
    hint: str


def common(ranks: Ranks) -> list[Held]:
    """The checkpoints that every rank of the world that saved them has, newest first."""
    usable = {rank: {item for item in known.held if item.usable} for rank, known in ranks.items()}
    nothing: set[Held] = set()
    found = {
        item
        for rank, held in usable.items()
        for item in held
        if item.world_size == 1
        or (
            rank == 0
            and 1 < item.world_size <= len(ranks)  # a record may name any size
            and all(item in usable.get(other, nothing) for other in range(item.world_size))
        )
    }
    return sorted(found, reverse=True)


def agree(ranks: Ranks, world_size: int, keep: int, short: Iterable[int] = ()) -> Agreement:
    """What may be recycled, now that `short` ranks have no slot for the next checkpoint. Takes
    linear time.

    The answer is safe at any time, and also if a volume obeys it late: `oldest` and `newest` only
    fall by damage, and a checkpoint that is given up can never become common. The caller keeps it
    given up.
    """
    kept = [item.sequence for item in common(ranks)[: max(1, keep)]]
    newest = kept[0] if kept else 0
    oldest = kept[-1] if len(kept) >= keep else 0
    sizes = {number: size for known in ranks.values() for number, size in known.pending.items()}
    sizes |= {item.sequence: item.world_size for known in ranks.values() for item in known.held}
    lacking = _Lacking(ranks)
    given_up = set()
    for number, size in sizes.items():
        if number in kept or (highest := lacking.highest(number, size)) is None:
            continue
        if number < newest or highest >= world_size or lacking.is_passed(number, size):
            given_up.add(number)
    there = (n for n, size in sizes.items() if n not in given_up)
    whole = max((n for n in there if lacking.highest(n, sizes[n]) is None), default=0)
    # A rank has no slot for what it has in memory; a newer one is there, or coming, on all ranks.
    blocked = {n for known in ranks.values() for n in known.blocked if n < whole}
    for_slots = set()  # each rank gives up the oldest that it can, whatever others give up
    for rank in short:
        known = ranks.get(rank, EMPTY)
        held = {item.sequence for item in known.held}
        # What is pending, too, has just become durable: the caller does not know of its end yet.
        for number in sorted(held.difference(kept, given_up, known.pending)):
            if number in blocked or lacking.may_not_ask(number, sizes[number]):
                for_slots.add(number)
                break
    return Agreement(oldest, newest, frozenset(given_up | for_slots))


class _Lacking:
    """The ranks of a world that lack a checkpoint: they have no intact copy, and none in flight.
    The world of a checkpoint that one rank saved alone is that rank.

    An answer visits at most the ranks that have the checkpoint, and one rank that lacks it: there
    may be as many checkpoints as ranks, and most ranks may lack each of them.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._has: defaultdict[int, set[int]] = defaultdict(set)
        self._held: defaultdict[int, set[int]] = defaultdict(set)  # also damaged
        for rank, known in ranks.items():
            for item in known.held:
                self._held[item.sequence].add(rank)
            for number in (*known.pending, *(item.sequence for item in known.held if item.usable)):
                self._has[number].add(rank)
        self._members: dict[int, _Members] = {}  # by the size of their world

    def highest(self, number: int, size: int) -> int | None:
        """The highest rank that lacks it; None when no rank does."""
        members = self._of(number, size)
        return size - 1 if members.some_never_came else self._first(members.by_rank, number)

    def is_passed(self, number: int, size: int) -> bool:
        """A rank with a process lacks the checkpoint, has no damaged copy of it either, and will
        never request it."""
        every = (rank for rank in self._of(number, size).live if rank not in self._held[number])
        return self._has_asked(self._first(every, number), number)

    def may_not_ask(self, number: int, size: int) -> bool:
        """A rank that lacks the checkpoint has no process, or a process that will never request
        it."""
        members = self._of(number, size)
        if members.some_never_came:
            return True
        if self._first(members.dead, number) is not None:
            return True
        return self._has_asked(self._first(members.live, number), number)

    def _of(self, number: int, size: int) -> _Members:
        if size == 1:
            return _Members(self._ranks, self._held[number])
        if size not in self._members:
            world = [rank for rank in self._ranks if rank < size]
            self._members[size] = _Members(self._ranks, world, size)
        return self._members[size]

    def _first(self, members: Iterable[int], number: int) -> int | None:
        has = self._has[number]
        return next((rank for rank in members if rank not in has), None)

    def _has_asked(self, rank: int | None, number: int) -> bool:
        asked = None if rank is None else self._ranks[rank].asked
        return asked is not None and asked >= number


class _Members:
    """The known ranks of a world: all, the highest first; those without a process; and the others,
    sorted by the newest sequence that they have requested, the highest first."""

    def __init__(self, ranks: Ranks, members: Collection[int], size: int = 0) -> None:
        self.some_never_came = len(members) < size
        self.by_rank = sorted(members, reverse=True)
        self.dead = [rank for rank in members if ranks[rank].asked is None]
        asked = {rank: at for rank in members if (at := ranks[rank].asked) is not None}
        self.live = sorted(asked, key=lambda rank: asked[rank], reverse=True)


def lagging(ranks: Ranks, world_size: int, rank: int, agreement: Agreement) -> list[int]:
    """The ranks for which `rank` waits without a slot: their next request may make common what
    fills the slots of `rank`. Empty when a checkpoint in flight will free a slot."""
    waits = [
        item.sequence
        for item in ranks.get(rank, EMPTY).held
        if item.sequence > agreement.newest and item.sequence not in agreement.given_up
    ]
    return [
        other
        for other, known in sorted(ranks.items())
        if other < world_size
        and known.asked is not None
        and not known.pending.keys() - known.parked
        and any(number > known.asked for number in waits)
    ]


def behind(ranks: Ranks, world_size: int) -> dict[int, int]:
    """How many checkpoints each rank lacks of those that some rank has durable, and that are newer
    than the newest common one."""
    held = {
        rank: {item.sequence for item in known.held if item.usable}
        for rank, known in ranks.items()
        if rank < world_size
    }
    newest = max((item.sequence for item in common(ranks)), default=0)
    every = {number for numbers in held.values() for number in numbers if number > newest}
    return {rank: len(every) - len(every & numbers) for rank, numbers in held.items()}


def stale(ranks: Ranks) -> set[int]:
    """Ranks that are not among those of the run that saved last, and only have checkpoints of
    earlier runs: nothing of them is current."""
    held = [(item, rank) for rank, known in ranks.items() for item in known.held]
    if not held:
        return set()
    newest, _ = max(held)
    members = {rank for item, rank in held if item.sequence == newest.sequence}
    if newest.world_size > 1:
        members = {rank for rank in ranks if rank < newest.world_size}
    return {
        rank
        for rank, known in ranks.items()
        if known.held and rank not in members
        and max(item.incarnation for item in known.held) < newest.incarnation
    }  # fmt: skip


def pins(ranks: Ranks, rank: int, incarnation: int, *, after: int, slots: int) -> set[int]:
    """Which sequences a rank must not recycle while its run has not restored (P7).

    Of the runs before `incarnation`, and above the sequence `after`, which counts as restored: the
    newest common checkpoint; where the ranks have none in common, this rank's newest. Also the
    oldest of these that an earlier run, which did not restore either, had to keep on all ranks: it
    is worth more than the few steps since. A volume with few slots has room for one pin.
    """
    mine = {item for item in ranks.get(rank, EMPTY).held if item.usable}
    shared = [item for item in common(ranks) if item in mine] or sorted(mine, reverse=True)
    before = [item for item in shared if item.incarnation < incarnation and item.sequence > after]
    if not before:
        return set()
    newest = before[0].sequence
    wanted = {min((o.sequence for o in before if _is_pinned(ranks, rank, o)), default=newest)}
    return wanted | {newest} if slots >= PINS_SLOTS_MIN else wanted


def _is_pinned(ranks: Ranks, rank: int, item: Held) -> bool:
    """On all ranks that saved it: the ranks must choose alike, and of a start that was not complete
    only some have pinned."""
    whose = range(item.world_size) if item.world_size > 1 else (rank,)
    return all(item.sequence in ranks.get(other, EMPTY).pinned for other in whose)


def choose(
    ranks: Ranks,
    rank: int,
    world_size: int,
    *,
    step: int | None = None,
    any_world_size: bool = False,
) -> Held | Refused | None:
    """What `rank` of a start of `world_size` ranks restores: the newest common checkpoint, of
    `step` if given. None only when no rank holds anything.

    `any_world_size`: saved by any number of ranks, whose parts the rank can all read.
    """
    if not any(known.held for known in ranks.values()):
        return None
    mine = ranks.get(rank, EMPTY).held
    shared = [item for item in common(ranks) if step in (None, item.step)]
    if not shared:
        return _nothing_common(ranks, range(max(world_size, _saved_by(ranks))), step)
    newest = shared[0]
    if newest.world_size != world_size and not any_world_size:
        return Refused(
            f"the checkpoint of step {newest.step} was saved by {count_ranks(newest.world_size)}, "
            f"and this start has {count_ranks(world_size)}",
            f"start the job with {count_ranks(newest.world_size)}; if the ranks saved with "
            "replicated=True, restore with replicated=True; fresh=True starts without a checkpoint",
        )
    if newest.world_size == 1 and newest not in mine and not any_world_size:
        holder = next(other for other, known in ranks.items() if newest in known.held)
        return Refused(
            f"the checkpoint of step {newest.step} was saved by rank {holder} alone, and this is "
            f"rank {rank}",
            f"restore the checkpoint on rank {holder}",
        )
    return newest


def _saved_by(ranks: Ranks) -> int:
    """The size of the world that asked for the newest checkpoint."""
    every = (item for known in ranks.values() for item in known.held)
    return max(every, key=lambda item: item.sequence).world_size


def _nothing_common(ranks: Ranks, wanted: Sequence[int], step: int | None) -> Refused:
    """Names what is missing, with numbers."""
    parts = []
    for rank in wanted[:8]:
        found = sorted(ranks.get(rank, EMPTY).held, reverse=True)
        steps = ", ".join(
            f"{item.step}{'' if item.usable else ' (damaged or unreadable)'}" for item in found[:8]
        )
        parts.append(f"rank {rank}: {steps or 'none'}")
    more = ", ..." if len(wanted) > len(parts) else ""
    what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
    several = len(wanted) > 1
    that = f"that all {len(wanted)} ranks have" if several else f"of rank {wanted[0]} that is valid"
    then = "fresh=True starts without a checkpoint"
    if step is not None and common(ranks):
        then = "choose a step that all ranks have, or leave step= out for the newest one"
    return Refused(
        f"there is {what} {that} (durable steps: {'; '.join(parts)}{more})",
        "pccheckctl list shows all checkpoints; if only one rank saves, solo=True restores the "
        f"newest checkpoint of that rank; {then}",
    )


def count_ranks(count: int) -> str:
    """For a sentence."""
    return "1 rank" if count == 1 else f"{count} ranks"
