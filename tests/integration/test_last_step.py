"""`checkpoint(to="device")`: the last step of a dead trainer, and the ends of those that training
withdraws. `make last-step-campaign` plays more deaths."""

from __future__ import annotations

import os

import pytest

from tests.support import fakegpu
from tests.support.gpunode import Node

from .last_step_campaign import GEOMETRY, PARTS, run

pytestmark = pytest.mark.skipif(fakegpu.is_real(), reason="needs the stand-in's dead processes")


def test_10_deaths() -> None:
    seed = int(os.environ.get("PCC_SEED", "1"))
    tally = run(10, seed)
    print(f"seed {seed}", dict(tally.outcomes))
    assert not tally.violations, (seed, tally.violations)
    assert sum(tally.outcomes.values()) == 10


def test_nothing_is_copied_and_the_update_ends_it() -> None:
    with Node(*GEOMETRY, "--dram", "32MiB", dead="keep") as node:
        trainer = node.start().ready(PARTS)
        trainer.step()
        copies = node.faults.copies_to_host
        handle = trainer.checkpoint(to="device")
        trainer.synchronize()
        trainer.step()
        trainer.synchronize()
        assert trainer.ended(handle) == "skipped"
        assert "training went on" in trainer.reason(handle)
        assert node.faults.copies_to_host == copies
        assert not trainer.warnings


def test_a_wait_and_the_end_of_the_process_have_it_written() -> None:
    with Node(*GEOMETRY, "--dram", "32MiB") as node:
        trainer = node.start().ready(PARTS)
        trainer.step()
        assert trainer.wait_durable(trainer.checkpoint(to="device")) == "durable"
        now = trainer.step()
        trainer.checkpoint(to="device")
        trainer.close()
        found = node.connect(PARTS).recover()
        assert (found["step"], found["wrong"]) == (now, "")


def test_it_is_skipped_where_the_daemon_does_not_pull() -> None:
    with Node(*GEOMETRY, "--dram", "32MiB") as node:
        trainer = node.start().ready(PARTS, transfer="push")
        handle = trainer.checkpoint(to="device")
        assert trainer.state(handle) == "skipped"
        assert "does not pull" in trainer.reason(handle)
