"""What the ranks of one job decide together, case by case; test_group_states.py tries them all."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from tests.support.groupmodel import load

group = load()  # by its path: it needs no compiled module
Rank = group.Rank


def held(*sequences: int, world: int = 2, run: int = 1, damaged: tuple[int, ...] = ()) -> list[Any]:
    """Durable checkpoints; the step is ten times the sequence."""
    return [group.Held(n, 10 * n, run, world, n not in damaged) for n in sequences]


def numbers(found: list[Any]) -> list[int]:
    return [one.sequence for one in found]


def lacking(ranks: Any, number: int, size: int) -> list[tuple[int, Any]]:
    """The definition: the ranks of a world that neither have a whole one nor have it in flight."""
    found = [
        (rank, known)
        for rank, known in ranks.items()
        if (rank < size if size > 1 else number in numbers(known.held))
        and number not in known.pending
        and not any(one.sequence == number and one.usable for one in known.held)
    ]
    never_came = size > 1 and sum(rank < size for rank in ranks) < size
    return [*found, (size - 1, group.EMPTY)] if never_came else found


def defined(ranks: Any, world_size: int, keep: int, short: Collection[int]) -> Any:
    """What `agree` has to decide, without care for its time."""
    kept = [one.sequence for one in group.common(ranks)[: max(1, keep)]]
    newest = kept[0] if kept else 0
    sizes = {number: size for known in ranks.values() for number, size in known.pending.items()}
    sizes |= {one.sequence: one.world_size for known in ranks.values() for one in known.held}
    without = {n: lacking(ranks, n, size) for n, size in sizes.items() if n not in kept}
    given_up = {
        number
        for number, those in without.items()
        for rank, known in those
        if number < newest or rank >= world_size
        or ((known.asked or 0) >= number and number not in numbers(known.held))
    }  # fmt: skip
    slots = set()
    for rank in short:
        flying = ranks[rank].pending.keys()
        mine = {*numbers(ranks[rank].held)} & (without.keys() - given_up - flying)
        may_not = (
            number for number in sorted(mine)
            if any(known.asked is None or known.asked >= number for _, known in without[number])
        )  # fmt: skip
        slots.add(next(may_not, 0))
    return group.Agreement(
        kept[-1] if len(kept) >= keep else 0, newest, frozenset(given_up | slots - {0})
    )


def some_ranks(rng: random.Random) -> dict[int, Any]:
    sizes = [rng.randint(1, 5) for _ in range(6)]

    def one() -> Any:
        number = rng.randint(1, 6)
        return group.Held(number, number, 1, sizes[number - 1], rng.random() < 0.5)

    return {
        rank: Rank(
            [one() for _ in range(rng.randint(0, 4))],
            {rng.randint(1, 6): rng.randint(1, 5) for _ in range(rng.randint(0, 2))},
            rng.choice([None, rng.randint(0, 7), 2**63]),
        )
        for rank in rng.sample(range(6), rng.randint(0, 5))
    }


@pytest.mark.parametrize("seed", range(5))
def test_what_is_agreed_is_what_is_defined(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(2000):
        ranks, world_size, keep = some_ranks(rng), rng.randint(1, 5), rng.randint(1, 3)
        short = {rank for rank in ranks if rng.random() < 0.5}
        said = group.agree(ranks, world_size, keep, short)
        assert said == defined(ranks, world_size, keep, short), (ranks, world_size, keep, short)


class Visited(list[Any]):
    """What a rank holds; counts how often all of it is visited."""

    visits = 0

    def __iter__(self) -> Iterator[Any]:
        self.visits += 1
        return super().__iter__()


@pytest.mark.parametrize("count", [10, 100])
def test_the_time_of_a_decision_is_linear_in_the_ranks(count: int) -> None:
    """Each rank has other checkpoints than all others: a user makes the daemon decide on these."""
    ranks = {
        rank: Rank(
            Visited(held(rank + 1, rank + 1 + count, world=count)),
            {rank + 1 + 2 * count: count}, asked=rank + 1,
        )
        for rank in range(count)
    }  # fmt: skip
    group.agree(ranks, count, 2, [0, 1])
    assert max(known.held.visits for known in ranks.values()) < 10


# -- common -------------------------------------------------------------------------------------


def test_what_all_ranks_have_is_common_newest_first() -> None:
    ranks = {0: Rank(held(1, 2, 4)), 1: Rank(held(4, 1, 3))}
    assert numbers(group.common(ranks)) == [4, 1]


def test_every_rank_of_the_world_that_saved_it_counts() -> None:
    two = {0: Rank(held(1, world=3)), 1: Rank(held(1, world=3))}
    assert group.common(two) == []
    assert numbers(group.common({**two, 2: Rank(held(1, world=3))})) == [1]
    assert numbers(group.common({**two, 2: Rank(held(1, world=3)), 3: Rank()})) == [1]


@pytest.mark.parametrize(
    "other",
    [held(1, run=2), held(1, world=3), held(1, damaged=(1,)), [group.Held(1, 11, 1, 2)], []],
)
def test_the_same_sequence_alone_is_not_the_same_checkpoint(other: list[Any]) -> None:
    """A checkpoint of another run, world or step, and a damaged one, do not count."""
    assert group.common({0: Rank(held(1)), 1: Rank(other)}) == []


def test_what_a_rank_saved_alone_is_common() -> None:
    assert numbers(group.common({3: Rank(held(5, world=1))})) == [5]


def test_a_world_may_be_said_to_have_any_size() -> None:
    """No answer takes longer for that, and what nobody else can have is given up for a slot."""
    huge = 2**62
    ranks = {0: Rank(held(1, world=huge), asked=1)}
    assert group.common(ranks) == []
    assert agreed(ranks, world=huge) == (0, 0, [])
    assert agreed(ranks, short=(0,), world=huge) == (0, 0, [1])
    assert group.lagging(ranks, huge, 0, group.agree(ranks, huge, 1)) == []
    assert group.behind(ranks, huge) == {0: 0}
    assert "all" in refusal(group.choose(ranks, 0, huge))


def test_nothing_is_common_without_ranks() -> None:
    assert group.common({}) == []


# -- agree --------------------------------------------------------------------------------------


def agreed(ranks: Any, keep: int = 1, short: tuple[int, ...] = (), world: int = 2) -> Any:
    found = group.agree(ranks, world, keep, short)
    return found.oldest, found.newest, sorted(found.given_up)


def test_nothing_is_recycled_before_something_is_common() -> None:
    assert agreed({0: Rank(held(1, 2), asked=2), 1: Rank(pending={1: 2}, asked=1)}) == (0, 0, [])


def test_the_floor_is_the_oldest_of_the_kept_ones() -> None:
    ranks = {rank: Rank(held(1, 2, 3), asked=3) for rank in (0, 1)}
    assert agreed(ranks, keep=1) == (3, 3, [])
    assert agreed(ranks, keep=2) == (2, 3, [])
    assert agreed(ranks, keep=0) == (3, 3, [])


def test_there_is_no_floor_before_there_are_enough() -> None:
    """Otherwise the first common checkpoint would free what may become the second one."""
    ranks = {0: Rank(held(1, 2), asked=2), 1: Rank(held(2), pending={1: 2}, asked=2)}
    assert agreed(ranks, keep=2) == (0, 2, [])


def test_what_another_rank_has_no_slot_for_is_given_up_for_a_slot() -> None:
    """Each of the two waits for a slot for what the other has written."""
    mine = Rank(held(1, 2), pending={3: 2}, asked=3)
    for blocked, expected in ([], []), ([2], [2]):
        other = Rank(held(1, 3), pending={2: 2}, asked=3, parked=[2], blocked=blocked)
        assert agreed({0: mine, 1: other}, short=(0,)) == (1, 1, expected)


def test_a_rank_gives_up_nothing_for_the_slot_that_it_has_just_got() -> None:
    """The request for a slot is older than what the volume says: its checkpoint is durable."""
    ranks = {0: Rank(held(1, 2), pending={2: 2}, asked=2), 1: Rank(held(1))}
    assert agreed(ranks, short=(0,)) == (1, 1, [])
    assert agreed({**ranks, 0: Rank(held(1, 2), asked=2)}, short=(0,)) == (1, 1, [2])


def test_no_rank_waits_for_one_with_checkpoints_in_memory_only() -> None:
    mine = Rank(held(1, 4), asked=4)
    for parked, late in ([], []), ([2], [1]):
        ranks = {0: mine, 1: Rank(held(1), pending={2: 2}, asked=2, parked=parked)}
        agreement = group.agree(ranks, 2, 1, (0,))
        assert group.lagging(ranks, 2, 0, agreement) == late


def test_what_a_live_rank_has_passed_over_is_given_up() -> None:
    """The rank skipped the checkpoint, failed at it, or has requested a later one."""
    ranks = {0: Rank(held(1, 2), asked=2), 1: Rank(held(1), asked=2)}
    assert agreed(ranks) == (1, 1, [2])


def test_what_a_live_rank_has_not_been_asked_for_is_waited_for() -> None:
    ranks = {0: Rank(held(1, 2), asked=2), 1: Rank(held(1), asked=1)}
    assert agreed(ranks) == (1, 1, [])
    assert agreed(ranks, short=(0,)) == (1, 1, [])


def test_what_is_on_its_way_is_waited_for() -> None:
    """Also for a rank whose process has ended: a copied checkpoint is still written."""
    for asked in (2, None):
        ranks = {0: Rank(held(1, 2), asked=2), 1: Rank(held(1), pending={2: 2}, asked=asked)}
        assert agreed(ranks, short=(0,)) == (1, 1, [])


@pytest.mark.parametrize(("was", "now"), [(1, 2), (1, 4), (2, 3), (3, 2)])
def test_what_a_start_of_another_size_has_in_flight_is_not_given_up(was: int, now: int) -> None:
    """A copied checkpoint becomes durable, also after a start of another size: ranks that were not
    in the earlier start do not have to save it."""
    before = {rank: Rank(held(1, world=was), pending={2: was}) for rank in range(was)}
    ranks = {rank: before.get(rank, Rank())._replace(asked=2) for rank in range(max(was, now))}
    assert agreed(ranks, world=now) == (1, 1, [])


def test_what_rank_1_saved_alone_is_looked_for_there() -> None:
    """Rank 0 had no part in it, so it is not missing there."""
    ranks = {0: Rank(asked=2), 1: Rank(held(1, world=1), pending={2: 1}, asked=2)}
    assert agreed(ranks) == (1, 1, [])


def test_a_start_of_one_rank_keeps_what_several_had_until_it_has_its_own() -> None:
    """Rank 0 was ahead; what rank 1 does not have goes first."""
    mine = held(1, 2, 3, world=2)
    assert agreed({0: Rank(mine, asked=4), 1: Rank(held(1))}, world=1) == (1, 1, [2, 3])
    ranks = {0: Rank([*mine, *held(4, world=1)], asked=4), 1: Rank(held(1))}
    assert agreed(ranks, world=1) == (4, 4, [2, 3])


def test_what_only_a_dead_rank_could_bring_is_given_up_for_a_slot() -> None:
    """Oldest first, one at a time."""
    ranks = {0: Rank(held(1, 2, 3), asked=3), 1: Rank(held(1))}
    assert agreed(ranks) == (1, 1, [])
    assert agreed(ranks, short=(0,)) == (1, 1, [2])
    assert agreed({**ranks, 0: Rank(held(1, 3), asked=3)}, short=(0,)) == (1, 1, [3])


def test_a_rank_that_was_never_there_is_a_dead_one() -> None:
    assert agreed({0: Rank(held(1), asked=1)}, short=(0,)) == (0, 0, [1])


def test_below_the_newest_common_one_what_can_never_be_common_is_given_up() -> None:
    ranks = {0: Rank(held(1, 2, 3), asked=3), 1: Rank(held(1, 3))}
    assert agreed(ranks, keep=2) == (1, 3, [2])


def test_below_the_newest_common_one_what_is_on_its_way_may_yet_be_common() -> None:
    ranks = {0: Rank(held(1, 2, 3), asked=3), 1: Rank(held(1, 3), pending={2: 2}, asked=3)}
    assert agreed(ranks, keep=2) == (1, 3, [])


def test_a_rank_with_only_a_damaged_one_lacks_it() -> None:
    """The damaged checkpoint may become readable: it is dropped only where its slot is needed."""
    ranks = {0: Rank(held(1, 2), asked=2), 1: Rank(held(1, 2, damaged=(2,)), asked=2)}
    assert agreed(ranks) == (1, 1, [])
    assert agreed(ranks, short=(1,)) == (1, 1, [2])


def test_what_ranks_that_are_gone_had_to_bring_is_given_up() -> None:
    """The start has fewer ranks than the one that saved it."""
    ranks = {rank: Rank(held(1, 2, world=3), asked=2) for rank in (0, 1)}
    assert agreed(ranks) == (0, 0, [1, 2])
    assert agreed({**ranks, 2: Rank(held(2, world=3))}) == (2, 2, [1])


def test_a_rank_that_is_short_and_unknown_gives_up_nothing() -> None:
    assert agreed({}, short=(0, 1)) == (0, 0, [])


# -- lagging, behind ----------------------------------------------------------------------------


def test_lagging_are_live_ranks_that_have_not_asked_for_what_fills_the_slots() -> None:
    ranks = {
        0: Rank(held(1, 2, 3, world=4), asked=3),
        1: Rank(held(1, world=4), asked=1),
        2: Rank(held(1, world=4), pending={2: 4}, asked=2),
        3: Rank(held(1, world=4)),
    }
    agreement = group.agree(ranks, 4, 1)
    assert group.lagging(ranks, 4, 0, agreement) == [1]
    assert group.lagging(ranks, 4, 1, agreement) == []
    assert group.lagging(ranks, 4, 9, agreement) == []


def test_nobody_lags_for_what_is_given_up() -> None:
    ranks = {0: Rank(held(1, 2), asked=2), 1: Rank(held(1), asked=2)}
    assert group.lagging(ranks, 2, 0, group.agree(ranks, 2, 1)) == []


def test_behind_counts_what_some_rank_has_above_the_newest_common_one() -> None:
    ranks = {0: Rank(held(1, 2, 3)), 1: Rank(held(1, 2, 4, damaged=(4,)))}
    assert group.behind(ranks, 2) == {0: 0, 1: 1}
    assert group.behind({**ranks, 2: Rank()}, 3) == {0: 0, 1: 1, 2: 1}
    assert group.behind({}, 2) == {}


# -- pins ---------------------------------------------------------------------------------------


def pinned(
    ranks: Any, run: int, *, before: Collection[int] = (), after: int = 0, slots: int = 3
) -> set[int]:
    every = {one: known._replace(pinned=frozenset(before)) for one, known in ranks.items()}
    found: set[int] = group.pins(every, 0, run, after=after, slots=slots)
    return found


TWO_RUNS = {
    0: Rank([*held(1, 2), *held(3, 4, run=2)]),
    1: Rank([*held(1, 2), *held(3, run=2)]),
}


def test_the_newest_common_one_of_the_runs_before_is_pinned() -> None:
    assert pinned(TWO_RUNS, 3) == {3}
    assert pinned(TWO_RUNS, 2) == {2}
    assert pinned(TWO_RUNS, 1) == set()


def test_nothing_is_pinned_that_was_restored() -> None:
    assert pinned(TWO_RUNS, 3, after=3) == set()
    assert pinned(TWO_RUNS, 3, after=2) == {3}


def test_the_pin_of_a_run_that_did_not_restore_either_stays() -> None:
    """That checkpoint is worth more than the few steps since; larger volumes can keep both."""
    assert pinned(TWO_RUNS, 3, before={1}) == {1}
    assert pinned(TWO_RUNS, 3, before={1}, slots=group.PINS_SLOTS_MIN) == {1, 3}
    assert pinned(TWO_RUNS, 3, before={9}) == {3}


def test_without_a_common_one_a_ranks_own_newest_is_pinned() -> None:
    assert pinned({0: Rank(held(1, 2)), 1: Rank()}, 2) == {2}
    assert pinned({0: Rank(held(1, 2, damaged=(2,))), 1: Rank()}, 2) == {1}
    assert pinned({1: Rank(held(1))}, 2) == set()


# -- choose -------------------------------------------------------------------------------------


def refusal(found: Any) -> str:
    assert isinstance(found, group.Refused), found
    return f"{found.reason}; {found.hint}"


def test_all_ranks_restore_the_newest_common_one() -> None:
    ranks = {0: Rank(held(1, 2, 3)), 1: Rank(held(1, 2))}
    assert [group.choose(ranks, rank, 2).sequence for rank in (0, 1)] == [2, 2]


def test_one_of_a_given_step() -> None:
    ranks = {0: Rank(held(1, 2)), 1: Rank(held(1, 2))}
    assert group.choose(ranks, 0, 2, step=10).sequence == 1
    assert "no checkpoint of step 15 that all 2 ranks have" in refusal(
        group.choose(ranks, 0, 2, step=15)
    )


def test_none_only_when_nobody_holds_anything() -> None:
    assert group.choose({}, 0, 2) is None
    assert group.choose({0: Rank(pending={1: 2}, asked=1), 1: Rank()}, 0, 2) is None
    assert isinstance(group.choose({1: Rank(held(1))}, 0, 2), group.Refused)
    assert isinstance(group.choose({0: Rank(held(1, damaged=(1,)))}, 0, 2), group.Refused)


def test_nothing_in_common_is_refused_with_the_numbers() -> None:
    ranks = {0: Rank(held(1, 3)), 1: Rank(held(2, 4, damaged=(4,)))}
    said = refusal(group.choose(ranks, 0, 3))
    assert "no checkpoint that all 3 ranks have" in said
    assert "rank 0: 30, 10; rank 1: 40 (damaged or unreadable), 20; rank 2: none" in said
    assert "pccheckctl list" in said and "solo=True" in said and "fresh=True" in said


def test_the_ranks_that_had_saved_are_named_too() -> None:
    """The start is smaller than the run was."""
    assert "all 4 ranks" in refusal(group.choose({0: Rank(held(1, world=4))}, 0, 2))


def test_a_refusal_names_only_some_of_many() -> None:
    ranks = {rank: Rank(held(*range(rank + 1, 400, 20), world=20)) for rank in range(20)}
    said = refusal(group.choose(ranks, 0, 20))
    assert "rank 7: 3880" in said and "rank 8:" not in said and ", ...)" in said


def test_another_world_size_is_refused_unless_replicated() -> None:
    ranks = {rank: Rank(held(1, world=2)) for rank in (0, 1)}
    said = refusal(group.choose(ranks, 0, 3))
    assert "step 10 was saved by 2 ranks, and this start has 3 ranks" in said
    assert "start the job with 2 ranks" in said and "fresh=True" in said
    assert "this start has 1 rank;" in refusal(group.choose(ranks, 0, 1))
    assert group.choose(ranks, 2, 3, any_world_size=True).sequence == 1


def test_what_another_rank_saved_alone_is_refused() -> None:
    ranks = {1: Rank(held(1, world=1))}
    said = refusal(group.choose(ranks, 0, 1))
    assert "saved by rank 1 alone, and this is rank 0; restore the checkpoint on rank 1" in said
    assert group.choose(ranks, 1, 1).sequence == 1
    assert group.choose(ranks, 0, 1, any_world_size=True).sequence == 1


# -- what is not current ------------------------------------------------------------------------


def test_ranks_outside_of_the_run_that_saved_last_are_stale() -> None:
    four = {rank: Rank(held(1, 2, world=4)) for rank in range(4)}
    assert group.stale(four) == set() == group.stale({}) == group.stale({0: Rank()})
    later = held(3, run=2)
    two = {rank: Rank([*four[rank].held, *later] if rank < 2 else four[rank].held) for rank in four}
    assert group.stale(two) == {2, 3}
    two[3] = Rank([*two[3].held, *held(4, run=2)])  # a record may claim anything
    assert group.stale(two) == {2}
    alone = four | {2: Rank([*four[2].held, *held(3, world=1, run=2)])}  # solo=True on this rank
    assert group.stale(alone) == {0, 1, 3}


def test_ranks_of_one_run_are_not_stale_because_they_are_behind() -> None:
    ranks = {0: Rank(held(1, 2, 3, world=2)), 1: Rank(held(1, world=2))}
    assert group.stale(ranks) == set()
