"""The states of a rank: every pair of states is either listed or raises."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from enum import Enum

import pytest

from pccheckd.base.moves import UnlistedMoveError, moved
from pccheckd.core.uses import TRAINER_MOVES, Seat, TrainerState
from pccheckd.tenancy.binding import BINDING_MOVES, BindingState
from pccheckd.tenancy.volumes import Key
from tests.support.loaded import owner

TABLES: list[tuple[Mapping[Enum, frozenset[Enum]], type[Enum]]] = [
    (TRAINER_MOVES, TrainerState),  # type: ignore[list-item]
    (BINDING_MOVES, BindingState),  # type: ignore[list-item]
]
PAIRS = [(table, *pair) for table, states in TABLES for pair in itertools.product(states, states)]


@pytest.mark.parametrize(("table", "start", "end"), PAIRS)
def test_only_listed_moves_are_made(
    table: Mapping[Enum, frozenset[Enum]], start: Enum, end: Enum
) -> None:
    if end in table[start]:
        assert moved(table, start, end, "rank 0") is end
    else:
        with pytest.raises(UnlistedMoveError, match=f"{start.name} cannot become {end.name}"):
            moved(table, start, end, "rank 0")


@pytest.mark.parametrize(("table", "states"), TABLES)
def test_only_a_closed_rank_has_no_way_out(
    table: Mapping[Enum, frozenset[Enum]], states: type[Enum]
) -> None:
    assert list(table) == list(states)
    assert [state.name for state, after in table.items() if not after] == ["CLOSED"]
    assert all(state not in after for state, after in table.items())
    assert all(states["CLOSED"] in after for state, after in table.items() if after)


def test_trainers_take_the_seat_one_after_another() -> None:
    seat, first, second = Seat(Key(7, "job", 0)), owner(), owner()
    seat.take(first)
    assert (seat.state, seat.owner) == (TrainerState.ATTACHED, first)
    with pytest.raises(UnlistedMoveError):
        seat.take(second)
    seat.leave()
    assert (seat.state, seat.owner) == (TrainerState.LEAVING, first)
    with pytest.raises(UnlistedMoveError):
        seat.take(second)
    seat.free()
    assert (seat.state, seat.owner) == (TrainerState.NONE, None)
    seat.take(second)
    assert seat.owner is second


@pytest.mark.parametrize("leaves", [False, True])
def test_a_rank_that_closes_under_its_trainer_stays_closed(leaves: bool) -> None:
    seat = Seat(Key(7, "job", 0))
    seat.take(owner())
    if leaves:
        seat.leave()
    seat.close()
    seat.close()
    if not leaves:
        seat.leave()
    seat.free()
    assert (seat.state, seat.owner) == (TrainerState.CLOSED, None)
    with pytest.raises(UnlistedMoveError):
        seat.take(owner())
