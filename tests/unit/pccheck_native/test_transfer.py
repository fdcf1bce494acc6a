"""Pull or push: a test case for each row of the two tables, and for each pair of rows in order."""

from __future__ import annotations

from typing import Any

import pytest

from pccheck_native.transfer import (
    FAILED_COPIES_MAX,
    PULL,
    PUSH,
    PUSHED,
    Case,
    Decision,
    DriverState,
    chosen,
    offered,
)

DRIVER = DriverState("driver 12.8")
#: The rows of `offered`, in order: what makes each apply, its reason, and whether it may pass.
OFFERED: list[tuple[dict[str, Any], str, bool]] = [
    ({"driver": DriverState(missing="not yet", may_pass=True)}, "not yet", True),
    ({"failed_copies": FAILED_COPIES_MAX}, "failed 3 pulled copies in a row", True),
    ({"obstacle": "the handle does not open"}, "the handle does not open", True),
]
AUTO = 'use transfer="auto", which pushes instead'
#: The rows of `chosen` in the same way, with the hint for transfer="pull".
CHOSEN: list[tuple[dict[str, Any], str, bool, str]] = [
    ({"option": "push"}, 'the client has transfer="push"', False, ""),
    ({"lacks": "GPU 0: no memops"}, "GPU 0: no memops", False, AUTO),
    ({"offer": Decision(PUSH, "another uid", may_pass=True)}, "another uid", True, AUTO),
    ({"stale": True}, "waits for a slot", True, "more --slots"),
]


def choose(changes: dict[str, Any]) -> Decision:
    values = {"option": "auto", "offer": Decision(PULL, "CUDA IPC")} | changes
    return chosen(values.pop("option"), values.pop("offer"), **values)


def is_push(decision: Decision, reason: str, may_pass: bool) -> bool:
    same = (decision.transfer, decision.may_pass) == (PUSH, may_pass)
    return same and reason in decision.reason


def test_daemon_pulls_when_nothing_is_in_the_way() -> None:
    assert offered(Case(DRIVER)) == Decision(PULL, "CUDA IPC, driver 12.8")
    assert offered(Case(DRIVER, failed_copies=FAILED_COPIES_MAX - 1)).transfer == PULL


@pytest.mark.parametrize(("changes", "reason", "may_pass"), OFFERED)
def test_daemon_offers_push_by_each_row(
    changes: dict[str, Any], reason: str, may_pass: bool
) -> None:
    decision = offered(Case(**{"driver": DRIVER} | changes))
    assert is_push(decision, reason, may_pass)
    assert decision.hint == PUSHED


def test_daemon_with_a_driver_missing_for_good_offers_push() -> None:
    assert is_push(offered(Case(DriverState(missing="not installed"))), "not installed", False)


@pytest.mark.parametrize("first", range(len(OFFERED)))
def test_first_row_of_the_daemon_counts(first: int) -> None:
    changes: dict[str, Any] = {"driver": DRIVER}
    for row in reversed(OFFERED[first:]):
        changes |= row[0]
    assert is_push(offered(Case(**changes)), *OFFERED[first][1:])


@pytest.mark.parametrize("option", ["auto", "pull"])
def test_client_takes_the_offer_of_pull(option: str) -> None:
    assert choose({"option": option}) == Decision(PULL)


@pytest.mark.parametrize(("changes", "reason", "may_pass", "hint"), CHOSEN)
def test_client_chooses_push_by_each_row(
    changes: dict[str, Any], reason: str, may_pass: bool, hint: str
) -> None:
    decision = choose(changes)
    assert is_push(decision, reason, may_pass)
    assert hint in decision.hint


def test_offer_of_push_without_a_reason_gets_one() -> None:
    assert is_push(choose({"offer": Decision(PUSH)}), "this daemon cannot pull", False)


@pytest.mark.parametrize("first", range(len(CHOSEN)))
def test_first_row_of_the_client_counts(first: int) -> None:
    changes: dict[str, Any] = {}
    for row in reversed(CHOSEN[first:]):
        changes |= row[0]
    assert is_push(choose(changes), *CHOSEN[first][1:3])
