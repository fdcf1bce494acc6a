"""P7: which checkpoints a run that has not restored may not recycle."""

from __future__ import annotations

import pytest

from pccheck_native.group import Held, Rank, Ranks, pins
from pccheck_native.layout import capacity_for

RUNS = [(5, 1), (6, 2), (7, 2), (9, 3)]


def held(*runs: tuple[int, int], world_size: int = 1, bad: int = 0) -> Rank:
    """(sequence, incarnation); `bad` is not usable."""
    return Rank(
        [
            Held(sequence, 10 * sequence, incarnation, world_size, usable=sequence != bad)
            for sequence, incarnation in runs
        ]
    )


def wanted(
    ranks: Ranks, pinned: set[int], incarnation: int, slots: int, *, rank: int = 0, after: int = 0
) -> set[int]:
    ranks = {one: known._replace(pinned=frozenset(pinned)) for one, known in ranks.items()}
    return pins(ranks, rank, incarnation, after=after, slots=slots)


@pytest.mark.parametrize(
    ("pinned", "incarnation", "slots", "expected"),
    [
        (set(), 4, 4, {9}),
        (set(), 3, 4, {7}),
        ({5}, 3, 4, {5, 7}),
        ({5}, 3, 3, {5}),
        ({5, 7}, 4, 4, {5, 9}),
        ({99}, 3, 4, {7}),
        (set(), 1, 4, set()),
        ({5}, 1, 4, set()),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_pins(
    pinned: set[int], incarnation: int, slots: int, expected: set[int], world_size: int
) -> None:
    every = held(*RUNS, world_size=world_size)
    for rank in range(world_size):
        ranks = dict.fromkeys(range(world_size), every)
        assert wanted(ranks, pinned, incarnation, slots, rank=rank) == expected


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_damaged_one_is_worth_no_pin(world_size: int) -> None:
    ranks = dict.fromkeys(range(world_size), held(*RUNS, world_size=world_size, bad=9))
    assert wanted(ranks, {9}, 4, 3) == {7}


def test_a_rank_keeps_what_the_others_have_as_well() -> None:
    ranks = {0: held(*RUNS, world_size=2), 1: held(*RUNS[:3], (8, 2), world_size=2)}
    for rank in (0, 1):
        assert wanted(ranks, set(), 4, 4, rank=rank) == {7}
    assert wanted({**ranks, 1: held(*RUNS, world_size=2, bad=7)}, set(), 3, 4) == {6}


def test_where_nothing_is_common_each_rank_keeps_its_newest() -> None:
    ranks = {0: held(*RUNS, world_size=2), 1: held((8, 2), world_size=2)}
    assert wanted(ranks, set(), 4, 4) == {9}
    assert wanted(ranks, set(), 4, 4, rank=1) == {8}
    assert wanted(ranks, set(), 4, 4, rank=2) == set()


def test_what_only_some_ranks_had_to_leave_alone_is_no_pin_of_the_group() -> None:
    """One rank of a start connected and was killed; it had pinned what was common by then."""
    every = held(*RUNS, world_size=2)
    ranks = {0: every._replace(pinned=frozenset({7})), 1: every}
    for rank in (0, 1):
        assert pins(ranks, rank, 4, after=0, slots=3) == {9}
    alone = {0: held(*RUNS)._replace(pinned=frozenset({7})), 1: every}
    assert pins(alone, 0, 4, after=0, slots=3) == {7}


@pytest.mark.parametrize(("after", "expected"), [(0, {5, 9}), (5, {9}), (8, {9}), (9, set())])
def test_what_was_restored_needs_no_pin(after: int, expected: set[int]) -> None:
    """A trainer reconnects to another daemon, and reports what it has restored."""
    assert wanted({0: held(*RUNS)}, {5}, 4, 4, after=after) == expected


def test_a_new_volume_leaves_room_to_grow_a_little() -> None:
    assert capacity_for(1) == (2 << 20) + (1 << 15)
    assert capacity_for(64 << 20) == (64 + 2 + 1) << 20
