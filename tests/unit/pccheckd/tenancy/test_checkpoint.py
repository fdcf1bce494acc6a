"""The state table: every pair of states is either listed or raises."""

from __future__ import annotations

import itertools

import pytest

from pccheck_native import Event, SaveTimes
from pccheck_wire.ends import Cause, Why, in_words
from pccheck_wire.messages import CheckpointState as State
from pccheckd.tenancy.checkpoint import LIVE, MOVES, RankCheckpoint, UnlistedMoveError
from pccheckd.tenancy.ledger import Ledger
from tests.support.jobs import saving

ENDS = {State.GLOBAL, State.SUPERSEDED, State.SKIPPED, State.FAILED}


def checkpoint(state: State = State.REQUESTED, sequence: int = 0) -> RankCheckpoint:
    return saving(5, sequence, state=state)


@pytest.mark.parametrize(("start", "end"), list(itertools.product(State, State)))
def test_only_listed_moves_are_made(start: State, end: State) -> None:
    item = checkpoint(start)
    if end in MOVES[start]:
        item.move(end, 9)
        assert item.state is end and item.at_ns[end] == 9
    else:
        with pytest.raises(UnlistedMoveError):
            item.move(end, 9)
        assert item.state is start


def test_every_state_is_in_the_table_and_ends_have_no_way_out() -> None:
    assert set(MOVES) == set(State)
    assert {state for state, following in MOVES.items() if not following} == ENDS


def test_nothing_durable_is_ever_lost_by_a_move() -> None:
    """A durable checkpoint becomes global, or is superseded by a newer one."""
    assert MOVES[State.DURABLE] == {State.GLOBAL, State.SUPERSEDED}
    assert MOVES[State.GLOBAL] == frozenset()
    assert State.DURABLE not in LIVE


@pytest.mark.parametrize("start", [State.COPYING, State.COPIED, State.WRITING])
@pytest.mark.parametrize("kind", ["writing", "copied", "durable", "superseded", "failed"])
def test_what_is_copied_ends_skipped_only_when_the_group_gives_it_up(
    start: State, kind: str
) -> None:
    ledger, item = Ledger(), checkpoint(start, 7)
    ledger.add(item)
    ledger.apply(event(kind), lambda _: Why(Cause.RANK_NEVER, 1))
    assert item.state is not State.SKIPPED and not item.is_given_up
    ledger, item = Ledger(), checkpoint(start, 7)
    ledger.add(item)
    assert ledger.apply(event("given_up"), lambda _: Why(Cause.RANK_NEVER, 1)) is item
    assert (item.state, item.is_given_up, item.live) == (State.SKIPPED, True, False)
    assert item.sentence.reason.startswith("rank 1 did not ask for this checkpoint")
    assert ledger.counters == {"skipped": 1}


def event(kind: str, ended: int = 0) -> Event:
    return Event(
        kind, 1, 1, 1, 7, 0, 0, "", "", 0, 0, 0, 0, SaveTimes(0, 0, 0, 0, 0, 0, ended), None
    )


@pytest.mark.parametrize("kind", ["durable", "superseded", "failed"])
def test_it_ended_when_the_core_freed_its_lane(kind: str) -> None:
    """Not when the event loop noticed the end: the next checkpoint may have begun before."""
    ledger, item = Ledger(), checkpoint(State.COPYING, 7)
    ledger.newest = (8, 8)
    ledger.add(item)
    assert ledger.apply(event(kind, ended=5), lambda _: Why()) is item
    assert item.ended_ns == 5


def test_durable_may_overtake_copied() -> None:
    item = checkpoint(State.COPYING)
    assert item.advance(State.DURABLE, 7)
    assert list(item.at_ns) == [State.COPIED, State.WRITING, State.DURABLE]
    assert not item.advance(State.COPIED, 8)  # the late event changes nothing
    assert item.state is State.DURABLE


def test_an_end_is_final() -> None:
    item = checkpoint(State.COPYING)
    item.end(State.FAILED, 1, in_words("why", "fix"))
    assert item.sentence[:2] == ("why", "fix") and not item.live
    with pytest.raises(UnlistedMoveError):
        item.advance(State.DURABLE, 2)
