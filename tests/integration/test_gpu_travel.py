"""Tensors on GPUs whose bytes lie on other nodes: they pass through host memory."""

from __future__ import annotations

from tests.support.gpunode import Node, Start
from tests.support.gputrainer import GpuTrainer
from tests.support.torchstore import TorchStore


def ranks(nodes: list[Node], store: TorchStore, run: str) -> list[GpuTrainer]:
    return [
        node.connect(rank=rank, world_size=2, environment=store.environment(run, 1, 0))
        for rank, node in enumerate(nodes)
    ]


def test_gpu_tensors_come_from_another_node(start_node: Start, store: TorchStore) -> None:
    nodes = [start_node("--listen", "127.0.0.1") for _ in range(2)]
    group = ranks(nodes, store, "run")
    for trainer in group:
        trainer.step()
    handles = [trainer.checkpoint() for trainer in group]
    for trainer, handle in zip(group, handles, strict=True):
        assert trainer.wait_global(handle) == "global"
    for trainer in group:
        trainer.kill()
    swapped = ranks(nodes[::-1], store, "swapped")
    for trainer in swapped:
        trainer.post("restore")
    found = [trainer.answer() for trainer in swapped]
    assert [(one["step"], one["source"]) for one in found] == [(1, "peer")] * 2
    assert [trainer.check(1) for trainer in swapped] == ["", ""]
