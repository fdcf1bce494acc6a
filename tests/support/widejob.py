"""One job on several nodes: a daemon for each, and the store that torchrun would bring."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.daemon import Daemon
from tests.support.torchstore import TorchStore
from tests.support.trainer import Connect, RemoteError, Trainer

COUNTS = [300_000, 11]
JOB = "wide"


def ranks(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore, run: str = "run",
    per_node: int = 1, **options: object,
) -> list[Trainer]:  # fmt: skip
    """The ranks of a start: `per_node` on each node, in a row."""
    return [
        one_rank(start_trainer, nodes, store, run, rank, per_node, **options)
        for rank in range(per_node * len(nodes))
    ]


def one_rank(
    start_trainer: Connect, nodes: list[Daemon], store: TorchStore, run: str, rank: int,
    per_node: int = 1, **options: object,
) -> Trainer:  # fmt: skip
    return start_trainer(
        nodes[rank // per_node], COUNTS, job=JOB, rank=rank, world_size=per_node * len(nodes),
        environment=store.environment(run, per_node, rank % per_node), **options,
    )  # fmt: skip


def save(group: list[Trainer]) -> int:
    """Every rank makes a step; waits until all nodes have its checkpoint."""
    steps = {trainer.step() for trainer in group}
    assert len(steps) == 1
    handles = [trainer.checkpoint() for trainer in group]
    states = [trainer.wait_global(at) for trainer, at in zip(group, handles, strict=True)]
    assert set(states) == {"global"}, states
    return steps.pop()


def restored(group: list[Trainer], **options: object) -> list[int]:
    """All ranks restore at the same time; the steps, whose content was checked."""
    steps = [found["step"] for found in restores(group, **options)]
    assert [t.check(step) for t, step in zip(group, steps, strict=True)] == ["" for _ in group]
    return steps


def restores(group: list[Trainer], **options: object) -> list[dict[str, Any]]:
    """All ranks restore at the same time; what each rank gets."""
    for trainer in group:
        trainer.post("restore", **options)
    return [trainer.answer() for trainer in group]


def refused(group: list[Trainer], **options: object) -> list[str]:
    """Lets all ranks restore at the same time, and returns the error that each rank gets."""
    for trainer in group:
        trainer.post("restore", **options)
    found = []
    for trainer in group:
        with pytest.raises(RemoteError) as caught:
            trainer.answer()
        found.append(caught.value.message)
    return found


def end(group: list[Trainer]) -> None:
    for trainer in group:
        trainer.kill()
