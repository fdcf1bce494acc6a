"""replicated=True: the ranks of plain DDP store one copy together; any number of ranks reads it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_native import catalog
from tests.support.ctl import Ctl
from tests.support.daemon import Daemon, Start
from tests.support.trainer import Connect, RemoteError, Trainer, mismatch
from tests.support.volumes import damage

COUNTS = [300_000, 11, 120_000, 70_001, 5]
PAYLOAD = 4 * sum(COUNTS)


def ranks(connect: Connect, daemon: Daemon, world_size: int, **options: object) -> list[Trainer]:
    options = {"replicated": True} | options
    return [
        connect(
            daemon, COUNTS, rank=rank, world_size=world_size,
            environment={"LOCAL_WORLD_SIZE": str(world_size)}, **options,
        )
        for rank in range(world_size)
    ]  # fmt: skip


def train(group: list[Trainer], steps: int) -> None:
    for trainer in group:
        trainer.step(steps)
    handles = [(trainer, trainer.checkpoint()) for trainer in group]
    for trainer, handle in handles:
        assert trainer.wait_global(handle) == ("global" if len(group) > 1 else "durable")


def kill(group: list[Trainer]) -> None:
    for trainer in group:
        trainer.kill()


@pytest.mark.parametrize("more", [[7], [500_000]])
def test_ranks_with_different_tensors_do_not_save_what_none_can_restore(
    daemon: Daemon, start_trainer: Connect, more: list[int]
) -> None:
    """Only rank 0 attaches an averaged model: each rank would divide the state in its own way, and
    the stored parts would not fit together."""
    group = [
        start_trainer(
            daemon, COUNTS + (more if rank == 0 else []), rank=rank, world_size=2,
            replicated=True, environment={"LOCAL_WORLD_SIZE": "2"},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    for trainer in group:
        trainer.step()
    handles = [trainer.checkpoint() for trainer in group]
    why = "have attached different tensors with replicated=True"
    for trainer, handle in zip(group, handles, strict=True):
        with pytest.raises(RemoteError, match=why):
            trainer.wait_global(handle)


def test_ranks_that_attach_in_another_order_do_not_mix_what_they_store(
    daemon: Daemon, start_trainer: Connect
) -> None:
    """Two models of the same shapes: each rank would store a part of another one."""
    group = ranks(start_trainer, daemon, 2, attach=False)
    for trainer, names in zip(group, ("ab", "ba"), strict=True):
        trainer.evaluate(functools.partial(attach_models, names))
    handles = [trainer.checkpoint(step=1) for trainer in group]
    for trainer, handle in zip(group, handles, strict=True):
        with pytest.raises(RemoteError, match="in another order"):
            trainer.wait_global(handle)


def attach_models(names: str, trainer: Any) -> None:
    trainer.client.attach(**{name: torch.nn.Linear(8, 8) for name in names})


@pytest.mark.parametrize("again", [1, 2, 3])
def test_any_number_of_ranks_restores_what_two_have_stored(
    daemon: Daemon, start_trainer: Connect, again: int
) -> None:
    group = ranks(start_trainer, daemon, 2)
    train(group, 3)
    kill(group)
    if again == 2:
        daemon.kill()
        daemon.start()
    group = ranks(start_trainer, daemon, again)
    assert [trainer.restore()["step"] for trainer in group] == [3] * again
    assert [trainer.check(3) for trainer in group] == [""] * again
    train(group, 2)
    kill(group)
    group = ranks(start_trainer, daemon, 2)
    assert [trainer.restore()["step"] for trainer in group] == [5, 5]
    assert [trainer.check(5) for trainer in group] == ["", ""]
    assert [trainer.recover()["wrong"] for trainer in group] == ["", ""]


def test_what_is_listed_is_restored_whatever_the_world(
    start_daemon: Start, start_trainer: Connect
) -> None:
    """steps() and restore(step=) know the same checkpoints, with one rank and with several."""
    daemon = start_daemon("--slots", "6")
    group = ranks(start_trainer, daemon, 2)
    train(group, 3)
    group[0].evaluate(pins_three)
    kill(group)
    for world, there in ((1, [3]), (2, [4, 3]), (1, [5, 4, 3])):
        group = ranks(start_trainer, daemon, world)
        assert [trainer.restore()["step"] for trainer in group] == [there[0]] * world
        assert [trainer.evaluate(listed) for trainer in group] == [there] * world
        for step in there[::-1]:
            assert [trainer.evaluate(goes_back(step)) for trainer in group] == [step] * world
            assert [trainer.check(step) for trainer in group] == [""] * world
        for trainer in group:
            trainer.restore()
        train(group, 1)
        kill(group)


def pins_three(trainer: Any) -> None:
    trainer.client.pin(3)


def listed(trainer: Any) -> list[int]:
    return [one.step for one in trainer.client.steps()]


def goes_back(step: int) -> Callable[[Any], int]:
    return functools.partial(_goes_back, step)


def _goes_back(step: int, trainer: Any) -> int:
    done: int = trainer.client.restore(step=step).step
    return done


def test_each_rank_stores_its_part_only(daemon: Daemon, start_trainer: Connect) -> None:
    group = ranks(start_trainer, daemon, 3)
    train(group, 1)
    kill(group)
    stored = {one.id.rank: one.payload_bytes for one in catalog.scan(daemon.storage).checkpoints}
    assert sorted(stored) == [0, 1, 2]
    assert sum(stored.values()) < 1.2 * PAYLOAD
    assert max(stored.values()) < 0.7 * PAYLOAD


def test_the_whole_is_exported_from_any_rank(
    daemon: Daemon, start_trainer: Connect, ctl: Ctl, tmp_path: Path
) -> None:
    group = ranks(start_trainer, daemon, 2)
    train(group, 4)
    kill(group)
    for online in (True, False):
        if not online:
            daemon.stop()
        storage, place = (None, ["--socket", daemon.socket]) if online else (daemon.storage, [])
        for rank in range(2):
            target = tmp_path / f"{online}-{rank}.pt"
            ran = ctl(storage, *place, "export", "job", "--rank", rank, "--output", target)
            assert ran.code == 0, ran.err
            state = torch.load(target, weights_only=True)["model"]
            parts = [state[f"parts.{index}"] for index in range(len(COUNTS))]
            assert mismatch(parts, 4) == ""


def test_sharded_state_is_not_taken_for_replicated(daemon: Daemon, start_trainer: Connect) -> None:
    group = ranks(start_trainer, daemon, 2, replicated=False)
    train(group, 2)
    kill(group)
    group = ranks(start_trainer, daemon, 3)
    with pytest.raises(RemoteError, match="saved by 2 ranks without replicated=True"):
        group[0].restore()


def test_a_rank_whose_part_is_damaged_has_no_step_mixed(
    daemon: Daemon, start_trainer: Connect
) -> None:
    group = ranks(start_trainer, daemon, 2)
    for _ in range(3):
        train(group, 1)
    kill(group)
    daemon.stop()
    damage(daemon.storage, 3, rank=1, at=4096)
    daemon.start()
    group = ranks(start_trainer, daemon, 2)
    with pytest.raises(RemoteError, match="Damaged"):
        group[0].restore()  # its own part is whole, what rank 1 stores for it is not
    kill(group)
    group = ranks(start_trainer, daemon, 2)
    assert [trainer.restore()["step"] for trainer in group] == [2, 2]
    assert [trainer.check(2) for trainer in group] == ["", ""]
