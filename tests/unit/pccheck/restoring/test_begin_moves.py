"""Every move between the states of a restore is listed, and says whether the state is whole."""

from __future__ import annotations

import itertools

import pytest

from pccheck.restoring.begin import MOVES, Move, State

#: A restore of all or of a part, which finishes or breaks off.
RESTORES = list(itertools.product((Move.ALL, Move.PART), (True, False)))


def test_every_state_is_listed_and_begins_any_restore() -> None:
    assert set(MOVES) == set(State)
    for state, moves in MOVES.items():
        assert {Move.ALL, Move.PART} <= moves.keys()
        changing = state.name.startswith("CHANGING")
        assert (Move.END in moves) == changing
        assert all(following.name.startswith("CHANGING") == (move is not Move.END)
                   for move, following in moves.items())  # fmt: skip


@pytest.mark.parametrize("restores", itertools.product(RESTORES, repeat=3))
def test_state_is_whole_after_these_restores(restores: list[tuple[Move, bool]]) -> None:
    state, whole = State.WHOLE, True
    for move, finishes in restores:
        state = MOVES[state][move]
        if finishes:
            state = MOVES[state][Move.END]
        # A part that finishes mends nothing: the rest may be of another step.
        whole = finishes and (whole or move is Move.ALL)
        assert (state is State.WHOLE) == whole
