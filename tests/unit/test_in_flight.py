"""Why a checkpoint failed: the page says that it did before the daemon's records say why."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pccheck import CheckpointState
from pccheck.saving import in_flight as handles
from pccheck.saving.in_flight import InFlight
from pccheck_native import WORD_REFUSED
from pccheck_wire.messages import Described, Failure

NOT_YET = Described(1, CheckpointState.COPYING, 7, 3)
WHY = Described(1, CheckpointState.FAILED, 7, 3, "the GPU failed")


class Daemon:
    """A connection to one that answers this, in turn."""

    def __init__(self, *answers: Described) -> None:
        self.answers = list(answers)
        self.callbacks: list[Callable[[Any], None]] = []
        state = SimpleNamespace(
            word=WORD_REFUSED, outcome=CheckpointState.FAILED, sequence=7, source_read=True,
            error=0, error_name="",
        )  # fmt: skip
        self.link = SimpleNamespace(state=lambda _: state)

    def alive(self) -> bool:
        return bool(self.answers)

    def request(self, _body: object, *, timeout_s: float) -> Described:
        assert timeout_s > 0
        return self.answers.pop(0)

    def ask(self, _body: object, callback: Callable[[Any], None]) -> None:
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
