"""A save has ended: when that is reported to the user, and when it is no news."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck import CheckpointState as State
from pccheck.flight.in_flight import InFlight
from pccheck.saving.followed import Followed
from pccheck_native import OUTCOME_GIVEN_UP, WORD_COPIED
from pccheck_wire.ends import Cause


class Failures:
    """Collects the steps whose failure is reported."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def failed(self, save: InFlight) -> None:
        self.steps.append(save.step)

    def durable(self, step: int, requested_ns: int) -> None:
        pass  # one that a rank gave up is durable here

    def failed_later(self, step: int, reason: str, state: State) -> None:
        pass  # only the words of one that `failed` has had

    report = failed_later


def told(outcome: int, cause: Cause, *, in_memory: bool, wanted: bool = False) -> list[int]:
    """Of a save of step 3 that ends so."""
    entry = SimpleNamespace(
        word=WORD_COPIED, outcome=outcome, sequence=7, newer=0, source_read=True, error=0,
        error_name="", cause=cause, stage="", code="", argument=0,
    )  # fmt: skip
    native = SimpleNamespace(state=lambda _: entry, wait=lambda *_: True, write=lambda _: None)
    connection: Any = SimpleNamespace(
        native=native, pid=os.getpid(), saves_alone=False, alive=lambda: True,
        ask=lambda *_: None, steps={1: 3},
    )  # fmt: skip
    failures: Any = Failures()
    followed = Followed(failures, skips=False)
    save = InFlight(3, connection, 1)
    save.in_memory = in_memory
    if wanted:
        save.want()
    followed.add(save)
    for each, phase in followed.look():
        followed.note(each, phase)
    return list(failures.steps)


@pytest.mark.parametrize("outcome", [OUTCOME_GIVEN_UP, State.SKIPPED])
def test_a_step_in_memory_that_another_node_lacks_is_no_news(outcome: int) -> None:
    assert told(outcome, Cause.OTHER_RANK, in_memory=True) == []


def test_what_was_to_be_on_the_disk_is_news() -> None:
    assert told(State.SKIPPED, Cause.OTHER_RANK, in_memory=False) == [3]
    assert told(State.SKIPPED, Cause.OTHER_RANK, in_memory=True, wanted=True) == [3]


def test_a_step_in_memory_that_a_rank_here_lacks_is_news() -> None:
    assert told(State.SKIPPED, Cause.RANK_LACKS, in_memory=True) == [3]
