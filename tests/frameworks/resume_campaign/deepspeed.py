"""DeepSpeed's engine."""

from __future__ import annotations

import os
from pathlib import Path

import deepspeed
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from pccheck.integrations.deepspeed import install
from tests.frameworks.deepspeed_training import ITEMS, WIDTH, make_engine
from tests.frameworks.resume_campaign.asked import EVERY, STEPS, Asked

#: Stage, and whether in bfloat16.
SHAPES = {"zero1-bfloat16": (1, True), "zero2": (2, False)}


def run(shape: str, saves: str, folder: str, socket: str, kill_at: int) -> None:
    asked = Asked(saves, Path(folder), socket, kill_at)
    alone = {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update({key: value for key, value in alone.items() if key not in os.environ})
    deepspeed.init_distributed("gloo", verbose=False)
    stage, half = SHAPES[shape]
    engine = make_engine(stage, half, hidden=64)
    rank, ranks = engine.global_rank, engine.world_size
    items = torch.linspace(-1, 1, ITEMS * WIDTH).reshape(ITEMS, WIDTH) ** 3
    sampler = torch.utils.data.DistributedSampler(range(ITEMS), ranks, rank, seed=3)
    loader = StatefulDataLoader(items, batch_size=2, sampler=sampler)
    torch.manual_seed(100 + rank)
    if saves == "pccheck":
        install(engine, loader=loader, **asked.options)
    files = str(asked.folder / "own")
    done = {"epoch": 0}
    path, state = engine.load_checkpoint(files) if saves else (None, {})
    if path:
        done = state["done"]
    asked.began(engine.global_steps)
    losses = []
    while engine.global_steps < STEPS:
        sampler.set_epoch(done["epoch"])
        for batch in loader:
            loss = engine(batch.bfloat16() if half else batch).float().square().mean()
            losses.append(loss.detach())
            boundary = engine.is_gradient_accumulation_boundary()
            engine.backward(loss)
            engine.step()
            if not boundary:
                continue
            asked.step(engine.global_steps, *losses)
            losses = []
            if engine.global_steps % EVERY == 0 and saves:
                engine.save_checkpoint(files, client_state={"done": done})
            if engine.global_steps == STEPS:
                break
        done["epoch"] += 1
    # DeepSpeed saves the buffers of rank 0 only (docs/frameworks.md).
    asked.ended(engine.module if rank == 0 else nn.ParameterList(engine.module.parameters()))
    engine.destroy()
