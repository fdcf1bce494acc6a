"""What a daemon keeps of jobs whose trainers have ended: their memory and files for a restart, and
no threads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from pccheck import PCcheckClient, Reader
from tests.support.daemon import Daemon, Start
from tests.support.trainer import Connect
from tests.support.waiting import until

JOBS = 12
AWAY = {"PCC_REST_S": "0.2"}


@pytest.fixture
def start(start_daemon: Start, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Daemon]:
    """Daemons that let a rank rest after 0.2 s without a trainer."""
    for name, value in AWAY.items():
        monkeypatch.setenv(name, value)
    return start_daemon


def writers(daemon: Daemon) -> int:
    found = 0
    for task in Path(f"/proc/{daemon.pid}/task").iterdir():
        with suppress(OSError):  # it has ended
            found += (task / "comm").read_text().startswith("pcc-write")
    return found


def descriptors(daemon: Daemon) -> int:
    return len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))


def save(daemon: Daemon, job: str, step: int) -> None:
    with PCcheckClient(job=job, socket=daemon.socket, on_error="raise") as client:
        client.adopt()
        client.checkpoint({"at": torch.full((9,), step)}, step=step).wait_durable(60)


def test_jobs_whose_trainers_have_ended_keep_no_writers(start: Callable[..., Daemon]) -> None:
    daemon = start()
    for number in range(JOBS):
        save(daemon, f"job{number}", 1)
    until(lambda: writers(daemon) == 0)
    before = descriptors(daemon)
    save(daemon, "job0", 2)  # its writers come back, and go again
    until(lambda: writers(daemon) == 0)
    assert descriptors(daemon) <= before + 8  # those of a front, which ends later
    with PCcheckClient(job="job0", socket=daemon.socket) as client:
        assert client.recover().state["at"].tolist() == [2] * 9
        assert writers(daemon) > 0


def test_a_killed_trainer_finds_its_last_copy_after_a_rest(
    start: Callable[..., Daemon], start_trainer: Connect
) -> None:
    daemon = start("--max-bandwidth", "16MiB")
    trainer = start_trainer(daemon)
    trainer.step(3)
    trainer.wait_copied(trainer.checkpoint())  # it is written while no trainer is here
    trainer.kill()
    until(lambda: writers(daemon) == 0)
    cached = daemon.status()["ranks"][0]["chunks"]
    assert cached["cached"] > 0, cached
    trainer = start_trainer(daemon)
    assert trainer.restored() == (3, "")
    trainer.step()
    assert trainer.wait_durable(trainer.checkpoint()) == "durable"


def test_ranks_of_a_job_rest_and_save_together_again(
    start: Callable[..., Daemon], start_trainer: Connect
) -> None:
    daemon = start()
    for last in (0, 2):
        group = [
            start_trainer(daemon, rank=rank, world_size=2, environment={"LOCAL_WORLD_SIZE": "2"})
            for rank in (0, 1)
        ]
        if last:
            assert [trainer.restore()["step"] for trainer in group] == [last, last]
        for trainer in group:
            trainer.step(2)
        for trainer, handle in [(trainer, trainer.checkpoint()) for trainer in group]:
            assert trainer.wait_global(handle) == "global"
        for trainer in group:
            trainer.close()
        until(lambda: writers(daemon) == 0)


def test_a_rank_that_is_read_while_it_rests_is_whole(start: Callable[..., Daemon]) -> None:
    daemon = start()
    save(daemon, "job", 1)
    with Reader("job", socket=daemon.socket) as reader, reader.open() as opened:
        until(lambda: writers(daemon) == 0)
        assert opened.read("at").tolist() == [1] * 9
    save(daemon, "job", 2)
