"""N checkpoints are in flight at once; back-pressure; superseding; growth."""

from __future__ import annotations

import itertools

import pytest

from tests.support.daemon import Daemon, Start
from tests.support.trainer import Connect
from tests.support.waiting import until

MIB = 1 << 18


def overlaps(daemon: Daemon) -> int:
    """Pairs of durable or superseded checkpoints that were in flight at the same time."""
    (session,) = daemon.status()["sessions"]
    spans = [
        (c["times"]["begin"], c["times"]["durable"] or c["times"]["written"])
        for c in session["checkpoints"]
        if c["state"] in ("durable", "superseded", "global")
    ]
    spans.sort()
    return sum(late < end for (_, end), (late, _) in itertools.pairwise(spans))


@pytest.mark.parametrize(("slots", "expected"), [(4, True), (2, False)])
def test_checkpoints_overlap_exactly_when_n_is_above_one(
    start_daemon: Start, start_trainer: Connect, slots: int, expected: bool
) -> None:
    daemon = start_daemon("--slots", str(slots), "--keep", "1", "--max-bandwidth", "8MiB")
    trainer = start_trainer(daemon, [3 * MIB])
    trainer.run(6, 1)
    for handle in range(6):
        trainer.wait_durable(handle)
    assert (overlaps(daemon) > 0) is expected


def test_skip_instead_of_wait(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon("--slots", "2", "--keep", "1", "--max-bandwidth", "1MiB")
    trainer = start_trainer(daemon, [3 * MIB], on_busy="skip")
    trainer.step()
    first = trainer.checkpoint()
    trainer.step()
    second = trainer.checkpoint()
    trainer.step()
    assert trainer.state(second) == "skipped"
    assert trainer.wait_durable(first) == "durable"
    assert trainer.states().count("skipped") == 1


def test_a_state_that_outgrows_its_slots_gets_a_new_volume(
    daemon: Daemon, start_trainer: Connect
) -> None:
    small = start_trainer(daemon, [MIB])
    small.save()
    small.close()
    small.kill()

    large = start_trainer(daemon, [4 * MIB], fresh=True)
    large.step(7)
    large.wait_durable(large.checkpoint())
    large.kill()
    until(lambda: len(list(daemon.storage.rglob("*.pcc"))) == 1)  # the old one goes afterwards
    (volume,) = daemon.storage.rglob("*.pcc")
    assert volume.stat().st_size > 16 << 20
    again = start_trainer(daemon, [4 * MIB])
    done = again.restore()
    assert (done["step"], done["sequence"]) == (7, 2)
    assert again.check(7) == ""


def test_more_state_than_dram(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon("--dram", "4MiB")
    trainer = start_trainer(daemon, [10 * MIB])
    for _ in range(3):
        trainer.step()
        last = trainer.checkpoint()
    trainer.wait_durable(last)
    assert trainer.recover()["wrong"] == ""
