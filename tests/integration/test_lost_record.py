"""Both replicas of the newest commit record are damaged: recovery goes back a checkpoint, and every
place that a user looks at reports it. No crash leaves such a volume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pccheck import DamagedError, PCcheckClient, PccheckWarning
from pccheck_native import layout
from tests.support.ctl import Ctl
from tests.support.daemon import Daemon
from tests.support.volumes import lose_record

LOST = "both copies of a commit record are damaged, so that the newest checkpoint may be lost"


def saved(daemon: Daemon, *steps: int) -> Path:
    """The volume, after a run that ended without close(done=True)."""
    with PCcheckClient("job", socket=daemon.socket) as client:
        for step in steps:
            client.checkpoint({"x": torch.full((1000,), float(step))}, step=step).wait_durable(60)
    daemon.stop()
    (found,) = layout.list_volumes(daemon.storage)
    return found.path


def test_a_step_back_is_told_everywhere(daemon: Daemon, ctl: Ctl) -> None:
    lose_record(saved(daemon, 1, 2, 3))
    assert LOST in ctl(daemon.storage, "status").out
    assert LOST in ctl(daemon.storage, "list").err
    verified = ctl(daemon.storage, "verify")
    assert (verified.code, LOST in verified.out) == (14, True)

    daemon.start()
    daemon.kill()
    daemon.start()  # the place of the lost record has been written since
    with PCcheckClient("job", socket=daemon.socket) as client:
        with pytest.warns(PccheckWarning, match=f"{LOST}, and step 2 was restored instead"):
            found = client.recover()
        assert found.step == 2
        assert torch.equal(found.state["x"], torch.full((1000,), 2.0))
        assert [LOST in item.reason for item in found.skipped] == [True]
        assert LOST in ctl(None, "--socket", daemon.socket, "status").out
        assert LOST in ctl(None, "--socket", daemon.socket, "list").err
        assert ctl(None, "--socket", daemon.socket, "verify").code == 14
        client.checkpoint({"x": torch.zeros(1000)}, step=3).wait_durable(60)
    assert LOST not in ctl(None, "--socket", daemon.socket, "status").out
    assert ctl(None, "--socket", daemon.socket, "verify").code == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_job_that_may_have_lost_its_only_checkpoint_does_not_start_anew(
    daemon: Daemon, world_size: int
) -> None:
    lose_record(saved(daemon, 1))
    daemon.start()
    with (
        PCcheckClient("job", socket=daemon.socket, rank=0, world_size=world_size) as client,
        pytest.raises(DamagedError, match=LOST),
    ):
        client.recover()
