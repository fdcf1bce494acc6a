"""A save follows its entry in the page, and asks the daemon for what the page cannot say."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck import CheckpointState
from pccheck.flight import in_flight
from pccheck.flight.in_flight import InFlight
from pccheck.flight.phases import Phase
from pccheck.flight.waiting import saved, wait_copied, wait_durable, wait_global
from pccheck_native import OUTCOME_GIVEN_UP, WORD_COPIED, WORD_COPYING, WORD_REFUSED
from pccheck_wire.ends import Cause, Why, in_words
from pccheck_wire.errors import (
    CheckpointFailedError,
    DaemonUnreachableError,
    InternalError,
    NoCheckpointError,
)
from pccheck_wire.messages import Describe, Described, Failure
from tests.integration.handler_campaign import At

WORDLESS = Why(Cause.DESCRIBED)
WHY = Described(1, CheckpointState.FAILED, 7, 3, "the GPU failed")
NEWER = Described(1, CheckpointState.SUPERSEDED, 7, 3, "newer", "", 8, 4)


class Daemon:
    """A connection to one that answers this, in turn, and has ended then."""

    def __init__(
        self, *answers: Described, word: int = WORD_REFUSED,
        outcome: int = CheckpointState.FAILED, newer: int = 0, why: Why = WORDLESS,
        then: CheckpointState = CheckpointState.DURABLE, alone: bool = True,
    ) -> None:  # fmt: skip
        """`outcome`, `why` and `newer` of snapshot 1, and `then` the outcome of snapshot 2."""
        self.answers = list(answers)
        self.callbacks: list[Callable[[Any], None]] = []
        self.asked: list[object] = []
        state = SimpleNamespace(
            word=word, outcome=outcome, sequence=7, newer=newer, source_read=True, error=0,
            error_name="", cause=why.cause, stage=why.stage, code=why.code, argument=why.argument,
        )  # fmt: skip
        later = SimpleNamespace(**vars(state) | {"sequence": 8, "newer": 0, "outcome": then})
        self.entries: dict[int, Any] = {1: state, 2: later}
        self.native: Any = SimpleNamespace(state=self.entries.get, wait=lambda *_: True)
        self.steps = {1: 3, 2: 4}
        self.pid = os.getpid()
        self.saves_alone = alone

    def alive(self) -> bool:
        return bool(self.answers)

    def request(self, body: object, *, timeout_s: float) -> Described:
        assert timeout_s > 0
        self.asked.append(body)
        return self.answers.pop(0)

    def ask(self, body: object, callback: Callable[[Any], None]) -> None:
        self.asked.append(body)
        self.callbacks.append(callback)

    def answer(self, body: object) -> None:
        (callback,) = self.callbacks
        self.callbacks.clear()
        callback(body)


def handle(daemon: Any, step: int = 3, snapshot: int = 1) -> InFlight:
    return InFlight(step, daemon, snapshot)


def test_the_reason_in_the_page_needs_no_answer() -> None:
    daemon = Daemon(WHY, why=Why(stage="write", code="ENOSPC"))
    found = handle(daemon)
    assert (found.phase, found.state) == (Phase.REFUSED, CheckpointState.FAILED)
    assert found.known_reason == found.reason == "write: the disk is full (free space on the disk)"
    found.ask()
    assert daemon.asked == []


def test_words_without_room_in_the_page_are_asked_for() -> None:
    daemon = Daemon(WHY, WHY)
    found = handle(daemon)
    assert found.state is CheckpointState.FAILED and found.known_reason is None
    assert found.reason == "the GPU failed"
    assert daemon.asked == [Describe(1)]


def test_a_short_sentence_stays_when_the_daemon_ended() -> None:
    found = handle(Daemon(why=Why(Cause.RANK_LACKS, 5)))
    assert found.reason == "rank 5 did not save this checkpoint, so no rank keeps it"
    assert "the daemon ended before it gave" in handle(Daemon()).reason


def test_words_that_nobody_waits_for_arrive_later() -> None:
    daemon = Daemon(WHY)
    found = handle(daemon)
    for answer in (Described(1, CheckpointState.COPYING, 7, 3), WHY):
        _ = found.state
        found.ask()
        found.ask()  # one question at a time
        assert found.known_reason is None
        daemon.answer(answer)
    assert found.known_reason == "the GPU failed"
    found.ask()
    assert not daemon.callbacks


def test_an_answer_that_was_lost_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "_ASK_AGAIN_S", 0.0)
    daemon = Daemon(WHY)
    found = handle(daemon)
    _ = found.state
    found.ask()
    found.ask()
    assert len(daemon.callbacks) == 2


def test_a_failure_for_an_answer_is_the_reason() -> None:
    daemon = Daemon(WHY)
    found = handle(daemon)
    _ = found.state
    found.ask()
    daemon.answer(Failure("NO_CHECKPOINT", "it is too old", "see the log"))
    assert found.known_reason == "it is too old (see the log)"


def test_a_save_that_was_given_up_is_durable_with_a_reason() -> None:
    why = Why(Cause.RANK_ENDED, 1)
    daemon: Any = Daemon(WHY, word=WORD_COPIED, outcome=OUTCOME_GIVEN_UP, why=why, alone=False)
    found = handle(daemon)
    assert (found.state, wait_durable(found, 0)) == (CheckpointState.DURABLE, (7, 3))
    with pytest.raises(CheckpointFailedError, match=r"durable on this rank, but .* rank 1 ended"):
        wait_global(found, 0)
    assert saved(found, 0, everywhere=True) is None
    daemon.entries[1].outcome = CheckpointState.SUPERSEDED
    daemon.entries[1].newer = 8
    assert wait_global(found, 0) == (8, 4)


def test_a_reused_entry_is_replaced_by_questions() -> None:
    given_up = Described(1, CheckpointState.DURABLE, 7, 3, "rank 1 failed")
    daemon: Any = Daemon(
        given_up, NEWER, WHY, word=WORD_COPIED, outcome=CheckpointState.DURABLE, alone=False
    )
    found = handle(daemon)
    found.settle()
    assert daemon.asked == []
    del daemon.entries[1]
    assert (found.state, wait_durable(found, 0)) == (CheckpointState.DURABLE, (7, 3))
    with pytest.raises(CheckpointFailedError, match=r"durable on this rank, but .* rank 1 failed"):
        wait_global(found, 0)
    assert saved(found, 0, everywhere=True) is None
    assert wait_global(found, 0) == (8, 4)
    assert found.reason == "newer"


@pytest.mark.parametrize("word", [WORD_COPYING, WORD_COPIED])
def test_what_ended_with_its_daemon_is_asked_of_the_next(word: int) -> None:
    """The dead daemon may have published it, and the next one may have taken it over."""
    found = handle(Daemon(word=word, outcome=CheckpointState.WRITING))
    assert (found.state, found.phase) == (CheckpointState.FAILED, Phase.UNKNOWN)
    assert "pccheckctl list" in found.reason
    following: Any = Daemon(WHY)
    for state in (CheckpointState.WRITING, CheckpointState.DURABLE):
        found.inquiry.find_out(following, found.sequence)
        found.inquiry.find_out(following, found.sequence)  # one question at a time
        following.answer(Described(1, state, 7, 3))
    assert following.asked == [Describe(1, 7)] * 2
    assert "it is durable, as sequence 7" in found.reason
    assert (found.state, found.phase) == (CheckpointState.FAILED, Phase.FOUND)


@pytest.mark.parametrize(
    ("answer", "known"),
    [
        (Failure(NoCheckpointError.code, "there is none"), True),
        (Described(1, CheckpointState.DURABLE, 7, 4), True),  # another one, with its sequence
        (Failure(InternalError.code, "the disk does not answer"), False),
    ],
)
def test_only_an_answer_says_that_it_is_not_durable(answer: object, known: bool) -> None:
    found = handle(Daemon(word=WORD_COPIED, outcome=CheckpointState.WRITING))
    assert found.state is CheckpointState.FAILED
    following: Any = Daemon(WHY)
    found.inquiry.find_out(following, found.sequence)
    following.answer(answer)
    assert found.phase is (Phase.MISSING if known else Phase.UNKNOWN)
    assert ("it is not durable" in found.reason) is known


def test_what_was_never_begun_is_lost_with_its_daemon() -> None:
    daemon: Any = Daemon(word=WORD_COPYING)
    daemon.entries[1].sequence = 0
    found = handle(daemon)
    assert (found.phase, found.state) == (Phase.ABANDONED, CheckpointState.FAILED)
    assert found.reason == "the daemon ended before the checkpoint was durable"


def test_a_forked_child_does_not_learn_the_end() -> None:
    daemon = Daemon(word=WORD_COPIED, outcome=CheckpointState.WRITING)
    daemon.pid += 1
    assert "only the parent of a forked process" in handle(daemon).reason


def test_a_superseded_save_takes_the_newer_one_from_the_page() -> None:
    daemon = Daemon(word=WORD_COPIED, outcome=CheckpointState.SUPERSEDED, newer=8)
    found = handle(daemon)
    assert wait_durable(found, 0) == wait_global(found, 0) == (8, 4)
    assert (found.sequence, daemon.asked) == (7, [])
    found.settle()
    daemon.steps.clear()
    daemon.entries.clear()
    assert wait_durable(found, 0) == (8, 4)


def replaced_in_memory(then: CheckpointState) -> Any:
    """Snapshot 1 was replaced by snapshot 2, in memory, which is written when that is wanted."""
    why = Why(Cause.REPLACED_IN_MEMORY, 4)
    daemon: Any = Daemon(
        WHY, word=WORD_COPIED, outcome=CheckpointState.SUPERSEDED, newer=8, why=why,
        then=CheckpointState.COPIED,
    )  # fmt: skip
    daemon.entries[2].cause = Cause.CODE
    daemon.wanted = []

    def write(snapshot: int) -> bool:
        daemon.wanted.append(snapshot)
        daemon.entries[snapshot].outcome = then
        return True

    daemon.native.write = write
    return daemon


def test_a_save_replaced_in_memory_has_the_newer_one_written() -> None:
    daemon = replaced_in_memory(CheckpointState.DURABLE)
    found = handle(daemon)
    found.in_memory = True
    assert found.state is CheckpointState.SUPERSEDED
    assert found.reason == "a newer checkpoint, step 4, is in memory on all ranks"
    found.ask()
    assert (daemon.wanted, daemon.asked) == ([], [])
    assert wait_durable(found, 0) == (8, 4)
    assert (daemon.wanted, found.state) == ([2], CheckpointState.SUPERSEDED)


@pytest.mark.parametrize("closed", [False, True])
def test_what_stands_in_the_place_of_a_replaced_save_is_kept(closed: bool) -> None:
    daemon = replaced_in_memory(CheckpointState.DURABLE)
    found = handle(daemon)
    assert found.state is CheckpointState.SUPERSEDED
    if closed:
        daemon.native.write(2)
        found.keep_standing()
    daemon.steps.clear()
    daemon.entries.clear()
    if closed:
        assert wait_durable(found, 0) == (8, 4)
        return
    with pytest.raises(DaemonUnreachableError, match="did not report whether that is durable"):
        wait_durable(found, 0)


def test_a_newer_one_that_could_not_be_written_fails_the_wait() -> None:
    daemon = replaced_in_memory(CheckpointState.FAILED)
    with pytest.raises(CheckpointFailedError, match="checkpoint of step 4 failed"):
        wait_durable(handle(daemon), 0)


def test_only_a_wait_for_the_disk_wants_a_save_written() -> None:
    daemon = replaced_in_memory(CheckpointState.DURABLE)
    found = handle(daemon, 4, 2)
    found.in_memory = True
    wait_copied(found, 0)
    assert saved(found, 0, everywhere=True) is None
    assert (found.state, daemon.wanted) == (CheckpointState.COPIED, [])
    assert wait_durable(found, 0) == wait_global(found, 0) == (8, 4)
    assert daemon.wanted == [2]


def test_a_newer_one_in_memory_makes_no_save_durable() -> None:
    """The daemon ended: it is not known whether the newer one was written."""
    daemon = replaced_in_memory(CheckpointState.DURABLE)
    found = handle(daemon, 4, 2)
    daemon.answers.clear()
    assert found.phase is Phase.UNKNOWN


def test_a_superseded_save_asks_which_one_replaced_it() -> None:
    """The page has no name for one that was damaged since."""
    daemon = Daemon(NEWER, WHY, word=WORD_COPIED, outcome=CheckpointState.SUPERSEDED)
    found = handle(daemon)
    for _ in range(2):
        assert wait_durable(found, 0) == wait_global(found, 0) == (8, 4)
    assert found.sequence == 7 and len(daemon.asked) == 1


@pytest.mark.parametrize("alone", [True, False])
def test_a_save_that_has_superseded_another_is_durable(alone: bool) -> None:
    """The daemon ended between the two entries of its page."""
    daemon = Daemon(
        word=WORD_COPIED, outcome=CheckpointState.SUPERSEDED, newer=8,
        then=CheckpointState.WRITING, alone=alone,
    )  # fmt: skip
    found = handle(daemon, 4, 2)
    durable = (8, 4)
    assert wait_global(found, 0) == wait_durable(found, 0) == durable
    assert saved(found, 0, everywhere=True) == durable
    assert found.state is (CheckpointState.DURABLE if alone else CheckpointState.GLOBAL)


@pytest.mark.parametrize("newer", [9, 0])
def test_a_save_that_has_superseded_no_other_is_unknown(newer: int) -> None:
    daemon = Daemon(
        word=WORD_COPIED, outcome=CheckpointState.SUPERSEDED, newer=newer,
        then=CheckpointState.WRITING,
    )  # fmt: skip
    assert handle(daemon, 4, 2).phase is Phase.UNKNOWN


def test_without_the_daemon_a_replacement_has_no_name() -> None:
    daemon = Daemon(word=WORD_COPIED, outcome=CheckpointState.SUPERSEDED, why=Why(Cause.REPLACED))
    found = handle(daemon)
    with pytest.raises(DaemonUnreachableError, match=r"step 3: a newer .* did not report which"):
        wait_durable(found, 0)
    assert found.state is CheckpointState.SUPERSEDED
    assert found.reason == "a newer checkpoint became durable first"


def looked_at(change: Callable[[InFlight, SimpleNamespace], object]) -> list[CheckpointState]:
    """Its state after the change came, as in a signal handler, before each instruction of a look at
    the page in turn."""
    states: list[CheckpointState] = []
    seen = at = 1
    while seen >= at:
        daemon: Any = Daemon(WHY, word=WORD_COPIED, outcome=CheckpointState.COPIED)
        now, found = daemon.entries[1], handle(daemon)
        daemon.native.state = lambda _, now=now: SimpleNamespace(**vars(now))  # as it was then
        tracer = At(at, lambda now=now, found=found: change(found, now))
        with tracer.traced():
            _ = found.state
        seen = tracer.seen
        if seen >= at:
            states.append(found.state)
        at += 1
    assert len(states) > 50
    return states


def test_what_a_handler_saw_in_the_middle_of_a_look_stays() -> None:
    def becomes_durable(found: InFlight, now: SimpleNamespace) -> None:
        now.outcome = CheckpointState.DURABLE
        assert found.state is CheckpointState.DURABLE

    assert set(looked_at(becomes_durable)) == {CheckpointState.DURABLE}


def test_an_end_in_the_middle_of_a_look_stays() -> None:
    """The first move counts: the handler gave the save up, or the look had found it copied."""
    ended: list[bool] = []

    def ends(found: InFlight, _now: SimpleNamespace) -> None:
        ended.append(found.fail(in_words("abandoned")))

    states = looked_at(ends)
    assert [state is CheckpointState.FAILED for state in states] == ended
    assert any(ended)
