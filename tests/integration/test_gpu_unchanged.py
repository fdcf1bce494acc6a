"""Unchanged tensors on a GPU are written once, by pull or push; checkpoints that refer to them are
restored to the GPU after kills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.gpunode import Start
from tests.support.gputrainer import GpuTrainer, Part, raw
from tests.support.volumes import bases

FROZEN = 9 << 20
#: Frozen and trained in turn: each GPU's section has what is frozen first.
PARTS = (
    Part(40_000), Part(FROZEN // 8, kind="frozen"), Part(7, "bfloat16"),
    Part(5_000, kind="buffer"), Part(FROZEN // 8, kind="frozen"), Part(60_000),
)  # fmt: skip
CHANGES = 3 << 20  # at most: moments, too, and whole blocks


def update(trainer: Any) -> None:
    """A step that changes no frozen tensor."""
    trainer.optimizer.step()


def train(trainer: GpuTrainer) -> None:
    trainer.evaluate(update)
    assert trainer.wait_durable(trainer.checkpoint()) == "durable"


def state_of(trainer: Any) -> list[torch.Tensor]:
    trainer.gpu.synchronize()
    moments = [entry["moment"] for entry in trainer.optimizer.state.values()]
    tensors = [*trainer.model.state_dict().values(), *moments]
    return [raw(tensor).cpu().clone() for tensor in tensors]


def recovered(trainer: Any) -> list[torch.Tensor]:
    state = trainer.client.recover().state
    moments = [entry["moment"] for entry in state["optimizer"]["state"].values()]
    return [raw(tensor) for tensor in (*state["model"].values(), *moments)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("transfer", ["pull", "push"])
def test_frozen_on_a_gpu(start_node: Start, transfer: str) -> None:
    node = start_node("--block-bytes", "16KiB", kept=True)
    options = {} if transfer == "pull" else {"transfer": "push"}
    trainer = node.connect(PARTS, **options)
    for _ in range(4):
        train(trainer)
    assert node.transfer()[0] == transfer
    (rank,) = node.status()["ranks"]
    sizes = {one["step"]: one["written_bytes"] for one in rank["checkpoints"]}
    assert sizes[1] > FROZEN and all(sizes[step] < CHANGES for step in (2, 3, 4)), sizes
    assert bases(node.daemon.storage)[0, 4] == 1
    wanted = trainer.evaluate(state_of)
    assert same(trainer.evaluate(recovered), wanted)  # from DRAM
    trainer.kill()

    for number in range(3):
        node.daemon.kill()
        node.start()
        trainer = node.connect(PARTS, **options)
        assert trainer.restore()["step"] == 4 + 2 * number
        assert same(trainer.evaluate(state_of), wanted)
        train(trainer)
        trainer.evaluate(update)
        wanted = trainer.evaluate(state_of)
        assert trainer.wait_copied(trainer.checkpoint()) in ("copied", "writing", "durable")
        trainer.kill()  # then, in the loop, its daemon: the next one has what was copied
