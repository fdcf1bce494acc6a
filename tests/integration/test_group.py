"""Several ranks on one node: one step for all of them, or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.daemon import Daemon
from tests.support.trainer import RemoteError, Trainer

Start = Callable[..., Daemon]
Connect = Callable[..., Trainer]
COUNTS = [300_000, 11]


def ranks(connect: Connect, daemon: Daemon, launch: str) -> list[Trainer]:
    return [
        connect(
            daemon, COUNTS, rank=rank, world_size=2,
            environment={
                "TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": launch,
                "LOCAL_WORLD_SIZE": "2",
            },
        )
        for rank in range(2)
    ]  # fmt: skip


def test_all_ranks_recover_the_newest_common_step(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon()
    group = ranks(start_trainer, daemon, "0")
    for trainer in group:
        assert not trainer.restore()["found"]
        trainer.step(4)
        trainer.wait_durable(trainer.checkpoint())
    group[0].step()
    group[0].wait_durable(group[0].checkpoint())  # step 5: rank 1 never gets there
    for trainer in group:
        trainer.kill()
    again = ranks(start_trainer, daemon, "1")
    assert [trainer.restore()["step"] for trainer in again] == [4, 4]
    assert [trainer.check(4) for trainer in again] == ["", ""]


def test_the_last_common_step_is_not_recycled(start_daemon: Start, start_trainer: Connect) -> None:
    daemon = start_daemon("--slots", "4", "--keep", "1")
    group = ranks(start_trainer, daemon, "0")
    for trainer in group:
        trainer.restore()
        trainer.step()
        trainer.wait_durable(trainer.checkpoint())
    for _ in range(8):  # rank 0 runs ahead, far beyond its slots
        group[0].step()
        group[0].wait_durable(group[0].checkpoint())
    for trainer in group:
        trainer.kill()
    again = ranks(start_trainer, daemon, "1")
    assert [trainer.restore()["step"] for trainer in again] == [1, 1]


def test_a_rank_without_checkpoints_is_refused_not_mixed(
    start_daemon: Start, start_trainer: Connect
) -> None:
    daemon = start_daemon()
    group = ranks(start_trainer, daemon, "0")
    group[0].step()
    group[0].wait_durable(group[0].checkpoint())
    for trainer in group:
        trainer.kill()
    again = ranks(start_trainer, daemon, "1")
    for trainer in again:
        with pytest.raises(RemoteError, match="rank"):
            trainer.restore()
