"""N checkpoints are in flight at once; back-pressure; superseding; growth."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.daemon import Daemon
from tests.support.trainer import Trainer

Start = Callable[..., Daemon]
Connect = Callable[..., Trainer]
MIB = 1 << 18


def status(daemon: Daemon) -> dict[str, Any]:
    """What `pccheckctl status --json` prints."""
    ran = subprocess.run(
        [sys.executable, "-m", "pccheckctl", "--socket", str(daemon.socket), "status", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode in (0, 3), ran.stderr
    document: dict[str, Any] = json.loads(ran.stdout)
    return document


def overlaps(daemon: Daemon) -> int:
    """Pairs of durable or superseded checkpoints that were in flight at the same time."""
    (session,) = status(daemon)["sessions"]
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
    for _ in range(6):
        trainer.step()
        last = trainer.checkpoint()
    trainer.wait_durable(last)
    for handle in range(last + 1):
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
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon()
    small = start_trainer(daemon, [MIB])
    small.step()
    small.wait_durable(small.checkpoint())
    small.close()
    small.kill()

    large = start_trainer(daemon, [4 * MIB], fresh=True)
    large.step(7)
    large.wait_durable(large.checkpoint())
    large.kill()
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
