"""Two ranks with GPUs, and what they do in step with each other."""

from __future__ import annotations

import time
from typing import Any

from pccheck.state.devices import HOST

from .gpunode import Node
from .gputrainer import GpuTrainer, Part
from .waiting import until


def ranks(nodes: list[Node], parts: tuple[Part, ...], **options: Any) -> list[GpuTrainer]:
    """Two, with a GPU each, on one node or on two."""
    devices = range(2) if len(nodes) == 1 else (0, 0)
    return [
        node.connect(
            tuple(one._replace(device=device) if one.device != HOST else one for one in parts),
            rank=rank, world_size=2, **options,
        )
        for rank, (node, device) in enumerate(zip(nodes * (3 - len(nodes)), devices, strict=True))
    ]  # fmt: skip


def launched(launch: int) -> dict[str, Any]:
    """Of the ranks of one node."""
    return {
        "environment": {
            "TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_RESTART_COUNT": str(launch),
            "LOCAL_WORLD_SIZE": "2",
        }
    }  # fmt: skip


def restored(group: list[GpuTrainer]) -> list[tuple[int, str]]:
    for trainer in group:
        trainer.post("restore")
    found = [trainer.answer()["step"] for trainer in group]
    return [(step, trainer.check(step)) for step, trainer in zip(found, group, strict=True)]


def save(group: list[GpuTrainer], **to: Any) -> list[int]:
    """The next step."""
    for trainer in group:
        trainer.step()
    return [trainer.checkpoint(**to) for trainer in group]


def handed_over(trainer: Any) -> None:
    """The daemon has what is not on the device."""
    save = trainer.handles[-1]._in_flight
    assert save.native.wait(save.snapshot, "host_read", time.monotonic_ns() + 10**10)
    until(lambda: trainer.handles[-1].state.name == "COPYING")


def after_an_error(trainer: Any) -> tuple[str, str]:
    trainer.client.close()
    return trainer.handles[-1].state.name, trainer.handles[-1].reason
