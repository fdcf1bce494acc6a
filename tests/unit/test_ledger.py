"""What is counted of a rank's checkpoints."""

from __future__ import annotations

from pccheckd.tenancy.ledger import COUNT_MAX, ENDED_BEFORE, Ledger


def test_failures_in_a_row_outlive_their_trainer() -> None:
    ledger = Ledger()
    ledger.trainer_came(1)
    ledger.failed(3)
    ledger.failed(1, "the disk is full")
    assert (ledger.failing, ledger.last_failure, ledger.counters["failed"]) == (
        4, "the disk is full", 4
    )  # fmt: skip
    ledger.trainer_ended()
    ledger.failed(1, ENDED_BEFORE)  # by its own end: counted, and no sign of trouble
    ledger.trainer_came(2)
    assert (ledger.failing, ledger.last_failure, ledger.counters["failed"]) == (
        4, "the disk is full", 5
    )  # fmt: skip


def test_a_client_that_lies_counts_no_further_than_a_document_holds() -> None:
    ledger = Ledger()
    for _ in range(3):
        ledger.failed(1 << 60)
    assert ledger.counters["failed"] == ledger.failing == COUNT_MAX
