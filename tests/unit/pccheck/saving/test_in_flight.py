"""Why a checkpoint failed: the page says that it did before the daemon's records say why."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck import CheckpointState
from pccheck.saving import in_flight as handles
from pccheck.saving.in_flight import InFlight
from pccheck_native import WORD_COPIED, WORD_COPYING, WORD_REFUSED
from pccheck_wire.errors import (
    CheckpointFailedError,
    DaemonUnreachableError,
    InternalError,
    NoCheckpointError,
)
from pccheck_wire.messages import Describe, Described, Failure
from tests.integration.handler_campaign import At

NOT_YET = Described(1, CheckpointState.COPYING, 7, 3)
WHY = Described(1, CheckpointState.FAILED, 7, 3, "the GPU failed")


class Daemon:
    """A connection to one that answers this, in turn."""

    def __init__(
        self, *answers: Described, word: int = WORD_REFUSED,
        outcome: CheckpointState = CheckpointState.FAILED, newer: int = 0,
        then: CheckpointState = CheckpointState.DURABLE,
    ) -> None:  # fmt: skip
        """`outcome` and `newer` of snapshot 1, and `then` the outcome of snapshot 2."""
        self.answers = list(answers)
        self.callbacks: list[Callable[[Any], None]] = []
        self.asked: list[object] = []
        state = SimpleNamespace(
            word=word, outcome=outcome, sequence=7, newer=newer, source_read=True, error=0,
            error_name="",
        )  # fmt: skip
        later = SimpleNamespace(**vars(state) | {"sequence": 8, "newer": 0, "outcome": then})
        self.link = SimpleNamespace(state={1: state, 2: later}.get)
        self.steps = {1: 3, 2: 4}
        self.pid = os.getpid()

    def alive(self) -> bool:
        return bool(self.answers)

    def request(self, _body: object, *, timeout_s: float) -> Described:
        assert timeout_s > 0
        return self.answers.pop(0)

    def ask(self, body: object, callback: Callable[[Any], None]) -> None:
        self.asked.append(body)
        self.callbacks.append(callback)


def handle(daemon: Any) -> InFlight:
    return InFlight(3, daemon, 1)


def test_the_reason_is_waited_for() -> None:
    made = handle(Daemon(NOT_YET, NOT_YET, WHY))
    assert made.state is CheckpointState.FAILED
    assert made.reason == "the GPU failed"


def test_the_daemon_ends_before_it_says_why() -> None:
    assert "the daemon ended" in handle(Daemon(NOT_YET)).reason


def test_the_reason_that_nobody_waits_for_is_asked_for_again() -> None:
    daemon = Daemon(WHY)
    made = handle(daemon)
    for answer in (NOT_YET, WHY):
        made.describe_later()
        made.describe_later()  # one question at a time
        assert made.known_reason is None
        (callback,) = daemon.callbacks
        daemon.callbacks.clear()
        callback(answer)
    assert made.known_reason == "the GPU failed"
    made.describe_later()
    assert not daemon.callbacks


def test_one_that_was_given_up_is_durable_with_a_reason_also_when_its_entry_is_used_again() -> None:
    why = Described(1, CheckpointState.DURABLE, 7, 3, "rank 1 failed")
    newer = Described(1, CheckpointState.SUPERSEDED, 7, 3, "newer", "", 8, 4)
    daemon: Any = Daemon(why, newer, WHY, word=WORD_COPIED, outcome=CheckpointState.DURABLE)
    daemon.saves_alone, daemon.link.wait = False, lambda *_: True
    made = handle(daemon)
    made.settle()
    assert (made.state, made.wait_durable(0)) == (CheckpointState.DURABLE, (7, 3))
    with pytest.raises(CheckpointFailedError, match=r"durable on this rank, but .* rank 1 failed"):
        made.wait_global(0)
    assert made.saved(0, everywhere=True) is None
    assert (made.wait_global(0), made.reason) == ((8, 4), "newer")


def test_an_answer_that_was_lost_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handles, "_ASK_AGAIN_S", 0.0)
    daemon = Daemon(WHY)
    made = handle(daemon)
    made.describe_later()
    made.describe_later()
    assert len(daemon.callbacks) == 2


def test_a_failure_for_an_answer_is_the_reason() -> None:
    """The request itself was lost: the daemon has no record of it."""
    daemon = Daemon(WHY)
    made = handle(daemon)
    made.describe_later()
    daemon.callbacks[0](Failure("FAILED", "its request was lost", "see the log"))
    assert made.known_reason == "its request was lost (see the log)"


@pytest.mark.parametrize("word", [WORD_COPYING, WORD_COPIED])
def test_what_ended_with_its_daemon_is_asked_of_the_next_one(word: int) -> None:
    """The dead daemon may have published it, and the next one may have taken it over."""
    made = handle(Daemon(word=word, outcome=CheckpointState.WRITING))
    assert (made.state, made.is_unknown) == (CheckpointState.FAILED, True)
    assert "pccheckctl list" in made.reason
    following = Daemon(WHY)
    for state in (CheckpointState.WRITING, CheckpointState.DURABLE):
        made.find_out(following)  # type: ignore[arg-type]
        made.find_out(following)  # type: ignore[arg-type]  # one question at a time
        (callback,) = following.callbacks
        following.callbacks.clear()
        callback(Described(1, state, 7, 3))
    assert following.asked == [Describe(1, 7)] * 2
    assert "it is durable, as sequence 7" in made.reason
    assert (made.state, made.is_unknown) == (CheckpointState.FAILED, False)


@pytest.mark.parametrize(
    ("answer", "known"),
    [
        (Failure(NoCheckpointError.code, "there is none"), True),
        (Described(1, CheckpointState.DURABLE, 7, 4), True),  # another one, with its sequence
        (Failure(InternalError.code, "the disk does not answer"), False),
    ],
)
def test_only_an_answer_says_that_it_is_not_durable(answer: object, known: bool) -> None:
    made = handle(Daemon(word=WORD_COPIED, outcome=CheckpointState.WRITING))
    assert made.state is CheckpointState.FAILED
    following = Daemon(WHY)
    made.find_out(following)  # type: ignore[arg-type]
    following.callbacks[0](answer)
    assert made.is_unknown is not known
    assert ("it is not durable" in made.reason) is known


def test_a_superseded_one_waits_for_the_name_of_the_newer_one_and_keeps_it() -> None:
    newer = Described(1, CheckpointState.SUPERSEDED, 7, 3, "newer", "", 8, 4)
    daemon: Any = Daemon(NOT_YET, newer, WHY, word=WORD_COPIED, outcome=CheckpointState.SUPERSEDED)
    daemon.saves_alone = True
    made = handle(daemon)
    for _ in range(2):
        assert made.wait_durable(0) == made.wait_global(0) == (8, 4)
    assert made.sequence == 7


def test_a_superseded_one_takes_the_newer_one_from_the_page() -> None:
    daemon: Any = Daemon(word=WORD_COPIED, outcome=CheckpointState.SUPERSEDED, newer=8)
    daemon.saves_alone = True
    made = handle(daemon)
    assert made.wait_durable(0) == made.wait_global(0) == (8, 4)
    assert (made.sequence, daemon.asked) == (7, [])


def test_a_superseded_one_keeps_the_newer_one_of_a_reused_entry() -> None:
    daemon: Any = Daemon(word=WORD_COPIED, outcome=CheckpointState.SUPERSEDED, newer=8)
    made = handle(daemon)
    made.settle()
    daemon.steps.clear()
    assert made.wait_durable(0) == (8, 4)


@pytest.mark.parametrize("alone", [True, False])
def test_one_that_has_superseded_another_is_durable(alone: bool) -> None:
    """The daemon ended between the two entries of its page."""
    daemon: Any = Daemon(
        word=WORD_COPIED, outcome=CheckpointState.SUPERSEDED, newer=8, then=CheckpointState.WRITING
    )
    daemon.saves_alone, daemon.link.wait = alone, lambda *_: True
    made = InFlight(4, daemon, 2)
    assert made.wait_global(0) == made.wait_durable(0) == made.saved(0, everywhere=True) == (8, 4)
    assert made.state is (CheckpointState.DURABLE if alone else CheckpointState.GLOBAL)


@pytest.mark.parametrize("newer", [9, 0])
def test_one_that_has_superseded_no_other_is_unknown(newer: int) -> None:
    daemon: Any = Daemon(
        word=WORD_COPIED, outcome=CheckpointState.SUPERSEDED, newer=newer,
        then=CheckpointState.WRITING,
    )  # fmt: skip
    made = InFlight(4, daemon, 2)
    assert (made.state, made.is_unknown) == (CheckpointState.FAILED, True)


def test_a_superseded_one_names_no_checkpoint_when_its_daemon_has_ended() -> None:
    made = handle(Daemon(word=WORD_COPIED, outcome=CheckpointState.SUPERSEDED))
    with pytest.raises(DaemonUnreachableError, match=r"step 3: a newer .* did not report which"):
        made.wait_durable(0)


def test_a_superseded_one_keeps_its_reason_without_the_daemon() -> None:
    made = handle(Daemon(word=WORD_COPIED, outcome=CheckpointState.SUPERSEDED))
    assert made.state is CheckpointState.SUPERSEDED
    assert made.reason == "a newer checkpoint became durable first"


def looked_at(change: Callable[[InFlight, SimpleNamespace], object]) -> list[CheckpointState]:
    """Its state after the change came, as in a signal handler, before each instruction of a look at
    the page in turn."""
    states: list[CheckpointState] = []
    seen = at = 1
    while seen >= at:
        daemon: Any = Daemon(WHY, word=WORD_COPIED, outcome=CheckpointState.COPIED)
        daemon.saves_alone = True
        now, found = daemon.link.state(1), handle(daemon)
        daemon.link.state = lambda _, now=now: SimpleNamespace(**vars(now))  # as it was then
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
    def ends(found: InFlight, _now: SimpleNamespace) -> None:
        found.end(CheckpointState.FAILED, "abandoned")

    assert set(looked_at(ends)) == {CheckpointState.FAILED}
