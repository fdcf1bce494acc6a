"""should_checkpoint() follows a disk that becomes slower and faster, and ranks save together."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from pccheck import PCcheckClient, UsageError
from tests.conftest import SMALL
from tests.support.daemon import Daemon
from tests.support.endtraining import EndTrainer
from tests.support.service import Service
from tests.support.waiting import until

STEP_S = 0.003
LIMIT_S = 600.0


class Loop:
    """A loop whose steps only take time."""

    def __init__(self, client: PCcheckClient) -> None:
        self._client = client
        self._steps = itertools.count(1)
        self.saved: list[int] = []
        self.apart_s = 0.0  #: the last two checkpoints

    def train_until(self, wanted: Callable[[int], bool]) -> int:
        """Trains until the distance of two checkpoints, in steps, is as `wanted`."""
        before = time.monotonic()
        deadline, since = before + LIMIT_S, len(self.saved)
        for step in self._steps:
            time.sleep(STEP_S)
            if self._client.should_checkpoint(step):
                self._client.checkpoint(step=step)
                self.saved.append(step)
                before, self.apart_s = time.monotonic(), time.monotonic() - before
                apart = step - self.saved[-2] if len(self.saved) > 1 else 0
                if len(self.saved) > since + 3 and wanted(apart):
                    return apart
            assert time.monotonic() < deadline, self.saved
        raise AssertionError


@pytest.mark.timeout(1800)
def test_the_interval_follows_the_disk(stack: ExitStack) -> None:
    service = stack.enter_context(Service(*SMALL, "--slots", "6")).start()

    def limit(text: str) -> None:
        service.file.write_text(text)
        service.kill(signal.SIGHUP)
        service.wait_for(lambda said: said == "READY=1")

    def is_shown() -> bool:
        """Whether `status` has the interval that the newest checkpoint began."""
        (rank,) = service.status()["ranks"]
        assert client._interval is not None
        return rank["interval_steps"] == client._interval.steps

    client = PCcheckClient("paced", socket=service.socket, slowdown=1.5, on_error="raise")
    state = torch.zeros(256 << 10)  # a MiB
    client.attach(state={"values": state})
    loop = Loop(client)
    with client:
        at_first = loop.train_until(lambda _: True)
        takes_s = max(1.0, 4 * loop.apart_s)  # some 300 steps, or more where the disk is slow
        limit(f'max-bandwidth = "{int(1024 / takes_s)}KiB"')
        slow = loop.train_until(lambda apart: apart > 2 * at_first and apart > 100)
        until(is_shown)
        limit("")
        loop.train_until(lambda apart: apart < slow / 1.5)
        until(is_shown)


@pytest.mark.parametrize("slow", [0, 1])
def test_ranks_save_after_the_same_steps(
    daemon: Daemon, stack: ExitStack, tmp_path: Path, slow: int
) -> None:
    ranks = [stack.enter_context(EndTrainer(LOCAL_WORLD_SIZE="2")) for _ in range(2)]
    for rank, trainer in enumerate(ranks):
        pause_s = 0.02 if rank == slow else 0.01
        trainer.post("paced", str(daemon.socket), rank, str(tmp_path / "store"), 80, pause_s)
    first, second = (trainer.answer() for trainer in ranks)
    assert first == second and len(first) > 2
    (group,) = daemon.status()["groups"]
    assert group["global"]["step"] == first[-1]


def test_several_ranks_need_a_process_group(daemon: Daemon) -> None:
    with (
        PCcheckClient("lone", 0, 2, socket=daemon.socket) as client,
        pytest.raises(UsageError, match=r"init_process_group\(\) before should_checkpoint\(\)"),
    ):
        client.should_checkpoint(1)


@pytest.mark.parametrize("slowdown", [1, 0.97, "3%", float("nan")])
def test_a_slowdown_is_a_factor_above_one(slowdown: float) -> None:
    with pytest.raises(UsageError, match=r"slowdown=1\.03 allows"):
        PCcheckClient("odd", slowdown=slowdown)
