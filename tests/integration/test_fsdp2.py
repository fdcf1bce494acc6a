"""examples/fsdp2.py: two ranks that are killed and resume equal an undisturbed run bit for bit;
three ranks can resume as well."""

from __future__ import annotations

import psutil
import pytest

from tests.support.curves import Trainer, differences
from tests.support.daemon import Daemon
from tests.support.torchrun import started


class Launched(Trainer):
    """Ranks launched through what torchrun calls, without importing torch for each rank."""

    def __init__(self, daemon: Daemon, job: str, steps: int, ranks: int) -> None:
        flags = ("--steps", steps, "--every", 3)
        self.follow(started(daemon, job, ranks, "examples.fsdp2", *flags))

    def send_kill(self) -> None:
        """Kills torchrun's process and the ranks."""
        launcher = psutil.Process(self.process.pid)
        for one in (launcher, *launcher.children(recursive=True)):
            one.kill()


def launch(daemon: Daemon, job: str, steps: int, ranks: int = 2) -> Trainer:
    return Launched(daemon, job, steps, ranks)


@pytest.mark.long
def test_killed_ranks_go_on_as_if_they_had_not_been(daemon: Daemon) -> None:
    whole = launch(daemon, "whole", 30).finish()
    assert len({losses[0] for losses in whole.losses.values()}) == 30
    trainer = launch(daemon, "job", 30)  # so many that the kill comes before the last one
    assert 8 in trainer.steps()
    killed = trainer.kill()
    resumed = launch(daemon, "job", 30).finish()
    assert resumed.resumed >= 6  # the update of step 7 waited for that copy
    assert min(resumed.losses) == resumed.resumed + 1
    assert resumed.losses[30].keys() == {0, 1}
    assert differences(whole, killed, resumed) == []

    other = launch(daemon, "job", 32, ranks=3).finish()
    assert [sorted(other.losses[step]) for step in sorted(other.losses)] == [[0, 1, 2]] * 2
    assert sorted(other.losses) == [31, 32]
