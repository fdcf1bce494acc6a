"""What becomes of checkpoints in memory: every state that ranks can reach is visited, with every
order of their copies, writes, failures and deaths."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from pccheckd.group.parked import Known, PartState, decide, newest

C, P, W, D = PartState.COMING, PartState.PARKED, PartState.WRITING, PartState.DURABLE
NONE, GONE = "none", "gone"  # not requested yet; dropped, failed, or lost with its trainer
Part = PartState | str


class World(NamedTuple):
    parts: tuple[tuple[Part, ...], ...]  # by sequence - 1, by rank
    wanted: frozenset[int] = frozenset()
    dead: frozenset[int] = frozenset()

    def known(self) -> list[Known]:
        found = []
        for index, ranks in enumerate(self.parts):
            places = {rank: one for rank, one in enumerate(ranks) if isinstance(one, PartState)}
            wanted, never = index + 1 in self.wanted, GONE in ranks
            found.append(Known(index + 1, range(len(ranks)), places, wanted, never))
        return found

    def put(self, sequence: int, rank: int, part: Part) -> World:
        ranks = list(self.parts[sequence - 1])
        ranks[rank] = part
        parts = (*self.parts[: sequence - 1], tuple(ranks), *self.parts[sequence:])
        return self._replace(parts=parts)

    def of(self, sequence: int, *parts: Part) -> list[int]:
        return [rank for rank, one in enumerate(self.parts[sequence - 1]) if one in parts]

    def safe(self) -> int:
        """The newest sequence that no rank can lose, but by its disk."""
        every = range(1, len(self.parts) + 1)
        size = len(self.parts[0])
        return max((n for n in every if len(self.of(n, P, W, D)) == size), default=0)


def after(world: World, *, idle: bool) -> World:
    """Applies a decision as the daemon does, and checks it."""
    before = world
    decision = decide(world.known(), idle=idle)
    for one, newer in decision.drop:
        if newer is not None:
            assert newer.sequence > one.sequence
            assert before.of(newer.sequence, P, D) == list(one.members), "it is not safe"
            on_disk = before.of(newer.sequence, D) == list(one.members)
            assert on_disk or not before.of(one.sequence, W, D), "another rank writes it"
        for rank in before.of(one.sequence, P):
            world = world.put(one.sequence, rank, GONE)
    for one in decision.write:
        world = world._replace(wanted=world.wanted | {one.sequence})
    assert world.safe() >= before.safe(), (before, decision)
    return world


def followers(world: World) -> Iterator[World]:
    """Every single thing that may happen next."""
    for sequence, ranks in enumerate(world.parts, 1):
        for rank, part in enumerate(ranks):
            asked = sequence == 1 or world.parts[sequence - 2][rank] != NONE
            if part == NONE and asked and rank not in world.dead:
                yield world.put(sequence, rank, C)
            elif part == C:
                yield world.put(sequence, rank, P)
                yield world.put(sequence, rank, W)  # of level disk
                yield world.put(sequence, rank, GONE)
            elif part == W:
                yield world.put(sequence, rank, D)
            elif part == P and sequence in world.wanted:
                yield world.put(sequence, rank, W)  # a lane was free
        if P in ranks and sequence not in world.wanted:
            yield world._replace(wanted=world.wanted | {sequence})
    for rank in range(len(world.parts[0])):
        if rank not in world.dead:
            yield died(world, rank)


def died(world: World, rank: int) -> World:
    for sequence, ranks in enumerate(world.parts, 1):
        if ranks[rank] in (C, NONE):
            world = world.put(sequence, rank, GONE)
    wanted = {one.sequence for one in newest(world.known())}
    return world._replace(wanted=world.wanted | wanted, dead=world.dead | {rank})


def then(world: World, changed: World, *, disk_is_idle: bool) -> World:
    busy = any(changed.of(number, W) for number in range(1, len(changed.parts) + 1))
    found = after(changed, idle=disk_is_idle and not busy)
    assert found.safe() >= world.safe(), (world, changed, found)
    return found


@pytest.mark.parametrize(("ranks", "checkpoints"), [(1, 3), (2, 2), (3, 1)])
def test_no_order_of_events_loses_the_newest_safe_one(ranks: int, checkpoints: int) -> None:
    first = World(((NONE,) * ranks,) * checkpoints)
    seen, todo = {first}, [first]
    while todo:
        world = todo.pop()
        for changed in followers(world):
            for idle in (False, True):
                found = then(world, changed, disk_is_idle=idle)
                if found not in seen:
                    seen.add(found)
                    todo.append(found)
    assert len(seen) > 20


def test_three_ranks_lose_nothing_in_longer_runs() -> None:
    dice = random.Random(20261128)
    for _ in range(300):
        world = World(((NONE,) * 3,) * 4)
        while following := list(followers(world)):
            world = then(world, dice.choice(following), disk_is_idle=dice.random() < 0.5)


def known(sequence: int, *places: Part, wanted: bool = False, never: bool = False) -> Known:
    there = {rank: one for rank, one in enumerate(places) if isinstance(one, PartState)}
    return Known(sequence, range(len(places)), there, wanted, never)


def dropped(*every: Known, idle: bool = False) -> list[int]:
    return [one.sequence for one, _ in decide(every, idle=idle).drop]


def written(*every: Known, idle: bool = False) -> list[int]:
    return [one.sequence for one in decide(every, idle=idle).write]


def test_a_newer_one_on_all_ranks_replaces() -> None:
    assert dropped(known(1, P, P), known(2, P, C)) == []
    assert dropped(known(1, P, P), known(2, P, P)) == [1]
    assert dropped(known(1, P, P), known(2, D, P), known(3, P, C)) == [1]


def test_one_that_is_being_written_replaces_nothing() -> None:
    assert dropped(known(1, P), known(2, W)) == []
    assert dropped(known(1, P), known(2, D)) == [1]


def test_wanted_and_begun_ones_are_written() -> None:
    """Unless a newer one is on the disk of every rank."""
    assert written(known(1, P, P, wanted=True), known(2, P, P)) == [1]
    assert written(known(1, W, P), known(2, P, P)) == [1]
    assert dropped(known(1, W, P, wanted=True), known(2, D, D)) == [1]


def test_an_idle_disk_gets_the_newest_safe_one() -> None:
    every = known(1, P, P), known(2, P, C)
    assert written(*every) == []
    assert written(*every, idle=True) == [1]


def test_what_a_rank_never_has_is_dropped() -> None:
    """But for the newest, while nothing is safe."""
    assert dropped(known(1, P, GONE, never=True)) == []
    assert dropped(known(1, P, GONE, never=True), known(2, P, GONE, never=True)) == [1]
    assert dropped(known(1, P, P), known(2, P, GONE, never=True)) == [2]


def test_what_nodes_gave_up_is_superseded_by_what_they_have() -> None:
    """The nodes give up what was never offered to them, once they have a newer one."""
    old, new = known(1, P, P, never=True), known(2, D, D)
    assert decide([old, new], idle=False).drop == [(old, new)]


def test_what_another_node_replaced_in_memory_is_superseded() -> None:
    """But where somebody wants it on the disk."""
    old, new = known(1, P, P, never=True)._replace(is_passed=True), known(2, P, P)
    assert decide([old, new], idle=False).drop == [(old, new)]
    assert decide([old], idle=False).drop == []
    wanted = old._replace(wanted=True)
    assert decide([wanted, new], idle=False).drop == [(wanted, None)]


def test_a_passed_one_is_superseded_by_one_that_is_being_written() -> None:
    """The nodes give it up as soon as they have been promised the newer one."""
    before, new = known(1, D, D), known(3, W, W)
    old = known(2, P, P, never=True)._replace(is_passed=True)
    assert decide([before, old, new], idle=False).drop == [(old, new)]


def test_the_end_of_a_trainer_wants_the_newest_on_all() -> None:
    every = [known(1, P, P), known(2, P, W), known(3, P, GONE)]
    assert [one.sequence for one in newest(every)] == [2, 3]
    assert [one.sequence for one in newest(every[:1])] == [1]


def test_ranks_that_save_alone_do_not_count_together() -> None:
    mine = Known(1, (0,), {0: P}), Known(2, (0,), {0: P})
    theirs = Known(1, (1,), {1: P})
    assert dropped(*mine, theirs) == [1]
    assert decide([*mine, theirs], idle=False).drop == [(mine[0], mine[1])]
