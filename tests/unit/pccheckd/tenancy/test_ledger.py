"""What is counted of a rank's checkpoints."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from pccheck_native import _core
from pccheck_wire.ends import Cause, Why
from pccheck_wire.messages import CheckpointState as State
from pccheckd.tenancy.checkpoint import End, RankCheckpoint
from pccheckd.tenancy.ledger import COUNT_MAX, HISTORY, Ledger
from tests.support.jobs import saving


def test_failures_in_a_row_outlive_their_trainer() -> None:
    ledger = Ledger()
    ledger.trainer_came(1)
    ledger.failed(3)
    ledger.failed(1, Why(stage="write", code="ENOSPC"))
    assert (ledger.failing, ledger.last_failure, ledger.counters["failed"]) == (
        4, "write: the disk is full", 4
    )  # fmt: skip
    ledger.trainer_ended()
    ledger.failed(1, Why(Cause.ENDED_BEFORE))  # by its own end: counted, and no sign of trouble
    ledger.trainer_came(2)
    assert (ledger.failing, ledger.last_failure, ledger.counters["failed"]) == (
        4, "write: the disk is full", 5
    )  # fmt: skip


def test_a_client_that_lies_counts_no_further_than_a_document_holds() -> None:
    ledger = Ledger()
    for _ in range(3):
        ledger.failed(1 << 60)
    assert ledger.counters["failed"] == ledger.failing == COUNT_MAX


def durable(
    ledger: Ledger, sequence: int, *, world: int = 2, written_bytes: int = 0, took_ns: int = 0
) -> RankCheckpoint:
    """One of two ranks' checkpoints that has become durable here."""
    made = saving(sequence, sequence, snapshot=sequence, world=world)
    ledger.add(made)
    times = _core.SaveTimes(*[0] * len(_core.SaveTimes._fields))
    about: Any = SimpleNamespace(
        kind="durable", session=1, id=sequence, error=0, sequence=sequence, rehomed=0, slot=0,
        stage="", error_name="", copied_bytes=0, written_bytes=written_bytes,
        times=times._replace(first_write=5, durable=5 + took_ns),
    )  # fmt: skip
    assert ledger.apply(about, lambda _: Why()) is made
    return made


def test_what_superseded_a_checkpoint_is_named_once_its_own_event_has_come() -> None:
    """The two events come from two threads."""
    ledger = Ledger()
    first = durable(ledger, 5, world=1)
    assert ledger.newer_than(first) is None
    durable(ledger, 7)
    durable(ledger, 6)
    assert ledger.newer_than(first) == (7, 7)


def test_what_superseded_a_checkpoint_of_several_ranks_is_on_all_of_them() -> None:
    ledger = Ledger()
    first, _second, _alone = (durable(ledger, sequence) for sequence in (1, 2, 3))
    assert ledger.newer_than(first) is None
    ledger.became_global(2, {2})
    assert ledger.newer_than(first) == (2, 2)


def test_what_is_durable_and_will_not_be_global_is_noted_once_and_stays_durable() -> None:
    ledger = Ledger()
    first, second = durable(ledger, 1), durable(ledger, 2)
    why = Why(Cause.RANK_ENDED, 1)
    assert ledger.gave_up(lambda number: why if number == 1 else None) == [first]
    assert ledger.gave_up(lambda _: None) == []
    assert (first.state, first.why, second.why) == (State.DURABLE, why, None)
    assert ledger.became_global(2, {2}) == [first, second]
    assert (first.state, second.state) == (State.SUPERSEDED, State.GLOBAL)
    assert ledger.gave_up(lambda _: why) == []


def test_what_becomes_durable_after_a_newer_one_is_global_moves_as_well() -> None:
    ledger = Ledger()
    durable(ledger, 2)
    ledger.became_global(2, {2})
    assert not ledger.is_late(2)
    late = durable(ledger, 1)
    assert ledger.is_late(2) and ledger.became_global(2, {1, 2}) == [late]
    assert late.state is State.GLOBAL and not ledger.is_late(2)


def test_what_a_rank_alone_has_ends_when_a_newer_one_is_global() -> None:
    ledger = Ledger()
    items = [durable(ledger, sequence) for sequence in (1, 2, 3, 4)]
    assert ledger.became_global(3, {1, 3}) == items[:3]
    assert [item.state for item in items] == [
        State.GLOBAL, State.SUPERSEDED, State.GLOBAL, State.DURABLE,
    ]  # fmt: skip
    assert ledger.newer_than(items[1]) == (3, 3)
    assert ledger.became_global(3, {1, 3}) == []  # reported once


def test_a_durable_one_is_remembered_beside_many_in_memory_only() -> None:
    ledger = Ledger()
    old = durable(ledger, 1)
    for number in range(2, 2 * HISTORY):
        replaced = saving(number, number, snapshot=number, requested_ns=number, in_memory=True)
        ledger.add(replaced)
        replaced.advance(State.COPIED, number)
        ledger.refuse(replaced, End(State.SUPERSEDED, Why(Cause.REPLACED_IN_MEMORY, number + 1)))
    assert ledger.of_sequence(1) is old
    assert len(ledger.checkpoints) <= HISTORY + 2


def test_the_next_request_for_disk_is_expected_after_an_interval() -> None:
    ledger = Ledger()
    assert ledger.next_s(0) == math.inf
    for second in range(0, 30, 10):
        asked(ledger, second)
    asked(ledger, 23, in_memory=True)
    assert [ledger.next_s(n * 10**9) for n in (24, 30, 34)] == [6, 0, 4]


def asked(ledger: Ledger, second: int, *, in_memory: bool = False) -> None:
    ledger.add(saving(snapshot=second, requested_ns=second * 10**9, in_memory=in_memory))


def test_the_disk_is_as_fast_as_its_fastest_write() -> None:
    ledger = Ledger()
    for sequence, (written, took_ns) in enumerate([(0, 0), (500, 10**9), (300, 10**9)], 1):
        durable(ledger, sequence, written_bytes=written, took_ns=took_ns)
    assert ledger.bytes_per_s == 500.0
