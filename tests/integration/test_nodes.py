"""One job on two nodes: two daemons, each with a storage directory of its own, and the store that
torchrun would bring."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.daemon import Daemon, Start
from tests.support.torchstore import TorchStore
from tests.support.trainer import Connect, Trainer

COUNTS = [300_000, 11]
JOB = "wide"


@pytest.fixture
def store() -> Iterator[TorchStore]:
    with TorchStore() as server:
        yield server


@pytest.fixture
def nodes(start_daemon: Start) -> list[Daemon]:
    return [start_daemon(), start_daemon()]


def ranks(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore, run: str = "run",
    per_node: int = 1, **options: object,
) -> list[Trainer]:  # fmt: skip
    """The ranks of a start: `per_node` on each node, in a row."""
    world = per_node * len(nodes)
    return [
        start_trainer(
            nodes[rank // per_node], COUNTS, job=JOB, rank=rank, world_size=world,
            environment=store.environment(run, per_node, rank % per_node), **options,
        )
        for rank in range(world)
    ]  # fmt: skip


def save(group: list[Trainer]) -> int:
    """Every rank makes a step; waits until all nodes have its checkpoint."""
    steps = {trainer.step() for trainer in group}
    assert len(steps) == 1
    handles = [trainer.checkpoint() for trainer in group]
    states = [trainer.wait_global(at) for trainer, at in zip(group, handles, strict=True)]
    assert set(states) == {"global"}, states
    return steps.pop()


def restored(group: list[Trainer]) -> list[int]:
    """All ranks restore at the same time; the steps, whose content was checked."""
    for trainer in group:
        trainer.post("restore")
    steps = [trainer.answer()["step"] for trainer in group]
    assert [t.check(step) for t, step in zip(group, steps, strict=True)] == ["" for _ in group]
    return steps


def test_a_checkpoint_of_two_nodes_becomes_global(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store)
    for step in (1, 2, 3):
        assert save(group) == step


def test_all_ranks_restore_one_step(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore
) -> None:
    group = ranks(start_trainer, nodes, store)
    save(group)
    save(group)
    group[0].step()
    group[0].wait_durable(group[0].checkpoint())  # rank 1 ends without it
    for trainer in group:
        trainer.kill()
    again = ranks(start_trainer, nodes, store, run="again")
    assert restored(again) == [2, 2]
    assert save(again) == 3
