"""The phases of a save on the client's side: every pair is either a listed move or changes
nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck.flight.phases import (
    EXPLAINED,
    GOING,
    MOVES,
    OPEN,
    REPORTED,
    SAFE,
    SHOWN,
    Course,
    Phase,
    in_page,
)
from pccheck_native import (
    OUTCOME_GIVEN_UP,
    WORD_ABANDONED,
    WORD_COPIED,
    WORD_COPYING,
    WORD_REFUSED,
    WORD_REQUESTED,
)
from pccheck_wire.ends import Cause, Why
from pccheck_wire.messages import CheckpointState as State

ENDS = {phase for phase, following in MOVES.items() if not following}


def course_to(phase: Phase) -> Course:
    """A save that came to this phase by listed moves."""
    paths: Iterator[tuple[Phase, ...]] = (
        (*steps, phase) for n in range(3) for steps in itertools.permutations(Phase, n)
    )
    for path in paths:
        made = Course()
        if phase is Phase.REQUESTED or all(made.move(one, Why()) for one in path):
            return made
    raise AssertionError(f"no way to {phase.name}")


@pytest.mark.parametrize(("start", "end"), list(itertools.product(Phase, Phase)))
def test_only_listed_moves_are_made(start: Phase, end: Phase) -> None:
    course, why = course_to(start), Why(Cause.SLOTS_BUSY)
    assert course.now().phase is start
    assert course.move(end, why) == (end in MOVES[start])
    assert course.now().phase is (end if end in MOVES[start] else start)
    assert (course.now().why == why) == (end in MOVES[start])


def test_every_phase_is_in_the_table_and_no_way_leads_back() -> None:
    assert set(MOVES) == set(SHOWN) == set(Phase)
    seen: set[Phase] = set()

    def follow(phase: Phase, path: frozenset[Phase]) -> None:
        assert phase not in path
        seen.add(phase)
        for later in MOVES[phase]:
            follow(later, path | {phase})

    follow(Phase.REQUESTED, frozenset())
    assert seen == set(Phase)


def test_users_see_no_move_from_one_end_to_another() -> None:
    """But for DURABLE, which becomes GLOBAL or is superseded, as on the daemon's side."""
    for phase, following in MOVES.items():
        if SHOWN[phase] in (State.SKIPPED, State.FAILED, State.GLOBAL, State.SUPERSEDED):
            assert {SHOWN[later] for later in following} <= {SHOWN[phase]}
        if SHOWN[phase] is State.DURABLE:
            later_states = {SHOWN[later] for later in following}
            assert later_states <= {State.DURABLE, State.GLOBAL, State.SUPERSEDED}


def test_the_sets_of_phases_fit_the_table() -> None:
    assert GOING < OPEN and not ENDS & OPEN
    assert {SHOWN[phase] for phase in SAFE} == {State.DURABLE, State.GLOBAL}
    assert EXPLAINED.isdisjoint(GOING) and REPORTED < EXPLAINED
    assert all(SHOWN[phase] is State.FAILED for phase in REPORTED)


def test_of_two_moves_out_of_a_phase_the_first_counts() -> None:
    """A signal handler comes between look and note: its move stays, and the later one is made from
    there, if it is listed."""
    course = course_to(Phase.COPYING)
    assert course.move(Phase.ABANDONED, Why(Cause.INTERRUPTED))
    assert not course.move(Phase.COPIED, Why())
    course = course_to(Phase.COPYING)
    assert course.move(Phase.COPIED, Why()) and course.move(Phase.DURABLE, Why())
    assert not course.move(Phase.COPIED, Why())
    assert course.now().phase is Phase.DURABLE


def entry(word: int, outcome: int = State.COPYING, **about: Any) -> Any:
    values = {"cause": 0, "argument": 0, "stage": "", "code": "", "error_name": ""} | about
    return SimpleNamespace(word=word, outcome=outcome, **values)


@pytest.mark.parametrize(
    ("shown", "phase"),
    [
        (entry(WORD_REQUESTED, State.REQUESTED), Phase.REQUESTED),
        (entry(WORD_COPYING), Phase.COPYING),
        (entry(WORD_COPIED), Phase.COPIED),  # its outcome follows
        (entry(WORD_COPIED, State.WRITING), Phase.WRITING),
        (entry(WORD_COPIED, State.DURABLE), Phase.DURABLE),
        (entry(WORD_COPIED, State.GLOBAL), Phase.GLOBAL),
        (entry(WORD_COPIED, OUTCOME_GIVEN_UP), Phase.GIVEN_UP),
        (entry(WORD_COPIED, State.SUPERSEDED), Phase.SUPERSEDED),
        (entry(WORD_COPIED, State.SKIPPED), Phase.SKIPPED),
        (entry(WORD_COPIED, State.FAILED), Phase.FAILED),
        (entry(WORD_REFUSED, State.SKIPPED), Phase.SKIPPED),
        (entry(WORD_REFUSED, State.FAILED), Phase.REFUSED),
        (entry(WORD_ABANDONED, error_name="EFAULT"), Phase.LET_GO),
    ],
)
def test_every_entry_of_the_page_shows_one_phase(shown: Any, phase: Phase) -> None:
    assert in_page(shown, lives=True).phase is phase


@pytest.mark.parametrize(
    ("error_name", "lives", "phase", "cause"),
    [
        ("", True, Phase.LET_GO, Cause.STREAM_OVERDUE),
        ("ETIMEDOUT", True, Phase.LET_GO, Cause.STREAM_OVERDUE),
        ("EFAULT", True, Phase.LET_GO, Cause.SOURCE_GONE),
        ("DEVICE", True, Phase.LET_GO, Cause.NOT_READ),
        ("ECONNRESET", False, Phase.ABANDONED, Cause.DAEMON_ENDED),
    ],
)
def test_what_the_link_gave_up_says_why(
    error_name: str, lives: bool, phase: Phase, cause: Cause
) -> None:
    now = in_page(entry(WORD_ABANDONED, error_name=error_name), lives=lives)
    assert (now.phase, now.why.cause) == (phase, cause)


def test_the_reason_of_the_page_is_taken_over() -> None:
    shown = entry(WORD_REFUSED, State.FAILED, cause=Cause.UNLIKE, argument=5)
    assert in_page(shown, lives=True).why == Why(Cause.UNLIKE, 5)
    shown = entry(WORD_COPIED, State.FAILED, stage="write", code="EIO")
    assert in_page(shown, lives=True).why == Why(stage="write", code="EIO")
