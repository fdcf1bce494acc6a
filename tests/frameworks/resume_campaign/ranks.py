"""Loops of one's own on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.frameworks.resume_campaign.asked import EVERY, STEPS, Asked

WIDTH = 16


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 129), nn.Dropout(0.1), nn.ReLU(), nn.LayerNorm(129), nn.Linear(129, 5)
    )


def ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(network())


def fsdp2() -> nn.Module:
    """Neither 129 nor 5 can be divided by two."""
    model, mesh = network(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


SHAPES: dict[str, Callable[[], nn.Module]] = {"ddp": ddp, "fsdp2": fsdp2}


def run(shape: str, saves: str, folder: str, socket: str, kill_at: int) -> None:
    asked = Asked(saves, Path(folder), socket, kill_at)
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = SHAPES[shape]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    torch.manual_seed(1000 + dist.get_rank())  # other data and dropout on every rank
    options = {"replicated": True} if shape == "ddp" and saves == "pccheck" else {}
    with asked.saver(**options) as saver:
        saver.attach(rng=True, model=model, optimizer=optimizer, schedule=schedule)
        first = saver.restore().step + 1
        asked.began(first - 1)
        for step in range(first, STEPS + 1):
            loss = model(torch.randn(8, WIDTH)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            asked.step(step, loss.detach())
            if step % EVERY == 0:
                saver.checkpoint(step=step)
    asked.ended(model)
    dist.destroy_process_group()
