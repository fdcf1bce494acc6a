"""What is global and what is given up: facts that follow from what the nodes of a start publish,
and what each node keeps because of them. Pure: no I/O, no clock.

Both facts stay true for ever, so a state or a fact may arrive late, twice, or from two writers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from pccheck_native.nodes import plain


class SaveName(NamedTuple):
    """Which checkpoint of its start. Ordered, from left to right; all ranks make equal names."""

    base: int  # the round: the number of the restore of all ranks, in this start, before the save
    descents: int  # how often the step has gone down since then, without a restore
    step: int
    row: int  # how often this step was repeated directly

    def to_plain(self) -> list[int]:
        return list(self)

    @classmethod
    def of_plain(cls, value: object) -> SaveName:
        """Raises ValueError."""
        found = plain.items(value, "a name", count=len(cls._fields))
        return cls(*(plain.number(one, "a field of a name") for one in found))


class FullName(NamedTuple):
    """Which checkpoint of its job. Two of different starts are not ordered by this."""

    start: bytes
    name: SaveName

    def to_plain(self) -> list[object]:
        return [self.start, *self.name]

    @classmethod
    def of_plain(cls, value: object) -> FullName:
        """Raises ValueError."""
        start, *name = plain.items(value, "a checkpoint", count=1 + len(SaveName._fields))
        return cls(plain.raw(start, "a start"), SaveName.of_plain(name))


class Have(NamedTuple):
    """What a node publishes in its start; names in order, none older than its newest global."""

    offered: tuple[SaveName, ...] = ()  # durable on all ranks of the node, and promised
    #: Durable, in flight, or not yet asked for, on every rank of the node.
    there: tuple[SaveName, ...] = ()
    passed: SaveName | None = None  # the newest that any rank of the node asked for
    known: tuple[SaveName, ...] = ()  # the newest globals of this start that it knows, newest first

    def to_plain(self) -> list[object]:
        names = [
            [one.to_plain() for one in some] for some in (self.offered, self.there, self.known)
        ]
        return [*names, self.passed and self.passed.to_plain()]

    @classmethod
    def of_plain(cls, value: object) -> Have:
        """Raises ValueError."""
        *names, passed = plain.items(value, "what a node has", count=4)
        offered, there, known = map(_names_of_plain, names)
        last = None if passed is None else SaveName.of_plain(passed)
        return cls(offered, there, last, known)


class Said(NamedTuple):
    """The facts about one start."""

    globals: tuple[SaveName, ...] = ()  # newest first
    given_up: tuple[SaveName, ...] = ()  # in order; all newer than the newest global

    def to_plain(self) -> list[object]:
        return [[one.to_plain() for one in some] for some in self]

    @classmethod
    def of_plain(cls, value: object) -> Said:
        """Raises ValueError."""
        return cls(*map(_names_of_plain, plain.items(value, "what is said", count=2)))


class RankHas(NamedTuple):
    """One rank of a node, as its daemon knows it."""

    #: Not what failed; also what was found damaged since, for somebody may count on it.
    durable: Collection[SaveName] = ()
    in_flight: Collection[SaveName] = ()
    asked: SaveName | None = None  # the newest that its process asked for; the older ones it passed


class Promises(NamedTuple):
    """What a node has promised in a round of its start, and must keep. On the disk: `known`, and
    one bit for each shard that is `offered`."""

    start: bytes
    #: The `keep` newest globals that this node knows: those of this round, newest first, then what
    #: this round restored, then older ones.
    known: tuple[FullName, ...] = ()
    offered: frozenset[SaveName] = frozenset()
    round: int = 0

    @property
    def newest(self) -> SaveName | None:
        """The newest global of this round."""
        return next((one.name for one in self.known[:1] if self.is_own(one)), None)

    def is_own(self, one: FullName) -> bool:
        """It was saved in this round."""
        return one.start == self.start and one.name.base >= self.round


class Space(NamedTuple):
    """How many checkpoints a node may keep for others."""

    promises: int
    #: One slot stays without a promise, so no save ever waits for a message.
    spare: bool


def room(slots: int, flights: int, keep: int) -> Space:
    """For volumes with `slots`, of which `flights` are for what is being written (N). N + keep + 1
    slots leave one without a promise, in which local checkpoints rotate while nothing can be
    agreed. Volumes with fewer promise all."""
    spare = slots >= flights + keep + 1
    return Space(slots - 1 if spare else slots, spare)


def say(haves: Sequence[Have | None]) -> Said:
    """The facts, from what each member of the start published last (None: nothing was heard).

    Global: every member offers it, or one knows it. Given up: some member has passed it, and has it
    neither durable nor in flight. What a member recycled under a newer global would look given up,
    so names that are not newer than the newest global are left out.
    """
    heard = [have for have in haves if have is not None]
    known = {name for have in heard for name in have.known}
    if heard and len(heard) == len(haves):
        known |= set.intersection(*(set(have.offered) for have in heard))
    newest = max(known, default=None)
    open_names = {
        name
        for have in heard
        for name in (*have.offered, *have.there)
        if newest is None or name > newest
    }
    lost = {name for name in open_names if who_lacks(haves, name)}
    return Said(tuple(sorted(known, reverse=True)), tuple(sorted(lost)))


def who_lacks(haves: Sequence[Have | None], name: SaveName) -> list[int]:
    """The members that have passed a checkpoint, and have it neither durable nor in flight."""
    return [
        at
        for at, have in enumerate(haves)
        if have is not None
        and have.passed is not None
        and name <= have.passed
        and name not in (*have.there, *have.offered)
    ]


def begin(
    start: bytes, restored: FullName | None, known: Iterable[FullName], keep: int, round_: int = 0
) -> Promises:
    """The promises of a node when the answer to a round is recorded; `known`: its globals before.
    What was restored counts as a known global. What it offered before may go."""
    counted = () if restored is None else (restored,)
    older = (one for one in known if one != restored)
    return Promises(start, (*counted, *older)[:keep], frozenset(), round_)


def hear(mine: Promises, said: Said, keep: int) -> Promises:
    """What a node knows and has promised, once it has heard these facts."""
    heard = {FullName(mine.start, name) for name in said.globals}
    own = {one for one in (*mine.known, *heard) if mine.is_own(one)}
    older = [one for one in mine.known if not mine.is_own(one)]
    after = mine._replace(known=(*sorted(own, reverse=True), *older)[:keep])
    lost = set(said.given_up)
    return after._replace(
        offered=frozenset(
            name for name in mine.offered if name not in lost and _is_newer(name, after.newest)
        )
    )


def offer(mine: Promises, held: Collection[FullName], space: Space) -> Promises:
    """With more offered, oldest first, as far as there is space. `held`: durable on a rank of the
    node, or about to be: the record that makes a shard durable says whether it may be offered."""
    offered = set(mine.offered)
    kept = len(stays(mine).intersection(held))
    for name in sorted(one.name for one in held if mine.is_own(one)):
        if name in offered or not _is_newer(name, mine.newest):
            continue
        kept += 1
        if kept > space.promises:
            break
        offered.add(name)
    return mine._replace(offered=frozenset(offered))


def give_up(mine: Promises, ranks: Sequence[RankHas]) -> Promises:
    """Without what a rank of this node will never have: the node never offers that. No other node
    need have heard of it, so nothing else would free the shards of the other ranks here."""
    ours = (name for name in mine.offered if all(_may_have(rank, name) for rank in ranks))
    return mine._replace(offered=frozenset(ours))


def stays(mine: Promises) -> set[FullName]:
    """What the node must not recycle. The rest may go; what is older than this round only because
    its answer is recorded here, else there are no `Promises` for this round yet."""
    return {*mine.known, *(FullName(mine.start, name) for name in mine.offered)}


def recyclable(mine: Promises, held: Collection[FullName]) -> list[FullName]:
    """What may go of `held`, in the order in which it should: first what older starts left."""
    free = set(held) - stays(mine)
    return sorted(free, key=lambda one: (one.start == mine.start, one.name, one.start))


def publish(mine: Promises, ranks: Sequence[RankHas]) -> Have:
    """What the node publishes; only what all its ranks have durable is offered. A daemon that has
    restarted publishes when it knows again what is durable, in flight and asked for on all its
    ranks, and not before."""
    newest = mine.newest
    names = {name for rank in ranks for name in (*rank.durable, *rank.in_flight)}
    there = {
        name
        for name in names
        if name.base >= mine.round
        and _is_newer(name, newest)
        and all(_may_have(rank, name) for rank in ranks)
    }
    asked = [rank.asked for rank in ranks if rank.asked is not None]
    known = tuple(one.name for one in mine.known if one.start == mine.start)
    offered = sorted(name for name in mine.offered if all(name in r.durable for r in ranks))
    return Have(tuple(offered), tuple(sorted(there)), max(asked, default=None), known)


def _may_have(rank: RankHas, name: SaveName) -> bool:
    asked = rank.asked is not None and rank.asked >= name
    return name in rank.durable or name in rank.in_flight or not asked


def _is_newer(name: SaveName, newest: SaveName | None) -> bool:
    return newest is None or name > newest


def _names_of_plain(value: object) -> tuple[SaveName, ...]:
    return tuple(map(SaveName.of_plain, plain.items(value, "names")))
